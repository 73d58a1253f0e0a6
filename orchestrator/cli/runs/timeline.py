"""The timeline of a run, with a sentence for each event."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from checkpointing.config import MEMORY
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.runs.run_reader import EventFeed, StepMetrics
from orchestrator.cli.terminal.render import count, decimal, progress, size
from orchestrator.errors import ConfigError
from orchestrator.recovery.retry_policy import drill_words
from orchestrator.registry.records import REPLACED_VARIABLES, Attempt, Transition, UserRequest
from trainer.protocol.events import Event, EventKind
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.failures.save_trouble import short_reason


def progress_line(
    run: str, state: str, total: int, latest: StepMetrics | None, *, step: int = 0, loss: float | str | None = None
) -> str:
    """Return `tiny-gpt-3  RUNNING  step 120/200 60%  loss 2.1130  81000 tokens/s  attempt 1 generation 2`.

    `step` and `loss` are used without a metric, as for a user's own program.
    """
    if latest is None:
        said = f"  step {progress(step, total)}" if step else ""
        return f"{run}  {state}{said}" + (f"  loss {decimal(loss)}" if step and loss is not None else "")
    share = f" {100 * latest.step // total}%" if total else ""
    speed = f"  {count(round(latest.tokens_per_s))} tokens/s" if isinstance(latest.tokens_per_s, (int, float)) else ""
    where = f"attempt {latest.attempt} generation {latest.generation}"
    return f"{run}  {state}  step {progress(latest.step, total)}{share}  loss {decimal(latest.loss)}{speed}  {where}"


def describe_event(event: Event) -> str | None:
    """Describe an event with its attempt and generation; None for minor events."""
    text = event_sentence(event)
    where = f"attempt {event.attempt}" + (f" generation {event.generation}" if event.generation else "")
    return f"{where}: {text}" if text else None


class EventDescriber:
    """Describer of events that mentions only the first of repeated save failures with the same reason."""

    def __init__(self) -> None:
        self._told: dict[str, set[tuple[str, str]]] = {}  # by tier: kinds of event, and reasons
        self._untold: dict[str, int] = {}  # by tier: number of saves

    def describe(self, event: Event) -> str | None:
        """Describe an event; None for minor or repeated ones."""
        text = describe_event(event)
        if text is None:
            return None
        if event.kind == EventKind.GENERATION_STARTED:
            self._told.clear()
            self._untold.clear()
        tier = str(event.data.get("tier") or "")
        if event.kind in _FAILURES:
            return text if self._is_new(tier, event) else None
        if event.kind in _SUCCESSES:
            self._told.pop(tier, None)
            more = self._untold.pop(tier, 0)
            return f"{text}, after {more} more failures" if more else text
        return text

    def _is_new(self, tier: str, event: Event) -> bool:
        told = self._told.setdefault(tier, set())
        said = event.kind, short_reason(str(event.data["reason"]))
        if said in told:
            self._untold[tier] = self._untold.get(tier, 0) + (event.kind == EventKind.CHECKPOINT_FAILED)
            return False
        told.add(said)
        return True


def event_sentence(event: Event) -> str | None:
    """Describe an event without its attempt and generation; None for minor events."""
    words = _DESCRIPTIONS.get(event.kind)
    try:
        return words(event.data) or None if words is not None else None
    except (KeyError, TypeError, ValueError):
        return None  # written by another version: better silent than wrong


def _describe_exit(data: dict[str, Any]) -> str:
    code, signal = data.get("exit_code"), data.get("signal")
    if not signal and code in (ExitCode.FINISHED, ExitCode.STOPPED_AFTER_SAVE, ExitCode.RETRY):
        return ""  # peers of a dead rank exit with RETRY
    how = data.get("reason") or (f"killed by signal {signal}" if signal else f"exit code {code}")
    return f"rank {data['rank']} on {data.get('node')} ended: {how}"


def _describe_generation_end(data: dict[str, Any]) -> str:
    failure = data.get("failure")
    why = f"{failure['reason']}{drill_words(failure)}" if failure else data["reason"]
    return f"ended{_at_step(data)}: {why}"


def _describe_save(data: dict[str, Any]) -> str:
    stall = data.get("stall")
    waited = f", training waited {1000 * stall:.0f} ms" if stall else ""
    return f"saved step {data['step']} ({size(data['bytes'])}, {_s(data)}{waited})"


def _describe_validation(data: dict[str, Any]) -> str:
    numbers = "  ".join(f"{name} {decimal(value)}" for name, value in data["metrics"].items())
    return f"validated after step {data['step']}: {numbers} ({_s(data)})"


def _describe_failed_save(data: dict[str, Any]) -> str:
    what = f"copying step {data['step']} to {data['tier']}" if data.get("tier") else f"saving step {data['step']}"
    return f"{what} failed: {short_reason(data['reason'])}"


def _incident(data: dict[str, Any]) -> str:
    if data.get("withdrawn"):
        return f"taken for hung, but it went on: {data['reason']}"
    return f"hung: {data['reason']}; evidence in {data['evidence']}"


def _straggler(data: dict[str, Any]) -> str:
    who = f"rank {data['rank']} on {data['node']}"
    if data.get("over"):
        return f"{who} is as fast as its peers again"
    return f"{who} is slow: {data['section']} takes {data['ratio']:.2f} x its peers' time"


def _whom(data: dict[str, Any]) -> str:
    return f"rank {data['rank']}" if data.get("rank") is not None else str(data.get("node", ""))


def _drill(data: dict[str, Any]) -> str:
    return f"drill: {data['kind']} {_whom(data)}{_at_step(data)}"


def _at_step(data: dict[str, Any]) -> str:
    """Return the step; empty for a command without a known step."""
    return "" if data.get("step") is None else f" at step {data['step']}"


def _node(data: dict[str, Any]) -> str:
    return str(data.get("name") or (f"node {data['node']}" if "node" in data else "a node"))


def _s(data: dict[str, Any]) -> str:
    return f"{data['seconds']:.1f} s"


def _tier_suffix(data: dict[str, Any]) -> str:
    """Return the tier if there is more than one."""
    tier = data.get("tier")
    return "" if not tier else " in memory" if tier == MEMORY else f" in {tier}"


def _source(data: dict[str, Any]) -> str:
    """Return `memory, ` for a restart in place, which loads from memory; empty for a tier on disk."""
    return "memory, " if data.get("tier") == MEMORY else ""


def _software(data: dict[str, Any]) -> str:
    ranks = {name: f" (rank {rank})" for name, rank in data.get("ranks", {}).items()}
    pairs = data["changes"].items()
    changes = ", ".join(f"{name} {before} -> {now}{ranks.get(name, '')}" for name, (before, now) in pairs)
    return f"checkpoint {data['step']} was made with other software, numbers may differ: {changes}"


def _describe_stop(data: dict[str, Any]) -> str:
    if data["reason"] == "save_and_go_on":
        return f"ranks save together after step {data['step']}, as somebody asked"
    return f"ranks stop together after step {data['step']}{_STOPS.get(data['reason'], '')}"


def _model_state_suffix(data: dict[str, Any]) -> str:
    """Describe the model states that rank 0 holds; empty for events of older releases."""
    if not (held := data.get("held")):
        return ""
    parts = (f"{size(held[name])} of {words}" for name, words in _STATES.items())
    place = f" ({', '.join(_STATES[name] for name in held['on_host'])} in host memory)" if held["on_host"] else ""
    return f"; rank 0 holds {', '.join(parts)}{place}"


_FAILURES = (EventKind.CHECKPOINT_FAILED, EventKind.CHECKPOINT_RETRIED)
_SUCCESSES = (EventKind.CHECKPOINT_COMMITTED, EventKind.CHECKPOINT_FLUSHED)
_STATES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}
_STOPS = {"cancel": ": somebody asked for it", "time_limit": ": the time limit is near"}
"""Reasons of a stop that the ranks know; a signal gives them none."""
_DESCRIPTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    EventKind.ATTEMPT_STARTED: lambda d: f"started, job {d['job_id']} on {','.join(d['nodes'])}, {d['world']} ranks",
    EventKind.AGENT_LOST: lambda d: f"lost the agent of {d['name']}: {d['reason']}",
    EventKind.PREFLIGHT: lambda d: "" if d["ok"] else f"{_node(d)} failed its checks: {d['reason']}",
    EventKind.GENERATION_STARTED: lambda d: f"ranks start ({d['world']})",
    EventKind.GENERATION_FIRST_STEP: lambda d: (
        f"trains: step {d['step']} done after {d['seconds']:.1f} s{_model_state_suffix(d)}"
    ),
    EventKind.GENERATION_ENDED: _describe_generation_end,
    EventKind.RANK_EXITED: _describe_exit,
    EventKind.DECISION: lambda d: f"decision: {d['action']} ({d['reason']})",
    EventKind.INCIDENT: _incident,
    EventKind.STRAGGLER: _straggler,
    EventKind.CODE_CHANGED: lambda d: f"other code trains: {d['reason']}",
    EventKind.BATCH_SKIPPED: lambda d: f"the batch of step {d['step']} is skipped from now on: {d['reason']}",
    EventKind.RESTART_DIFFERS: lambda d: (
        f"training went on differently from step {d['restored']}: {d['reason']} before the restart. Either it depends "
        "on something that no checkpoint has, or it does not repeat"
    ),
    EventKind.LOSS_LEVEL: lambda d: f"the losses have a new level from step {d['step']} on: {d['reason']}",
    EventKind.SPARE_USED: lambda d: f"{d['name']} takes the place of {d['instead']}: {d['reason']}",
    EventKind.DRILL: _drill,
    EventKind.VALIDATED: _describe_validation,
    EventKind.STOP_REQUESTED: lambda d: f"asked to stop: {d['reason']}",
    EventKind.STOP_AGREED: _describe_stop,
    EventKind.CHECKPOINT_COMMITTED: _describe_save,
    EventKind.CHECKPOINT_FAILED: _describe_failed_save,
    EventKind.CHECKPOINT_REFUSED: lambda d: f"checkpoint {d['step']}{_tier_suffix(d)} is not used: {d['reason']}",
    EventKind.CHECKPOINT_RESTORED: lambda d: f"resumed from {_source(d)}step {d['step']}",
    EventKind.CHECKPOINT_INCOMPLETE: lambda d: f"checkpoint {d['step']} does not hold everything: {d['reason']}",
    EventKind.CHECKPOINT_SOFTWARE: _software,
    EventKind.CHECKPOINT_SKIPPED: lambda d: f"step {d['step']} is not saved: {d['reason']}",
    EventKind.CHECKPOINT_RETRIED: lambda d: f"saving step {d['step']} is tried again: {short_reason(d['reason'])}",
    EventKind.CHECKPOINT_DOUBTED: lambda d: f"step {d['step']} is saved, but looks wrong: {d['reason']}",
    EventKind.CHECKPOINT_FLUSHED: lambda d: f"copied step {d['step']} to {d['tier']} ({size(d['bytes'])}, {_s(d)})",
    EventKind.CHECKPOINT_STUCK: lambda d: f"saving step {d['step']} hangs, training goes on: {d['reason']}",
    EventKind.CHECKPOINT_SUSPECT: lambda d: f"checkpoint {d['step']} is suspect: {d['reason']}",
    EventKind.CHECKPOINT_SEEN: lambda d: (
        f"the program has {'written anew its' if d.get('anew') else 'a'} checkpoint of step {d['step']} "
        f"({size(d['bytes'])})" + (f", which {d['damage']}" if d.get("damage") else "")
    ),
    EventKind.CHECKPOINT_SET_ASIDE: lambda d: f"checkpoint {d['step']} is now {d['path']}: {d['reason']}",
    EventKind.CHECKPOINT_CADENCE: lambda d: f"saves every {count(d['steps'])} steps from now on: {d['reason']}",
    EventKind.ATTEMPT_ENDED: lambda d: f"{d['result']}: {d['reason']}",
}


_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_TOGETHER = 1.0
"""Seconds by which the times within one controller pass may differ."""
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, kw_only=True)
class TimelineEntry:
    """Entry of the timeline. `text` is empty for entries that only `--all` shows; `key` is its identity in the run."""

    time: float
    source: str  # for an event its writer; otherwise controller or person
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
    """Incremental reader of a run's moments, each returned once."""

    def __init__(self, run: str, run_dir: Path) -> None:
        self._run, self._feed = run, EventFeed(run_dir)
        self._seen: set[tuple[Any, ...]] = set()

    def poll(self) -> list[TimelineEntry]:
        """Return the new moments since the last call, sorted by time."""
        fresh = [*self._poll_registry(), *map(of_event, self._feed.poll())]
        return sorted(fresh, key=lambda moment: moment.time)

    def _poll_registry(self) -> list[TimelineEntry]:
        with open_store(readonly=True) as store:
            attempts, transitions = store.attempts(self._run), store.transitions(self._run)
            requests = [one for one in store.user_requests(pending=False) if one.run == self._run]
        found = [*in_recorded_order(of_registry(transitions, attempts)), *of_requests(requests)]
        fresh = [moment for moment in found if moment.key not in self._seen]
        self._seen |= {moment.key for moment in fresh}
        return fresh


