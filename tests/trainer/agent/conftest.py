"""Local jobs that are ended with their test."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.job import LocalJob, until

STAND_IN = Path(__file__).parent / "stand_in.py"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., LocalJob]]:
    """Makes a local job whose ranks are stand-in scripts with the given orders."""
    made: list[LocalJob] = []

    def make(*orders: str, folder: str = "", **config: Any) -> LocalJob:
        command = [sys.executable, str(STAND_IN), *orders]
        found = LocalJob(tmp_path / folder, **{"command": command, **config})
        made.append(found)
        return found

    yield make
    for one in made:
        one.close()
        until(lambda one=one: not one.processes(), 5, lambda one=one: f"left behind: {one.processes()}")
