"""Comparison of a run's recorded steps with those of a restore test, and what a difference proves."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import number, read_json
from trainer.protocol.config import config_digest
from trainer.protocol.events import EventKind, read_events
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.protocol.user_code.code_record import CodeRecord, changed_files, changed_packages, package_words

COMPARED = ("loss", "grad_norm", "lr")
BOUNDED_STEPS = 5
"""Maximum number of steps compared if bits may differ, because differences grow."""

OTHER_SOFTWARE = "other_software"
"""Key of a recorded step that was trained with different versions, code, thread count or device."""
OTHER_WORDS = "the run trained that step with different software or code"

BOUNDS = {
    "float32": {"loss": 1e-6, "grad_norm": 1e-4},
    "bfloat16": {"loss": 3e-4, "grad_norm": 3e-2},
    "float16": {"loss": 3e-4, "grad_norm": 3e-2},
}
"""Largest accepted relative differences in the first step on another layout or machine, keyed by `train.dtype`. In the
n-th step, n times as much is accepted, because differences grow.

The bounds are at least three times, and mostly ten times, the differences measured with healthy checkpoints on 1 to 8
ranks. See docs/restore-tests.md."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of a comparison: the number of steps `compared`, and the first `difference` in words.

    `why_no_verdict` says why the recorded steps make the difference inconclusive. `largest` is the largest
    relative difference found.
    """

    compared: int
    difference: str = ""
    why_no_verdict: str = ""
    largest: float = 0.0


def recorded_steps(
    run: RunDir, steps: Collection[int], digest: str, saved_by: int = 0, code: CodeRecord | None = None
) -> dict[int, list[dict[str, float]]]:
    """Return the records of these steps, with repetitions, from the run's attempts with the config `digest`.

    They include the step after the last step, which a finished run computes as a probe. Steps trained with software
    other than attempt `saved_by`'s, or code other than `code`, have the key OTHER_SOFTWARE. Raises OSError.
    """
    found: dict[int, list[dict[str, float]]] = {step: [] for step in steps}
    other = False
    for attempt in run.all_attempts():
        other = other or _changed_software(attempt, saved_by)
        if digest and config_digest(run.attempt_config(attempt.number)) != digest:
            if attempt.number > saved_by:
                break  # another config: its steps and all later ones are not comparable
            continue
        marked = {OTHER_SOFTWARE: 1.0} if other or has_other_code(attempt, code) else {}
        for line in (*_lines(attempt.metrics, steps), *_probes(attempt)):
            if line.get("step") in found:
                values = {name: number(line[name]) for name in COMPARED if name in line}
                found[line["step"]].append({**values, **marked})
    return found


def _changed_software(attempt: AttemptDir, saved_by: int) -> bool:
    """Return whether the attempt resumed with different software, after `saved_by` had started."""
    if attempt.number < saved_by or not attempt.events.is_dir():
        return False
    events = [event for path in sorted(attempt.events.glob("ranks-*.jsonl")) for event in read_events(path)[0]]
    changed = [event for event in events if event.kind == EventKind.CHECKPOINT_SOFTWARE]
    return any(attempt.number > saved_by or event.generation > 1 for event in changed)


def has_other_code(attempt: AttemptDir, code: CodeRecord | None) -> bool:
    """Return whether the attempt trained with other code, or with packages that are not known to be the same."""
    if code is None:
        return False
    theirs = CodeRecord.read(attempt.code)
    if theirs is None or theirs.packages is None:
        return code.packages is not None or (theirs is not None and bool(changed_files(theirs, code)))
    return bool(changed_files(theirs, code) or changed_packages(theirs, code))


def other_packages(run: RunDir, saved_by: int, code: CodeRecord | None) -> list[str]:
    """Describe the packages that differ from the saving attempt's or, failing that, the newest's. Raises OSError."""
    attempts = [attempt for attempt in run.all_attempts() if attempt.number == saved_by] or run.all_attempts()[-1:]
    if code is None or code.packages is None or not attempts:
        return []
    theirs = CodeRecord.read(attempts[0].code)
    if theirs is None or theirs.packages is None:
        return [f"the packages of attempt {attempts[0].number} are not known"]
    return package_words(changed_packages(theirs, code))


def _lines(path: Path, steps: Collection[int]) -> Iterator[dict[str, Any]]:
    wanted = [f'"step":{step},'.encode() for step in steps]
    try:
        with path.open("rb") as stream:
            for line in stream:
                if any(each in line for each in wanted):
                    try:
                        values = json.loads(line)
                    except ValueError:
                        continue
                    if isinstance(values, dict):
                        yield values
    except FileNotFoundError:
        return


def _probes(attempt: AttemptDir) -> Iterator[dict[str, Any]]:
    try:
        probe = read_json(attempt.final).get("probe")
    except (FileNotFoundError, ValueError):
        return
    if isinstance(probe, dict):
        yield probe


def compare(
    mine: Mapping[int, Mapping[str, float]],
    recorded: Mapping[int, Sequence[Mapping[str, float]]],
    bounds: Mapping[str, float],
    *,
    exact: bool,
) -> Comparison:
    """Compare the test's steps with the run's, bit for bit if `exact` and the run had the same software.

    Otherwise, apply `bounds`, which are given for the first step. If the run trained a step more than once, it is
    enough that one repetition agrees.
    """
    compared, largest, first = 0, 0.0, min(mine, default=0)
    for step, values in sorted(mine.items()):
        known = recorded.get(step) or []
        other_software = all(OTHER_SOFTWARE in other for other in known)
        if not known or ((other_software or not exact) and step - first >= BOUNDED_STEPS):
            continue
        compared += 1
        allowed = {name: bound * (step - first + 1) for name, bound in bounds.items()}
        judged = [
            _disagreement(step, values, other, {} if exact and OTHER_SOFTWARE not in other else allowed)
            for other in known
        ]
        if all(words for words, _ in judged):
            why = OTHER_WORDS if other_software else ""
            largest = max(size for _, size in judged)
            return Comparison(compared=compared, difference=judged[-1][0], why_no_verdict=why, largest=largest)
        largest = max(largest, min(size for words, size in judged if not words))
    return Comparison(compared=compared, largest=largest)


def find_difference(step: int, values: Mapping[str, float], other: Mapping[str, Any]) -> str:
    """Describe the first number whose bits differ, or return "" if all are equal."""
    known = {name: number(other[name]) for name in COMPARED if name in other}
    return _disagreement(step, values, known, {}, "it was")[0]


def _disagreement(
    step: int, values: Mapping[str, float], other: Mapping[str, float], bounds: Mapping[str, float],
    had: str = "the run had",
) -> tuple[str, float]:  # fmt: skip
    largest = 0.0
    for name in COMPARED:
        if name not in values or name not in other:
            continue
        size = relative_difference(values[name], other[name])
        # The learning rate depends only on the step.
        if not size <= bounds.get(name, 0.0):
            return f"{name} of step {step} is {values[name]!r}, {had} {other[name]!r}", size
        largest = max(largest, size)
    return "", largest


TINY = 1e-9
"""Minimum denominator of a relative difference, so that numbers near zero do not exaggerate it."""


def relative_difference(one: float, other: float) -> float:
    """Return the relative difference, which is 0 for equal bits and infinite if one number is NaN."""
    if one == other or repr(one) == repr(other):
        return 0.0
    size = abs(one - other) / max(abs(one), abs(other), TINY)
    return size if size == size else float("inf")


CODE = "code.user"
STATE_ELSEWHERE = (
    "no fault was found in the checkpoint: the steps of this workload depend on something that no checkpoint contains, "
    "or are not reproducible"
)
_SUMS_ONLY = frozenset({"threads", "cpu", "cpu_model", "kernel_settings"})
"""Software facts that, like a different layout, only change the order of summation."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Numerical conditions of a restore test, compared with those of its run."""

    same_layout: bool
    repeats: bool
    """Whether equal inputs give equal bits on this device."""
    built_in: bool
    promises_equality: bool
    """Whether the program declares deterministic kernels and its data has a fingerprint."""
    has_agreed: bool
    """Whether a checkpoint of the run has already been restored on this layout with equal steps."""
    experts: int = 0
    dtype: str = "float32"
    drawn: bool = False
    """Whether the steps drew random numbers."""
    differs: Collection[str] = ()
    """Identity fields (code.user, env.torch) that differ from the run's."""
    software: Mapping[str, Any] = field(default_factory=dict)
    """Software of the checkpoint that differs from the current software."""

    @property
    def exact(self) -> bool:
        """Whether the test must reproduce the run bit for bit."""
        return self.same_layout and self.repeats and not self.software and not self.differs


