"""Comparison of the steps that a restart trains again with the earlier records of these steps."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from checkpointing.storage.durable import read_json
from trainer.protocol.run_dir import RunDir
from trainer.protocol.user_code.code_record import CodeRecord
from trainer.worker.reporting.stderr_best_effort import write_stderr
from trainer.worker.restore_test.comparison import find_difference, has_other_code

TAIL_BYTES = 1 << 20
"""Maximum bytes read from a steps file, enough for thousands of lines."""

MAX_ATTEMPTS = 20
"""Maximum number of attempts whose steps are read."""

_NUMERIC = ("model", "train", "optimizer", "data", "parallel", "workload", "env", "validation")
"""Configuration sections that affect a step's numbers. World size and software are compared line by line."""

_EQUAL = ("position", "software")
"""Values that must be equal in two lines for their numbers to be comparable."""

Recorded = Mapping[int, Sequence[Mapping[str, Any]]]
"""Lines of steps.jsonl, keyed by step. A step may have been trained more than once."""


class RetrainedSteps:
    """Compares the steps after a restart with those before it, and reports the first difference."""

    def __init__(
        self, recorded: Recorded, world: int, explains: Callable[[int], bool], report: Callable[[int, str], object]
    ) -> None:
        """`explains(attempt)` returns whether the code has changed since then. `report` takes the step and a reason."""
        self._recorded, self._world, self._explains, self._report = recorded, world, explains, report

    def step_ended(self, step: int, values: Mapping[str, Any]) -> None:
        """Compare loss, gradient norm and learning rate bit for bit. Stop at the first step that differs."""
        known = self._recorded.get(step)
        if not known:  # never trained before, or the line was lost
            return
        lines = [
            line
            for line in known
            if line.get("world") == self._world and all(line.get(name) == values[name] for name in _EQUAL)
        ]
        found = [find_difference(step, values, line) for line in lines]
        if all(found):
            self._recorded = {}
        if found and all(found) and not any(self._explains(line["attempt"]) for line in lines):
            self._report(step, found[-1])


def read_retrained(run: RunDir, attempt: int, restored: int) -> Recorded:
    """Return the recorded steps after `restored` from the newest attempts with the same settings."""
    found: dict[int, list[dict[str, Any]]] = {}
    settings = None
    for number in range(attempt, max(0, attempt - MAX_ATTEMPTS), -1):
        of_attempt: dict[int, list[dict[str, Any]]] = {}
        try:
            of_settings = _numeric_settings(run, number)
            lines = _last_lines(run, number)
        except (OSError, ValueError, RecursionError) as error:
            write_stderr(f"orch: steps of attempt {number} and older ones are not compared: {error}")
            break
        settings = of_settings if settings is None else settings
        if of_settings != settings:
            break
        for line in lines:
            step = line.get("step")
            if isinstance(step, int) and step > restored:
                of_attempt.setdefault(step, []).append(line)
        found = of_attempt | found
    return found


def _numeric_settings(run: RunDir, attempt: int) -> dict[str, Any]:
    """Return the parts of an attempt's configuration that affect numbers. Raises OSError or ValueError."""
    config = read_json(run.attempt_config(attempt))
    if not isinstance(config, dict):
        raise ValueError(f"{run.attempt_config(attempt)} has no settings")
    return {section: config.get(section) for section in _NUMERIC}


def has_new_code(run: RunDir, before: int, now: int) -> bool:
    """Return whether attempt `now` may train with code or packages that differ from attempt `before`'s."""
    first, last = run.attempt(before), run.attempt(now)
    try:
        return before != now and has_other_code(first, CodeRecord.read(last.code))
    except OSError:
        return True


def _last_lines(run: RunDir, number: int) -> list[dict[str, Any]]:
    """Return the last complete lines. The first line read is usually incomplete and is skipped."""
    lines = list[dict[str, Any]]()
    try:
        with run.attempt(number).metrics.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - TAIL_BYTES))
            read = stream.read().splitlines()
    except FileNotFoundError:
        return []
    for text in read:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines
