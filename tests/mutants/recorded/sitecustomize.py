"""Recorder of executed lines, imported by every Python whose PYTHONPATH begins with this folder.

Each process writes a data file of its own beside this file. Lines count for the test that `current` names when the
process begins, or is forked.
"""

import os
from pathlib import Path

import coverage

HERE = Path(__file__).parent
COVERAGE: coverage.Coverage


def begin() -> None:
    """Start recording in this process."""
    global COVERAGE
    COVERAGE = coverage.Coverage(
        data_file=str(HERE / "lines" / "data"), data_suffix=True, config_file=str(HERE / "coverage.ini"), auto_data=True
    )
    COVERAGE.start()
    COVERAGE.switch_context((HERE / "current").read_text())


def begin_again() -> None:
    """Discard the parent's lines, which the parent writes."""
    COVERAGE.stop()
    COVERAGE._auto_save = False
    begin()


begin()
os.register_at_fork(after_in_child=begin_again)
