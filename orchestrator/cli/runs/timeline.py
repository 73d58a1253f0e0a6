"""The timeline of a run: events of its jobs, decisions and changes of state from the registry, people's requests."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from orchestrator.cli.access.registry import open_store
from orchestrator.cli.runs.event_text import event_sentence
from orchestrator.cli.runs.run_reader import EventFeed
from orchestrator.errors import ConfigError
from orchestrator.registry.records import Attempt, Transition, UserRequest
from trainer.contract.events import Event

_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_TOGETHER = 1.0
"""Seconds within which the time of day of one pass of the controller may differ."""
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One thing that happened; `text` is empty for what only `--all` shows, `key` its identity within the run."""

    time: float
    source: str  # of an event its writer; else controller, person
    kind: str
    text: str
    key: tuple[Any, ...]
    attempt: int | None = None
    generation: int = 0
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Attempt and generation as `orch show` numbers them; empty for what happened to the run as a whole."""
        if self.attempt is None:
            return ""
        return f"{self.attempt}.{self.generation}" if self.generation else str(self.attempt)

    @property
    def words(self) -> str:
        """The sentence, or else the kind with what is known of it."""
        return self.text or " ".join([self.kind, *(f"{key}={value}" for key, value in self.data.items())])


class Timeline:
    """Reads on where it stopped: every moment once."""

    def __init__(self, run: str, run_dir: Path) -> None:
        self._run, self._feed = run, EventFeed(run_dir)
        self._seen: set[tuple[Any, ...]] = set()

    def poll(self) -> list[Moment]:
        """What is new since the last call, by its time."""
        fresh = [*self._recorded(), *map(of_event, self._feed.poll())]
        return sorted(fresh, key=lambda moment: moment.time)

    def _recorded(self) -> list[Moment]:
        with open_store(readonly=True) as store:
            attempts, transitions = store.attempts(self._run), store.transitions(self._run)
            requests = [one for one in store.user_requests(pending=False) if one.run == self._run]
        found = [*in_recorded_order(of_registry(transitions, attempts)), *of_requests(requests)]
        fresh = [moment for moment in found if moment.key not in self._seen]
        self._seen |= {moment.key for moment in fresh}
        return fresh


def of_event(event: Event) -> Moment:
    """What a job wrote."""
    return Moment(
        time=event.time, source=event.source, kind=event.kind, text=event_sentence(event) or "", attempt=event.attempt,
        generation=event.generation, data=event.data, key=(event.attempt, event.source, event.generation, event.seq),
    )  # fmt: skip


def of_registry(transitions: Sequence[Transition], attempts: Sequence[Attempt]) -> Iterator[Moment]:
    """Changes of state in the order in which they were recorded, and after an attempt's end what was decided."""
    by_number = {str(attempt.number): attempt for attempt in attempts}
    decided = ""
    for index, move in enumerate(transitions):
        attempt = by_number.get(move.subject) if move.kind == "attempt" else None
        yield _of_transition(index, move, attempt, decided)
        if attempt is not None and attempt.decision is not None and move.after in ("ENDED", "LOST"):
            decided = attempt.decision["reason"]
            yield Moment(
                time=move.time, source="controller", kind="decision", attempt=attempt.number, data=attempt.decision,
                text=f"decision: {attempt.decision['action']} ({decided})", key=("decision", attempt.number),
            )  # fmt: skip


def in_recorded_order(moments: Iterable[Moment]) -> Iterator[Moment]:
    """What was written down together may bear times that differ by a moment; a clock that was set back counts."""
    latest = 0.0
    for moment in moments:
        latest = max(latest, moment.time) if latest - moment.time < _TOGETHER else moment.time
        yield replace(moment, time=latest)


def _of_transition(index: int, move: Transition, attempt: Attempt | None, decided: str) -> Moment:
    """`decided`: the newest decision, whose words the run's own reason repeats."""
    reason = move.reason
    if move.kind == "run" and decided and reason.startswith(decided):
        reason = reason.removeprefix(decided).lstrip("; ")
    if attempt is not None and attempt.failure is not None and move.after in ("ENDED", "LOST"):
        reason = f"{attempt.failure['kind']}: {reason}"
    subject = {"run": "the run", "attempt": "the attempt"}.get(move.kind, f"{move.kind} {move.subject}")
    change = f"is {move.after}" if not move.before else f"{move.before} -> {move.after}"
    text = f"{subject} {change}" + (f": {reason}" if reason else "")
    # An event of the job tells of a new checkpoint; that retention deletes older ones is no news.
    told = move.kind == "checkpoint" and (not move.before or move.after == "DELETED")
    fields = {key: getattr(move, key) for key in ("kind", "subject", "before", "after", "reason")}
    return Moment(
        time=move.time, source="controller", kind="transition", text="" if told else text, data=fields,
        attempt=attempt.number if attempt is not None else None, key=("transition", index),
    )  # fmt: skip


def of_requests(requests: Iterable[UserRequest]) -> Iterator[Moment]:
    """What people asked for, and what the controller answered."""
    for one in requests:
        data = {"verb": one.verb, "args": one.args}
        words = f"asked: orch {one.verb}"
        yield Moment(time=one.asked_at, source="person", kind="request", text=words, data=data, key=("request", one.id))
        if one.answered_at is not None:
            answer = one.answer or "done"
            yield Moment(
                time=one.answered_at, source="controller", kind="answer", text=f"answered: {answer}",
                data={**data, "answer": answer}, key=("answer", one.id),
            )  # fmt: skip


class Repetition:
    """Leaves out of a sentence the reasons that were printed for the same attempt before."""

    SHORTEST = 12
    """Characters of a reason that is worth leaving out."""

    def __init__(self) -> None:
        self._attempt: int | None = None
        self._said: list[str] = []

    def without(self, moment: Moment) -> str:
        """The words of a moment; its own reasons count as said from now on."""
        if moment.attempt not in (None, self._attempt):
            self._attempt, self._said = moment.attempt, []
        text = moment.words
        for reason in self._said:
            text = text.replace(f"; the last one: {reason}", "").replace(f": {reason}", "").replace(f" ({reason})", "")
        failure = moment.data.get("failure")
        reasons = (moment.data.get("reason"), failure.get("reason") if isinstance(failure, dict) else None)
        self._said += [one for one in reasons if isinstance(one, str) and len(one) >= self.SHORTEST]
        self._said.sort(key=len, reverse=True)
        return text


def since(text: str, now: float) -> float:
    """The moment that `--since` names (`90s`, `10m`, `2h`, `1d`, or an ISO time, local without a zone).

    Raises ConfigError.
    """
    ago = _AGO.fullmatch(text.strip())
    if ago is not None:
        return now - float(ago[1]) * _SECONDS[ago[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"--since {text}: not a time", where="command line: orch events",
            hint="--since 10m (s, m, h or d), or --since 2026-01-31T12:00",
        ) from error  # fmt: skip
