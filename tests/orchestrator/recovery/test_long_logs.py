"""Every pattern that runs over what programs print takes time in proportion to it, whatever it is."""

import re
import time

import pytest

from orchestrator.cli.live_jobs import first_error
from orchestrator.cli.terminal import render
from trainer.agent.ladder import command_failures
from trainer.agent.rank_processes import rank_exit
from trainer.protocol.failures.failure_patterns import TABLE

MODULES = (first_error, render, rank_exit, rank_exit, command_failures, command_failures)
PATTERNS = {
    **{f"{module.__name__}.{name}": value for module in MODULES for name, value in vars(module).items()
       if isinstance(value, re.Pattern)},
    **{f"{row.meaning} {row.pattern}": re.compile(row.pattern) for row in TABLE},
}  # fmt: skip
KIB = 1024
UNITS = {"blank lines": "\n", "spaces": " ", "one long line": "x", "carriage returns": "\r", "escapes": "\x1b["}


def seconds(pattern: re.Pattern[str], text: str) -> float:
    """Of this thread's own work, so that a busy machine changes nothing."""
    start = time.thread_time()
    for _ in pattern.finditer(text):
        pass
    return time.thread_time() - start


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_takes_time_in_proportion_to_the_log(name: str, unit: str) -> None:
    pattern = PATTERNS[name]
    few, more = (unit * (size * KIB // len(unit)) for size in (4, 32))
    # Eight times the text takes a quadratic one 64 times as long, half a second and more.
    assert seconds(pattern, more) < 24 * seconds(pattern, few) + 0.1
    # A quarter of a tail in a sixteenth of the half minute that the whole one may take.
    assert seconds(pattern, unit * (256 * KIB // len(unit))) < 30 / 16
