"""Find the root failure of a run: its rank, and the text that shows it."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.cli.access.registry import open_store
from orchestrator.cli.terminal.render import plain
from trainer.protocol.events import Event, EventKind, read_events
from trainer.protocol.failures.outcome import AttemptOutcome, AttemptResult, ExitCode, Failure
from trainer.protocol.failures.rank_end import all_outcomes
from trainer.protocol.logs.log_rotation import read_tail
from trainer.protocol.messages.ranks import generation_mark
from trainer.protocol.run_dir import AttemptDir, RunDir

_QUIET_ENDS = (ExitCode.FINISHED, ExitCode.STOPPED_AFTER_SAVE)
_LOOKS_BAD = re.compile(r"Traceback \(most recent|\b\w*(Error|Exception)\b[:(]|\bFATAL\b|CUDA error|Segmentation fault")
_BEFORE, _AFTER, _LAST = 5, 40, 30
_ENOUGH = 4 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class RootFailure:
    """A failure, the file that shows it, and the relevant lines."""

    attempt: int
    generation: int
    rank: int | None
    node: str | None
    step: int | None
    time: float | None
    reason: str
    path: Path
    text: str

    @property
    def headline(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}" + (f" on {self.node}" if self.node else "")
        step = "" if self.step is None else f", step {self.step}"
        generation = f", generation {self.generation}" if self.generation else ""
        return plain(f"attempt {self.attempt}{generation}{rank}{step}: {self.reason}")

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path)}


def first_error(place: RunDir, attempt: int | None) -> RootFailure | None:
    """Return the root failure of the given attempt, or of the newest attempt that has one; None if none has."""
    folders = (folder for folder in reversed(place.all_attempts()) if attempt in (None, folder.number))
    return next((found for folder in folders if (found := _root_failure(place, folder)) is not None), None)


def controller_failure(place: RunDir, run: str, attempt: int | None) -> RootFailure | None:
    """Return the controller's verdict on a job that recorded no failure, with scheduler or agent output."""
    with open_store(readonly=True) as store:
        attempts = [each for each in store.attempts(run) if each.failure and attempt in (None, each.number)]
    if not attempts:
        return None
    last = attempts[-1]
    failure, folder = Failure.from_json(last.failure or {}), place.attempt(last.number)
    written = [*sorted(folder.submission.glob("*.err")), *sorted(folder.logs.glob("agent-*.log"))]
    texts = ((path, text) for path in written if (text := _around(path, last.generations)))
    path, text = next(texts, (folder.path, ""))
    reason = f"{failure.kind}: {failure.reason}"
    return _make(folder, failure, last.generations, last.ended_at, path, text=text, reason=reason)


def _root_failure(place: RunDir, folder: AttemptDir) -> RootFailure | None:
    """Return the root failure that the coordinator reported, with the rank's own message if it left one.

    If a failure ended the attempt, that failure is the root; otherwise the root is the earliest failure that the run
    survived. Without a coordinator's report, it is the earliest primary failure reported by ranks or agents.
    """
    reported, end = list(_rank_failures(folder)), _end(folder)
    judged, seen = _failures_in_events(folder)
    if end is not None and end[0].result == AttemptResult.FAILED:
        outcome, failure = end
        judged = [found for found in judged if found.reason == failure.reason][-1:] or judged[-1:]
        last = [found for found in (*reported, *seen) if found.generation == outcome.generations]
        if last and not judged:
            reported, seen = last, []
    if judged:
        root = min(judged, key=lambda found: found.generation)
        own = (found for found in reported if (found.generation, found.rank) == (root.generation, root.rank))
        return next(own, root)
    if reported or seen:
        return min([*reported, *seen], key=lambda found: (found.time or 0.0, not found.text))
    if end is None:
        return None
    # No rank or agent left an error, so show the coordinator's conclusion with its evidence.
    outcome, failure = end
    path = place.path / failure.evidence if failure.evidence else folder.agent_log(0)
    return _make(folder, failure, outcome.generations, outcome.ended_at, path)


