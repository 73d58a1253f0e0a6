"""The timeline of a run, with a sentence for each event."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from checkpointing.config import MEMORY
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.runs.node_setup import describe_watched
from orchestrator.cli.runs.run_reader import EventFeed
from orchestrator.cli.terminal.render import decimal, size
from orchestrator.errors import ConfigError
from orchestrator.recovery.retry_policy import drill_words
from orchestrator.registry.records import REPLACED_VARIABLES, Attempt, Transition, UserRequest
from trainer.protocol.events import Event, EventKind
from trainer.protocol.failures.outcome import ExitCode, FailureKind
from trainer.protocol.failures.save_trouble import short_reason
from trainer.protocol.time_spans import parse_span

_FAILURES = (EventKind.CHECKPOINT_FAILED, EventKind.CHECKPOINT_RETRIED)
_SUCCESSES = (EventKind.CHECKPOINT_COMMITTED, EventKind.CHECKPOINT_FLUSHED)
_STATES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}
_STOPS = {"cancel": ": cancel requested", "time_limit": ": the time limit is near"}
"""Words for the stop reasons that the ranks know. A signal gives no reason."""
_TOGETHER = 1.0
"""Maximum difference, in seconds, between times recorded in one controller pass."""


def describe_event(event: Event) -> str | None:
    """Describe an event with its attempt and generation; None for minor events."""
    text = event_sentence(event)
    where = f"attempt {event.attempt}" + (f" generation {event.generation}" if event.generation else "")
    return f"{where}: {text}" if text else None


class EventDescriber:
    """Describes events. Of several save failures with the same reason, only the first is described."""

    def __init__(self) -> None:
        self._described: dict[str, set[tuple[str, str]]] = {}  # event kinds and reasons, keyed by tier
        self._left_out: dict[str, int] = {}  # failed saves left out, keyed by tier

    def describe(self, event: Event) -> str | None:
        """Describe an event; None for minor or repeated ones."""
        text = describe_event(event)
        if text is None:
            return None
        if event.kind == EventKind.GENERATION_STARTED:
            self._described.clear()
            self._left_out.clear()
        tier = str(event.data.get("tier") or "")
        if event.kind in _FAILURES:
            return text if self._is_new(tier, event) else None
        if event.kind in _SUCCESSES:
            self._described.pop(tier, None)
            more = self._left_out.pop(tier, 0)
            return f"{text}, after {more} more failures" if more else text
        return text

    def _is_new(self, tier: str, event: Event) -> bool:
        described = self._described.setdefault(tier, set())
        failure = event.kind, short_reason(str(event.data["reason"]))
        if failure in described:
            self._left_out[tier] = self._left_out.get(tier, 0) + (event.kind == EventKind.CHECKPOINT_FAILED)
            return False
        described.add(failure)
        return True


def event_sentence(event: Event) -> str | None:
    """Describe an event without its attempt and generation; None for minor events."""
    describe = _DESCRIPTIONS.get(event.kind)
    if describe is None:
        return None
    try:
        return (describe.format_map(event.data) if isinstance(describe, str) else describe(event.data)) or None
    except (KeyError, TypeError, ValueError):
        return None  # from another version, so a sentence about it might be wrong


Data = dict[str, Any]


def _describe_exit(data: Data) -> str:
    code, signal = data.get("exit_code"), data.get("signal")
    if not signal and code in (ExitCode.FINISHED, ExitCode.STOPPED_AFTER_SAVE, ExitCode.RETRY):
        return ""  # peers of a dead rank exit with RETRY
    how = data.get("reason") or (f"killed by signal {signal}" if signal else f"exit code {code}")
    return f"rank {data['rank']} on {data.get('node')} ended: {how}"


def _describe_generation_end(data: Data) -> str:
    failure = data.get("failure")
    why = f"{failure['reason']}{drill_words(failure)}" if failure else data["reason"]
    return f"ended{_at_step(data)}: {why}"


def _describe_save(data: Data) -> str:
    stall = data.get("stall")
    waited = f", training waited {1000 * stall:.0f} ms" if stall else ""
    return f"saved step {data['step']} ({size(data['bytes'])}, {data['seconds']:.1f} s{waited})"


def _describe_failed_save(data: Data) -> str:
    what = f"copying step {data['step']} to {data['tier']}" if data.get("tier") else f"saving step {data['step']}"
    return f"{what} failed: {short_reason(data['reason'])}"


def _describe_incident(data: Data) -> str:
    if data.get("withdrawn"):
        return f"looked hung, but continued: {data['reason']}"
    left = "; nothing is killed (watch.action=observe)" if data.get("observed") else ""
    what = "unusable loss" if data.get("kind") == FailureKind.NUMERIC else "hung"
    return f"{what}: {data['reason']}; evidence in {data['evidence']}{left}"


def _describe_straggler(data: Data) -> str:
    rank = f"rank {data['rank']} on {data['node']}"
    if data.get("over"):
        return f"{rank} is as fast as its peers again"
    return f"{rank} is slow: {data['section']} takes {data['ratio']:.2f} x its peers' time"


def _describe_drill(data: Data) -> str:
    target = f"rank {data['rank']}" if data.get("rank") is not None else data.get("node", "")
    return f"drill: {data['kind']} {target}{_at_step(data)}"


def _at_step(data: Data) -> str:
    """Return ` at step N`; empty for a command without a known step."""
    return "" if data.get("step") is None else f" at step {data['step']}"


def _describe_preflight(data: Data) -> str:
    node = data.get("name") or (f"node {data['node']}" if "node" in data else "a node")
    return "" if data["ok"] else f"{node} failed its checks: {data['reason']}"


def _describe_refusal(data: Data) -> str:
    tier = data.get("tier")
    place = "" if not tier else " in memory" if tier == MEMORY else f" in {tier}"
    return f"checkpoint {data['step']}{place} is not used: {data['reason']}"


def _describe_software(data: Data) -> str:
    ranks = {name: f" (rank {rank})" for name, rank in data.get("ranks", {}).items()}
    pairs = data["changes"].items()
    changes = ", ".join(f"{name} {before} -> {now}{ranks.get(name, '')}" for name, (before, now) in pairs)
    return f"checkpoint {data['step']} was saved with different software, so numbers may differ: {changes}"


def _describe_stop(data: Data) -> str:
    if data["reason"] == "save_and_go_on":
        return f"ranks save together after step {data['step']}, as requested"
    return f"ranks stop together after step {data['step']}{_STOPS.get(data['reason'], '')}"


def _describe_first_step(data: Data) -> str:
    """Describe the first step and rank 0's model states, which events of older releases lack."""
    text = f"training: step {data['step']} done after {data['seconds']:.1f} s"
    if not (held := data.get("held")):
        return text
    parts = (f"{size(held[name])} of {words}" for name, words in _STATES.items())
    place = f" ({', '.join(_STATES[name] for name in held['on_host'])} in host memory)" if held["on_host"] else ""
    return f"{text}; rank 0 holds {', '.join(parts)}{place}"