def why_not_compared(now: Conditions) -> str:
    """Return why the steps cannot be compared with the run's, or "" if they can."""
    if CODE in now.differs:
        return "the run's own code (code.user) has changed since it trained: its steps are not compared"
    if now.drawn and not now.same_layout:
        return "it draws random numbers, which differ on another layout: its steps are not compared"
    return ""


def why_no_verdict(now: Conditions) -> str:
    """Return why a difference proves nothing about the checkpoint, or "" if it proves a fault.

    At this point, the bytes and values are known to be the saved ones. A difference proves a fault if layout, code,
    data and software are equal, kernels are deterministic, and the program is known to reproduce steps after a restart:
    either it is the built-in workload, or it promises equality and has shown it in an earlier test. If only the layout
    differs, a difference beyond the bounds also proves a fault for the models with which the bounds were measured,
    which are dense float32 models of the built-in workload.
    """
    if now.differs:
        return f"{', '.join(sorted(now.differs))} differ from what the run was trained with"
    if now.exact:
        return "" if now.built_in or (now.promises_equality and now.has_agreed) else STATE_ELSEWHERE
    other = sorted(set(now.software) - _SUMS_ONLY)
    if other:
        return f"the checkpoint was saved with different software: {', '.join(other)}"
    if not (now.built_in and now.dtype == "float32" and not now.experts):
        kind = "models with experts" if now.experts else "this model" if not now.built_in else now.dtype
        return f"no bound is known for {kind} when sums are added in a different order"
    return ""
