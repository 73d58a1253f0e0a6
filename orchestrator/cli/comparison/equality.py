"""Bit-for-bit comparison of the steps that runs share."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import number, open_regular
from trainer.protocol.run_dir import RunDir


def metrics_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every complete line with its step; nothing if the file is missing or not visible."""
    try:
        stream = open_regular(path)
    except OSError:
        return
    with stream:
        for line in stream:
            try:
                fields = json.loads(line)
                yield int(fields["step"]), fields
            except (ValueError, KeyError, TypeError, OverflowError):
                continue  # torn by a kill, or written by a version with another format


LOSS, GRADIENT_NORM = "loss", "gradient norm"
_METRIC, _VALIDATION = "metric ", "validation "
"""Prefixes of the names of the workload's numbers; the second sorts after the first."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """Numbers computed by one run, as `computed_part` text by step; for a step that was trained again, the newest."""

    steps: Mapping[int, str]
    validations: Mapping[int, str]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first number that differs between runs. `values` is in the order of the runs, with None if missing."""

    step: int
    what: str
    values: tuple[float | None, ...]

    def __str__(self) -> str:
        *others, last = ("none" if value is None else repr(value) for value in self.values)
        return f"first difference at step {self.step}: {self.what} {', '.join(others)} and {last}"


@dataclass(frozen=True, kw_only=True)
class Equality:
    """Number of shared steps and validations, the compared quantities, and the first difference, if any."""

    steps: int
    validations: int
    compared: tuple[str, ...]
    difference: Difference | None

    @property
    def equal(self) -> bool | None:
        """Whether all shared numbers are equal; None without a shared step."""
        return self.difference is None if self.steps else None

    def __str__(self) -> str:
        if self.difference is not None:
            return str(self.difference)
        said = f"equal bit for bit: {_format_full_count(self.steps, 'shared step')} ({', '.join(self.compared)})"
        return said + (f", {_format_full_count(self.validations, 'validation')}" if self.validations else "")


def _format_full_count(count: int, what: str) -> str:
    return f"{count} of {count} {what}{'' if count == 1 else 's'}"


def computed_part(fields: Mapping[str, Any]) -> str:
    """Return loss, gradient norm and the workload's numbers of a line as compact JSON, without times and speeds."""
    return json.dumps([fields.get("loss"), fields.get("grad_norm"), fields.get("metrics")], separators=(",", ":"))


def read_validations(run_dir: Path) -> dict[int, str]:
    """Return the validations of a run's attempts by step; empty without any or if the folder is not visible."""
    files = [attempt.validation for attempt in RunDir(run_dir).all_attempts()]
    return {step: computed_part(fields) for file in files for step, fields in metrics_lines(file)}


def compare_computed(runs: Sequence[Computed]) -> Equality:
    """Compare two or more runs step by step. The validation of a step comes after the step itself."""
    steps = set.intersection(*(set(run.steps) for run in runs))
    validations = set.intersection(*(set(run.validations) for run in runs))
    lines = sorted([*((step, _METRIC) for step in steps), *((step, _VALIDATION) for step in validations)])
    found = (_difference(step, kind, runs) for step, kind in lines)
    difference = next((one for one in found if one is not None), None)
    with_metrics = any(not run.steps[step].endswith(",null]") for run in runs for step in steps)
    compared = (LOSS, GRADIENT_NORM, *(("metrics",) if with_metrics else ()))
    return Equality(steps=len(steps), validations=len(validations), compared=compared, difference=difference)


def _difference(step: int, kind: str, runs: Sequence[Computed]) -> Difference | None:
    parts = [(run.validations if kind == _VALIDATION else run.steps)[step] for run in runs]
    if len(set(parts)) == 1:
        return None
    numbers = [_numbers(part, kind) for part in parts]
    for name in dict.fromkeys(name for one in numbers for name in one):
        values = tuple(one.get(name) for one in numbers)
        if len({repr(value) for value in values}) > 1:  # bitwise: NaN equals NaN, and 0.0 differs from -0.0
            return Difference(step=step, what=name, values=values)
    return None


def _numbers(part: str, kind: str) -> dict[str, float | None]:
    loss, grad_norm, metrics = json.loads(part)
    own = {f"{kind}{name}": _number(value) for name, value in (metrics if isinstance(metrics, dict) else {}).items()}
    return {LOSS: _number(loss), GRADIENT_NORM: _number(grad_norm), **own}


def _number(value: Any) -> float | None:
    try:
        return number(value)
    except (KeyError, TypeError, ValueError):
        return None