def _describe_seen(data: Data) -> str:
    what = f"the program has {'rewritten its' if data.get('anew') else 'a'} checkpoint of step {data['step']}"
    return f"{what} ({size(data['bytes'])})" + (f", which {data['damage']}" if data.get("damage") else "")


_DESCRIPTIONS: dict[str, str | Callable[[Data], str]] = {
    EventKind.ATTEMPT_STARTED: lambda d: f"started, job {d['job_id']} on {','.join(d['nodes'])}, {d['world']} ranks",
    EventKind.AGENT_LOST: "lost the agent on {name}: {reason}",
    EventKind.PREFLIGHT: _describe_preflight,
    EventKind.PROGRAM_WATCHED: lambda d: f"the program is watched ({describe_watched(d)})",
    EventKind.PROGRAM_RESTORED: "{reason}",
    EventKind.PROGRAM_SEPARATE: "{reason}",
    EventKind.GENERATION_STARTED: "ranks start ({world})",
    EventKind.GENERATION_FIRST_STEP: _describe_first_step,
    EventKind.GENERATION_ENDED: _describe_generation_end,
    EventKind.RANK_EXITED: _describe_exit,
    EventKind.DECISION: "decision: {action} ({reason})",
    EventKind.INCIDENT: _describe_incident,
    EventKind.STRAGGLER: _describe_straggler,
    EventKind.CODE_CHANGED: "training now uses different code: {reason}",
    EventKind.BATCH_SKIPPED: "the batch of step {step} is skipped from now on: {reason}",
    EventKind.RESTART_DIFFERS: "training continued differently from step {restored}: {reason} before the restart. "
    "Either it depends on something that is not in the checkpoint, or it is not deterministic",
    EventKind.LOSS_LEVEL: "the losses have been at a new level since step {step}: {reason}",
    EventKind.SPARE_USED: "{name} takes the place of {instead}: {reason}",
    EventKind.DRILL: _describe_drill,
    EventKind.VALIDATED: lambda d: (
        f"validated after step {d['step']}: "
        f"{'  '.join(f'{name} {decimal(value)}' for name, value in d['metrics'].items())} ({d['seconds']:.1f} s)"
    ),
    EventKind.STOP_REQUESTED: "asked to stop: {reason}",
    EventKind.STOP_AGREED: _describe_stop,
    EventKind.CHECKPOINT_COMMITTED: _describe_save,
    EventKind.CHECKPOINT_FAILED: _describe_failed_save,
    EventKind.CHECKPOINT_REFUSED: _describe_refusal,
    EventKind.CHECKPOINT_RESTORED: lambda d: (
        # A restart in place loads from memory.
        f"resumed from {'memory, ' if d.get('tier') == MEMORY else ''}step {d['step']}"
    ),
    EventKind.CHECKPOINT_INCOMPLETE: "checkpoint {step} does not hold everything: {reason}",
    EventKind.CHECKPOINT_SOFTWARE: _describe_software,
    EventKind.CHECKPOINT_SKIPPED: "step {step} is not saved: {reason}",
    EventKind.CHECKPOINT_RETRIED: lambda d: f"retrying the save of step {d['step']}: {short_reason(d['reason'])}",
    EventKind.CHECKPOINT_DOUBTED: "step {step} is saved, but looks wrong: {reason}",
    EventKind.CHECKPOINT_FLUSHED: lambda d: (
        f"copied step {d['step']} to {d['tier']} ({size(d['bytes'])}, {d['seconds']:.1f} s)"
    ),
    EventKind.CHECKPOINT_STUCK: "the save of step {step} is stuck, but training continues: {reason}",
    EventKind.CHECKPOINT_SUSPECT: "checkpoint {step} is suspect: {reason}",
    EventKind.CHECKPOINT_SEEN: _describe_seen,
    EventKind.CHECKPOINT_SET_ASIDE: "checkpoint {step} is now {path}: {reason}",
    EventKind.CHECKPOINT_MISSING: "{reason} ({looked})",
    EventKind.CHECKPOINT_VERIFIED: "checkpoint {step} matches its seal",
    EventKind.CHECKPOINT_CADENCE: "saves every {steps} steps from now on: {reason}",
    EventKind.ATTEMPT_ENDED: "{result}: {reason}",
}
"""A template, or a function of the event's data. Minor events are missing or have an empty text."""