def _make(
    folder: AttemptDir, failure: Failure, generation: int, time: float | None, path: Path, *, reason: str = "",
    text: str | None = None,
) -> RootFailure:  # fmt: skip
    return RootFailure(
        attempt=folder.number, generation=generation, rank=failure.rank, node=failure.node, step=failure.step,
        time=time, reason=reason or failure.reason, path=path,
        text=_around(path, generation) if text is None else text,
    )  # fmt: skip


def _rank_failures(folder: AttemptDir) -> Iterator[RootFailure]:
    for outcome, path in all_outcomes(folder):
        if not outcome.secondary and outcome.exit_code not in _QUIET_ENDS:
            reason = f"{outcome.exception}: {outcome.message}" if outcome.exception else f"exit {outcome.exit_code}"
            text = outcome.traceback or _around(folder.output_log(outcome.rank), outcome.generation)
            yield RootFailure(
                attempt=folder.number, generation=outcome.generation, rank=outcome.rank, node=outcome.node,
                step=outcome.step, time=outcome.time, path=path, reason=reason, text=text,
            )  # fmt: skip


def _failures_in_events(folder: AttemptDir) -> tuple[list[RootFailure], list[RootFailure]]:
    """Return the failures that ended generations, and the ranks that a signal killed.

    Killed ranks leave no outcome, but their agents report them.
    """
    judged, killed = [], []
    for name in sorted(os.listdir(folder.events)) if folder.events.is_dir() else []:
        for event in read_events(folder.events / name)[0]:
            data = event.data
            if event.kind == EventKind.GENERATION_ENDED and data.get("failure"):
                judged.append(_from_event(folder, event, data["failure"]))
            elif event.kind == EventKind.RANK_EXITED and data.get("signal"):
                place = {"rank": data.get("rank"), "node": None if data.get("node") is None else str(data["node"])}
                reason = f"killed by signal {data['signal']}"
                killed.append(_from_event(folder, event, {"kind": "rank_killed", "reason": reason, **place}))
    return judged, killed


def _from_event(folder: AttemptDir, event: Event, fields: dict[str, Any]) -> RootFailure:
    failure = Failure.from_json(fields)
    path = folder.output_log(failure.rank) if failure.rank is not None else folder.agent_log(0)
    return _make(folder, failure, event.generation, event.time, path)


def _end(folder: AttemptDir) -> tuple[AttemptOutcome, Failure] | None:
    """Return the outcome and failure of an attempt that a failure ended; None for any other."""
    try:
        outcome = AttemptOutcome.read(folder.outcome)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return (outcome, outcome.failure) if outcome.failure is not None else None


def _around(path: Path, generation: int) -> str:
    """Return the lines around the first error in this generation's part of a log, or else its last lines."""
    try:
        lines = read_tail(path, _ENOUGH).decode(errors="replace").splitlines()
    except OSError:
        return ""
    lines = _part(lines, generation)
    for at, line in enumerate(lines):
        if _LOOKS_BAD.search(line):
            return "\n".join(lines[max(0, at - _BEFORE) : at + _AFTER])
    return "\n".join(lines[-_LAST:])


def _part(lines: list[str], generation: int) -> list[str]:
    """Return the lines between this generation's mark and the next. Without a mark, use the log's start or end."""
    # A rank killed in mid-line leaves that line unfinished, so the next mark is at the end of it.
    marks = [generation_mark(each) for each in (generation, generation + 1)]
    first, after = ([at for at, line in enumerate(lines) if line.endswith(mark)] for mark in marks)
    start = first[0] + 1 if first else 0
    if not after:
        return lines[start:]
    last = lines[after[0]].removesuffix(marks[1])
    return [*lines[start : after[0]], *([last] if last else [])]