def of_event(event: Event) -> TimelineEntry:
    """Convert an event of a job."""
    return TimelineEntry(
        time=event.time, source=event.source, kind=event.kind, text=event_sentence(event) or "", attempt=event.attempt,
        generation=event.generation, data=event.data, key=(event.attempt, event.source, event.generation, event.seq),
    )  # fmt: skip


def of_registry(transitions: Sequence[Transition], attempts: Sequence[Attempt]) -> Iterator[TimelineEntry]:
    """Yield state changes in recorded order, and the decision after each end of an attempt."""
    by_number = {str(attempt.number): attempt for attempt in attempts}
    decided = ""
    for index, move in enumerate(transitions):
        attempt = by_number.get(move.subject) if move.kind == "attempt" else None
        yield _of_transition(index, move, attempt, decided)
        if attempt is not None and attempt.decision is not None and move.after in ("ENDED", "LOST"):
            decided = attempt.decision["reason"]
            yield TimelineEntry(
                time=move.time, source="controller", kind="decision", attempt=attempt.number, data=attempt.decision,
                text=f"decision: {attempt.decision['action']} ({decided})", key=("decision", attempt.number),
            )  # fmt: skip


def in_recorded_order(moments: Iterable[TimelineEntry]) -> Iterator[TimelineEntry]:
    """Make the times of moments recorded together monotonic. Larger steps back (a clock that was reset) are kept."""
    latest = 0.0
    for moment in moments:
        latest = max(latest, moment.time) if latest - moment.time < _TOGETHER else moment.time
        yield replace(moment, time=latest)