@dataclass(frozen=True, kw_only=True)
class TimelineEntry:
    """Timeline entry. `text` is empty if only `--all` shows the entry; `key` identifies it within the run."""

    time: float
    source: str  # the writer of an event; otherwise controller or person
    kind: str
    text: str
    key: tuple[Any, ...]
    attempt: int | None = None
    generation: int = 0
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Attempt and generation as numbered by `orch show`; empty for the run as a whole."""
        if self.attempt is None:
            return ""
        return f"{self.attempt}.{self.generation}" if self.generation else str(self.attempt)

    @property
    def words(self) -> str:
        """The sentence, or else the kind with its data."""
        return self.text or " ".join([self.kind, *(f"{key}={value}" for key, value in self.data.items())])


class Timeline:
    """Incremental reader of a run's timeline. It returns each entry once."""

    def __init__(self, run: str, run_dir: Path) -> None:
        self._run, self._feed = run, EventFeed(run_dir)
        self._seen: set[tuple[Any, ...]] = set()

    def poll(self) -> list[TimelineEntry]:
        """Return the new entries since the last call, sorted by time."""
        with open_store(readonly=True) as store:
            attempts, transitions = store.attempts(self._run), store.transitions(self._run)
            requests = [one for one in store.user_requests(pending=False) if one.run == self._run]
        recorded = in_recorded_order(_transition_entries(transitions, attempts))
        fresh = [moment for moment in (*recorded, *_request_entries(requests)) if moment.key not in self._seen]
        self._seen |= {moment.key for moment in fresh}
        return sorted([*fresh, *map(_event_entry, self._feed.poll())], key=lambda moment: moment.time)


def _event_entry(event: Event) -> TimelineEntry:
    return TimelineEntry(
        time=event.time, source=event.source, kind=event.kind, text=event_sentence(event) or "", attempt=event.attempt,
        generation=event.generation, data=event.data, key=(event.attempt, event.source, event.generation, event.seq),
    )  # fmt: skip


