"""Score an injected fault: detection, attribution and time to recovery. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.cli.runs.timeline import event_sentence
from orchestrator.states import ENDED_RUNS, RunState
from trainer.protocol.events import Event, EventKind
from trainer.protocol.failures.save_trouble import short_reason


@dataclass(frozen=True, kw_only=True)
class ExpectedReaction:
    """Expected reaction to a fault, as seen from outside."""

    signs: tuple[EventKind, ...]  # the first of these after the fault is its detection
    failures: tuple[str, ...]  # kinds of failure that are correct classifications
    names: str  # culprit that must be named: rank, node, step, or none
    then: str  # restart, hold, or go on


_KILLED = ExpectedReaction(signs=(EventKind.RANK_EXITED,), failures=("rank_killed",), names="rank", then="restart")
_RAISED = ExpectedReaction(signs=(EventKind.RANK_EXITED,), failures=("exception",), names="rank", then="restart")
_HUNG = ExpectedReaction(signs=(EventKind.INCIDENT,), failures=("hang",), names="rank", then="restart")
_DESYNC = ExpectedReaction(
    signs=(EventKind.INCIDENT, EventKind.RANK_EXITED), failures=("desync",), names="rank", then="hold"
)  # fmt: skip
_BAD_LOSS = ExpectedReaction(
    signs=(EventKind.BATCH_SKIPPED, EventKind.RANK_EXITED), failures=("numeric",), names="step", then="restart"
)  # fmt: skip
_LOST = ExpectedReaction(
    signs=(EventKind.AGENT_LOST, EventKind.ATTEMPT_STARTED), failures=("agent_lost", "node_lost"), names="node",
    then="restart",
)  # fmt: skip
EXPECTED: Mapping[str, ExpectedReaction] = {
    "kill-rank": _KILLED,
    "stop-rank": _HUNG,
    "slow-rank": ExpectedReaction(signs=(EventKind.STRAGGLER,), failures=(), names="rank", then="go on"),
    "kill-agent": _LOST,
    "kill-node": _LOST,
    "hang-in-collective": _HUNG,
    "desync": _DESYNC,
    "nan": _BAD_LOSS,
    "full-disk": ExpectedReaction(
        signs=(EventKind.CHECKPOINT_FAILED, EventKind.CHECKPOINT_RETRIED), failures=("storage",), names="none",
        then="restart",
    ),
    "corrupt-checkpoint": ExpectedReaction(
        signs=(EventKind.CHECKPOINT_REFUSED,), failures=("agent_lost", "node_lost"), names="step", then="restart"
    ),
    "raise": _RAISED,
    "hang-in-data": _HUNG,
    "hang-in-forward": _HUNG,
    "hang-in-save": _HUNG,
    "hold-lock": _HUNG,
    "desync-order": _DESYNC,
    "spike": _BAD_LOSS,
    "hang-in-send": _HUNG,
    "skip-send": _HUNG,
}  # fmt: skip
"""Every kind of fault that can be requested."""

NODE_KINDS = ("kill-agent", "kill-node")
"""Kinds that hit a node (by index in the job) instead of a rank."""
ALIASES = {"desync": "desync-shape"}
"""Names that ranks use for some kinds."""


@dataclass(frozen=True, kw_only=True)
class Scorecard:
    """Score of a drill. None stands for a stage that was not reached. Times are in seconds since the fault."""

    kind: str
    struck: str  # target and step; empty if the fault never struck
    rank: int | None = None
    node: str | None = None
    step: int | None = None
    noticed: str | None = None  # first sign
    detected_s: float | None = None
    named: str | None = None  # culprit named by the run
    culprit_right: bool | None = None  # None: no culprit expected
    failure: str | None = None  # failure kind
    kind_right: bool | None = None
    decision: str | None = None
    back_s: float | None = None
    back_step: int | None = None
    steps_lost: int | None = None
    evidence: str | None = None  # path in the run directory
    over: bool = False  # no further reaction is expected
    passed: bool = False
    verdict: str = ""


def score(
    kind: str, events: Sequence[Event], steps: Sequence[Mapping[str, Any]], *, state: str = "",
    failure: Mapping[str, Any] | None = None, now: float = 0.0, running_for: float | None = None,
) -> Scorecard:  # fmt: skip
    """Score the newest drill of this kind.

    `events` are sorted by time, `steps` are the lines of steps.jsonl, and `state` is the run's state. `failure` is the
    controller's classification of the attempt, for faults after which none of its processes could report. `running_for`
    is for commands, whose steps are unknown: the seconds up to `now` for which the ranks must have been running again.
    """
    expected = EXPECTED[kind]
    # A slow rank reports its drill only once, and other faults strike only once.
    names = {kind, ALIASES.get(kind, kind)}
    drills = [event for event in events if event.kind == EventKind.DRILL and event.data.get("kind") in names]
    ended = state in ENDED_RUNS or state == RunState.HELD
    if not drills:
        return Scorecard(kind=kind, struck="", over=ended, verdict="the fault never struck")
    fault = drills[-1]
    later = [event for event in events if event.time >= fault.time and event is not fault]
    sign = next((event for event in later if event.kind in expected.signs and _is_direct_sign(event, fault)), None)
    ends = (
        event.data for event in later if event.kind == EventKind.GENERATION_ENDED and event.attempt == fault.attempt
    )
    failure = next((data["failure"] for data in ends if data.get("failure")), failure)
    named, culprit_right = _judge_culprit(expected, fault, later, failure)
    back = None
    if expected.then == "restart":
        first_step = EventKind.GENERATION_FIRST_STEP
        back = next((each for each in later if each.kind == first_step and _place(each) > _place(fault)), None)
        if back is None and running_for is not None:
            back = _started_again(later, fault, now - running_for)
    called = str(failure["kind"]) if failure else None
    decided = (event.data for event in later if event.kind == EventKind.DECISION and event.attempt == fault.attempt)
    reports = [*(event.data for event in later if event.kind == EventKind.INCIDENT), failure or {}]
    card = Scorecard(
        kind=kind,
        struck=_describe_target(fault),
        rank=fault.data.get("rank"),
        node=_node(fault),
        step=fault.data.get("step"),
        noticed=_describe_sign(sign) if sign else None,
        detected_s=_since(fault, sign),
        named=named,
        culprit_right=culprit_right,
        failure=called,
        kind_right=called in expected.failures if expected.failures else None,
        decision=next((f"{data.get('action')}: {data.get('reason')}" for data in decided), None),
        back_s=_since(fault, back),
        back_step=back.data.get("step") if back else None,
        steps_lost=_lost_steps(steps, later, back, fault),
        evidence=next((str(data["evidence"]) for data in reports if data.get("evidence")), None),
    )
    held = expected.then == "hold" and state == RunState.HELD
    over = back is not None or held or (expected.then == "go on" and sign is not None)
    wrong = _first_mistake(card, expected, over=over, ended=ended)
    resumed = "training again" if card.back_step is not None else "its ranks run again"
    good = {"restart": f"noticed, rightly named, and {resumed}", "hold": "noticed, and held for a person"}
    verdict = wrong or good.get(expected.then, "noticed, and training continues")
    return replace(card, over=over or ended, passed=not wrong, verdict=verdict)


def _first_mistake(card: Scorecard, expected: ExpectedReaction, *, over: bool, ended: bool) -> str:
    if card.noticed is None:
        return "it was not noticed"
    if card.kind_right is False and (over or ended):
        return f"it was taken for {card.failure or 'nothing'}, not for {' or '.join(expected.failures)}"
    if card.culprit_right is False:
        return f"{card.named} was blamed" if card.named else "no culprit was named"
    unfinished = {"restart": "it did not train again", "hold": "the run was not held"}
    return "" if over else unfinished.get(expected.then, "it is not over")


def _place(event: Event) -> tuple[int, int]:
    return event.attempt, event.generation


def _is_direct_sign(event: Event, fault: Event) -> bool:
    """Return whether the event is a direct sign of the fault, not secondary or unrelated."""
    if event.kind == EventKind.RANK_EXITED:
        return event.attempt == fault.attempt and event.data.get("exit_code") != 0
    if event.kind == EventKind.ATTEMPT_STARTED:
        return event.attempt > fault.attempt
    if event.kind == EventKind.INCIDENT:
        return not event.data.get("withdrawn")
    return event.kind != EventKind.STRAGGLER or not event.data.get("over")


def _judge_culprit(
    expected: ExpectedReaction, fault: Event, later: Sequence[Event], failure: Mapping[str, Any] | None
) -> tuple[str | None, bool | None]:
    if expected.names == "none":
        return None, None
    reports: tuple[EventKind, ...] = (EventKind.INCIDENT, EventKind.STRAGGLER)
    if expected.names == "step":
        reports, failure = (EventKind.BATCH_SKIPPED, EventKind.CHECKPOINT_REFUSED), None
    report = next((event.data for event in later if event.kind in reports and _is_direct_sign(event, fault)), failure)
    culprit = None if report is None else report.get(expected.names)
    right = _node(fault) if expected.names == "node" else fault.data.get(expected.names)
    return _describe(expected.names, culprit), report is not None and culprit == right


def _describe(what: str, value: Any) -> str | None:
    return None if value is None else f"{what} {value}"


def _node(fault: Event) -> str | None:
    node = fault.data.get("node")
    return None if node is None else str(node)


def _describe_target(fault: Event) -> str:
    who = " on ".join(word for word in (_describe("rank", fault.data.get("rank")), _node(fault)) if word)
    step = "" if fault.data.get("step") is None else f" at step {fault.data['step']}"
    return f"{who or 'the run'}{step}"


def _describe_sign(event: Event) -> str:
    if event.kind == EventKind.ATTEMPT_STARTED:
        return f"attempt {event.attempt} began"
    # The reason given with these signs does not name the culprit.
    whole = event.kind in (EventKind.RANK_EXITED, EventKind.STRAGGLER, EventKind.AGENT_LOST)
    sentence = event_sentence(event) if whole else None
    return sentence or short_reason(str(event.data.get("reason") or event.kind))


def _since(fault: Event, event: Event | None) -> float | None:
    return None if event is None else round(event.time - fault.time, 3)


def _started_again(later: Sequence[Event], fault: Event, before: float) -> Event | None:
    """Return the start of the newest generation after the fault, if it is early enough and has not ended."""
    ended = {_place(event) for event in later if event.kind == EventKind.GENERATION_ENDED}
    started = [event for event in later if event.kind == EventKind.GENERATION_STARTED and _place(event) > _place(fault)]
    return next((last for last in started[-1:] if last.time <= before and _place(last) not in ended), None)


def _lost_steps(
    steps: Sequence[Mapping[str, Any]], later: Sequence[Event], back: Event | None, fault: Event
) -> int | None:  # fmt: skip
    if back is None or back.data.get("step") is None:
        return None
    # Earlier generations may have progressed further, but their losses belong to other failures.
    trained = [int(line["step"]) for line in steps if (line["attempt"], line["generation"]) == _place(fault)]
    # The last metrics may be lost with the rank or on a full disk, but agents also report the last step.
    ended = [event for event in later if event.kind == EventKind.GENERATION_ENDED and _place(event) == _place(fault)]
    newest = max([*trained, *(int(event.data.get("step") or 0) for event in (fault, *ended))])
    return max(0, newest - int(back.data["step"]) + 1)