def _of_transition(index: int, move: Transition, attempt: Attempt | None, decided: str) -> TimelineEntry:
    """Convert a transition. `decided` is the newest decision, whose text the run's reason repeats."""
    reason = move.reason
    if move.kind == "run" and decided and reason.startswith(decided):
        reason = reason.removeprefix(decided).lstrip("; ")
    if attempt is not None and attempt.failure is not None and move.after in ("ENDED", "LOST"):
        reason = f"{attempt.failure['kind']}: {reason}"
    subject = {"run": "the run", "attempt": "the attempt"}.get(move.kind, f"{move.kind} {move.subject}")
    change = f"is {move.after}" if not move.before else f"{move.before} -> {move.after}"
    text = f"{subject} {change}" + (f": {reason}" if reason else "")
    # New checkpoints are covered by the job's events, and deletions by retention are routine.
    told = move.kind == "checkpoint" and (not move.before or move.after == "DELETED")
    fields = {key: getattr(move, key) for key in ("kind", "subject", "before", "after", "reason")}
    return TimelineEntry(
        time=move.time, source="controller", kind="transition", text="" if told else text, data=fields,
        attempt=attempt.number if attempt is not None else None, key=("transition", index),
    )  # fmt: skip


def of_requests(requests: Iterable[UserRequest]) -> Iterator[TimelineEntry]:
    """Yield user requests and the controller's answers."""
    for one in requests:
        data = {"verb": one.verb, "args": one.args}
        replaced = ", ".join(one.args.get(REPLACED_VARIABLES, ()))
        words = f"asked: orch {one.verb}" + (f", with other values of {replaced}" if replaced else "")
        yield TimelineEntry(
            time=one.asked_at, source="person", kind="request", text=words, data=data, key=("request", one.id)
        )
        if one.answered_at is not None:
            answer = one.answer or "done"
            yield TimelineEntry(
                time=one.answered_at, source="controller", kind="answer", text=f"answered: {answer}",
                data={**data, "answer": answer}, key=("answer", one.id),
            )  # fmt: skip


class Repetition:
    """Filter for reasons that were already printed for the same attempt."""

    SHORTEST = 12
    """Minimum length of a reason that is left out."""

    def __init__(self) -> None:
        self._attempt: int | None = None
        self._said: list[str] = []

    def without(self, moment: TimelineEntry) -> str:
        """Return the text of a moment without reasons already printed, and remember its own reasons."""
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
    """Return the time given by `--since` (`90s`, `10m`, `2h`, `1d`, or an ISO time, local without a zone).

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