def _transition_entries(transitions: Sequence[Transition], attempts: Sequence[Attempt]) -> Iterator[TimelineEntry]:
    """Yield the state changes in recorded order, with each attempt's decision after the attempt's end."""
    by_number = {str(attempt.number): attempt for attempt in attempts}
    decided = ""
    for index, move in enumerate(transitions):
        attempt = by_number.get(move.subject) if move.kind == "attempt" else None
        yield _transition_entry(index, move, attempt, decided)
        if attempt is not None and attempt.decision is not None and move.after in ("ENDED", "LOST"):
            decided = attempt.decision["reason"]
            yield TimelineEntry(
                time=move.time, source="controller", kind="decision", attempt=attempt.number, data=attempt.decision,
                text=f"decision: {attempt.decision['action']} ({decided})", key=("decision", attempt.number),
            )  # fmt: skip


def in_recorded_order(moments: Iterable[TimelineEntry]) -> Iterator[TimelineEntry]:
    """Make the times of entries recorded together monotonic. Larger backward jumps, from clock changes, are kept."""
    latest = 0.0
    for moment in moments:
        latest = max(latest, moment.time) if latest - moment.time < _TOGETHER else moment.time
        yield replace(moment, time=latest)


def _transition_entry(index: int, move: Transition, attempt: Attempt | None, decided: str) -> TimelineEntry:
    """Convert a transition to an entry. `decided` is the newest decision's reason, which the run's reason repeats."""
    reason = move.reason
    if move.kind == "run" and decided:
        reason = reason.removeprefix(decided).lstrip("; ")
    if attempt is not None and attempt.failure is not None and move.after in ("ENDED", "LOST"):
        reason = f"{attempt.failure['kind']}: {reason}"
    subject = {"run": "the run", "attempt": "the attempt"}.get(move.kind, f"{move.kind} {move.subject}")
    change = f"is {move.after}" if not move.before else f"{move.before} -> {move.after}"
    # New checkpoints are covered by the job's events, and deletions by retention are routine.
    is_minor = move.kind == "checkpoint" and (not move.before or move.after == "DELETED")
    return TimelineEntry(
        time=move.time, source="controller", kind="transition", key=("transition", index),
        text="" if is_minor else f"{subject} {change}" + (f": {reason}" if reason else ""),
        data={key: getattr(move, key) for key in ("kind", "subject", "before", "after", "reason")},
        attempt=attempt.number if attempt is not None else None,
    )  # fmt: skip


def _request_entries(requests: Iterable[UserRequest]) -> Iterator[TimelineEntry]:
    for one in requests:
        data = {"verb": one.verb, "args": one.args}
        replaced = ", ".join(one.args.get(REPLACED_VARIABLES, ()))
        text = f"requested: orch {one.verb}" + (f", with other values of {replaced}" if replaced else "")
        key = ("request", one.id)
        yield TimelineEntry(time=one.asked_at, source="person", kind="request", text=text, data=data, key=key)
        if one.answered_at is not None:
            answer = one.answer or "done"
            yield TimelineEntry(
                time=one.answered_at, source="controller", kind="answer", text=f"answered: {answer}",
                data={**data, "answer": answer}, key=("answer", one.id),
            )  # fmt: skip


class Repetition:
    """Filter that removes reasons already printed for the same attempt."""

    SHORTEST = 12
    """Minimum length of a reason that is left out."""

    def __init__(self) -> None:
        self._attempt: int | None = None
        self._printed: list[str] = []

    def without(self, moment: TimelineEntry) -> str:
        """Return an entry's text without reasons already printed, and remember its own reasons."""
        if moment.attempt not in (None, self._attempt):
            self._attempt, self._printed = moment.attempt, []
        text = moment.words
        for reason in self._printed:
            text = text.replace(f"; the last one: {reason}", "").replace(f": {reason}", "").replace(f" ({reason})", "")
        failure = moment.data.get("failure")
        reasons = (moment.data.get("reason"), failure.get("reason") if isinstance(failure, dict) else None)
        self._printed += [one for one in reasons if isinstance(one, str) and len(one) >= self.SHORTEST]
        self._printed.sort(key=len, reverse=True)
        return text


def parse_since(text: str, now: float) -> float:
    """Return the time given by `--since` (`90s`, `10m`, `2h`, `1d`, or an ISO time, local without a zone).

    Raises ConfigError.
    """
    if (ago := parse_span(text.strip())) is not None:
        return now - ago
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError) as error:
        hint = "--since 10m (s, m, h or d), or --since 2026-01-31T12:00"
        raise ConfigError(f"--since {text}: not a time", where="command line: orch events", hint=hint) from error
