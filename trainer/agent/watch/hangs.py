"""The verdict on a hang: the rank that stopped first. Pure.
The rank that stopped first is found first, then only that rank is checked against its own limit. Ranks that wait for a
peer in a legal slow phase are thus never blamed for waiting.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto

from trainer.agent.flight.wait_graph import Finding
from trainer.agent.watch.hang_limits import HALTED, Allowed, Gaps, Limits, RankSample, format_seconds, seconds_still
from trainer.protocol.failures.outcome import Culprit

LOOK_AT_HALTED = 1.0
"""Seconds without movement of any rank after which a halted process is examined."""

FRESH = 5.0
"""Maximum age in seconds of flight records on which a kill may be based; older ones are requested again."""

AHEAD = 3.0
"""Seconds before the end of a limit to request records again that will be too old by then."""

CONFIRMED = 1.0
"""Seconds a process must be seen halted; a profiler may halt a waiting one for a moment."""

_TOLD = 8
"""Maximum number of roots that a reason lists."""
_NO_GAPS: Gaps = {}
_NOBODY: Mapping[int, float] = {}


class HangVerdict(Enum):
    FINE = auto()
    LOOK = auto()  # query every rank's flight record, then judge again
    HUNG = auto()


class HangKind(StrEnum):
    STOPPED = "stopped"  # its process, by a signal
    DEAD = "dead"  # its process, unnoticed
    STUCK_IN_DATA = "stuck_in_data"
    STUCK_IN_SAVE = "stuck_in_save"
    STUCK_IN_COMPUTE = "stuck_in_compute"
    LOCK_HELD = "lock_held"  # Python's
    DESYNC = "desync"  # ranks call different collectives: a bug of the program
    NETWORK = "network"  # all have joined a collective across nodes, and none makes progress
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class HangJudgement:
    """Action and reason; the other fields are set if the verdict is HUNG."""

    verdict: HangVerdict
    reason: str
    culprit: int | None = None
    node: str | None = None
    phase: str = ""
    step: int = 0  # the last step that the culprit finished
    kind: HangKind = HangKind.UNKNOWN
    waiting: tuple[int, ...] = ()
    limit: float = 0.0
    culprits: tuple[Culprit, ...] = ()  # all roots, that of `culprit` first; empty if none is named
    chain: str = ""  # path of waits, from the flight records


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """The rank that stopped first; None if all `rivals` wait in the same collective.
    WARNING: among several rivals it is unknown which still works and which wait for it, so the limits of all count.
    """

    rank: RankSample | None
    kind: HangKind
    why: str
    rivals: tuple[RankSample, ...]  # includes `rank`
    spins: bool = False  # they wait for a GPU, which uses CPU time
    others: tuple[RankSample, ...] = ()  # independent roots besides `rank`
    chain: str = ""

    @property
    def is_halted(self) -> bool:
        return self.kind in (HangKind.STOPPED, HangKind.DEAD)


_ORDER = ("init", "restore", "checkpoint", "eval", "data", "compile", "forward", "backward", "optimizer", "done")
"""Order of phases within a step; ranks in those before `forward` wait for no peer."""
_PLACE = {phase: index for index, phase in enumerate(_ORDER)}
# Micro-batches alternate forward and backward; only the collectives show which of the two is behind.
_TURN = {**_PLACE, "backward": _PLACE["forward"]}
_NOWHERE = len(_ORDER)

_KINDS = {
    "data": HangKind.STUCK_IN_DATA,
    "checkpoint": HangKind.STUCK_IN_SAVE,
    "compile": HangKind.STUCK_IN_COMPUTE,
    "forward": HangKind.STUCK_IN_COMPUTE,
    "backward": HangKind.STUCK_IN_COMPUTE,
    "optimizer": HangKind.STUCK_IN_COMPUTE,
    "eval": HangKind.STUCK_IN_COMPUTE,
}
_HALTS = {
    "T": (HangKind.STOPPED, "its process is stopped (SIGSTOP)"),
    "Z": (HangKind.DEAD, "its process is dead (state Z)"),
    "X": (HangKind.DEAD, "its process is gone"),
}


def judge(
    sightings: Sequence[RankSample],
    finding: Finding | None,
    limits: Limits,
    *,
    lock_held: AbstractSet[int] = frozenset(),
    found: float = 0.0,
    halted_for: Mapping[int, float] = _NOBODY,
    report_gaps: Gaps = _NO_GAPS,
    on_gpus: bool = False,
) -> HangJudgement:
    """Judge one generation.
    `finding` is the analysis of flight records requested `found` seconds ago. `lock_held` has the ranks in whose
    interpreters no thread can run. `halted_for` has the seconds a rank has been seen halted, if known. `report_gaps`
    has silences of nodes, which do not count against their ranks. `on_gpus`: ranks that wait for a GPU collective spin,
    so their CPU time does not count as activity.
    """
    live = [one for one in sightings if not one.ended]
    if not live:
        return fine("all ranks have ended")
    mover = _newest(live, report_gaps)
    quiet = seconds_still(mover, report_gaps)
    if finding is not None and found > quiet:
        finding = None  # a rank has moved since, so the finding is outdated
    # Usually a rank moves, and no more information is needed.
    if quiet < LOOK_AT_HALTED:
        return fine(_still_moving(mover, quiet, LOOK_AT_HALTED, report_gaps))
    suspicion = first_to_stop(live, finding, lock_held, on_gpus=on_gpus, halted_for=halted_for)
    due = LOOK_AT_HALTED if suspicion.is_halted else limits.look_after
    if quiet < due:
        return fine(_still_moving(mover, quiet, due, report_gaps))
    over, allowed = _overdue(suspicion, limits, report_gaps, waited_for=len(live) > 1)
    if suspicion.is_halted and suspicion.rank is not None:
        over = min(over, halted_for.get(suspicion.rank.rank, CONFIRMED) - CONFIRMED)
    certain = over >= 0 and suspicion.is_halted
    if finding is None and not certain:
        return HangJudgement(verdict=HangVerdict.LOOK, reason=f"no rank has moved for {format_seconds(quiet)}")
    if over < 0:
        if not suspicion.is_halted and over > -AHEAD and found - over > FRESH:
            return HangJudgement(verdict=HangVerdict.LOOK, reason=f"a limit is over in {format_seconds(-over)}")
        return _within(suspicion, allowed, len(live) - 1)
    # A rank may complete many collectives between two writes to its cell.
    if found > FRESH and not certain:
        return HangJudgement(verdict=HangVerdict.LOOK, reason=f"the flight records are {format_seconds(found)} old")
    waited_for = len(live) > 1
    late = [one for one in suspicion.others if _overdue_alone(one, suspicion, limits, report_gaps, waited_for) >= 0]
    return _hung(replace(suspicion, others=tuple(late)), allowed, live, lock_held)


def first_to_stop(
    live: Sequence[RankSample],
    finding: Finding | None,
    lock_held: AbstractSet[int] = frozenset(),
    *,
    on_gpus: bool = False,
    halted_for: Mapping[int, float] = _NOBODY,
) -> Suspicion:
    """Return the rank that stopped first, by the strongest evidence available; limits are not checked here."""
    # The kernel's data needs no interpretation.
    halted = [one for one in live if one.state in HALTED]
    if halted:
        halted = [one for one in halted if halted_for.get(one.rank, CONFIRMED) >= CONFIRMED] or halted
        first = max(halted, key=lambda one: (one.state != "T", one.alive, -one.rank))
        kind, why = _HALTS[first.state]
        others = tuple(one for one in halted if one is not first)
        return Suspicion(rank=first, kind=kind, why=why, rivals=(first,), others=others)
    traced = [one for one in live if one.state == "t"]
    if traced:
        first = _first(traced, lock_held)
        return Suspicion(rank=first, kind=HangKind.UNKNOWN, why="a debugger holds it", rivals=(first,))
    # The ranks' own records.
    recorded = None if finding is None else _suspect_from_records(live, finding, lock_held, on_gpus)
    return recorded if recorded is not None else _least_advanced(live, lock_held)


def _suspect_from_records(
    live: Sequence[RankSample], finding: Finding, lock_held: AbstractSet[int], on_gpus: bool
) -> Suspicion | None:
    """Return what flight records show; None if they name no live rank."""
    if finding.kind == "none":
        return None
    wanted = set(finding.ranks)
    named = [one for one in live if one.rank in wanted]
    if finding.kind == "stuck_together":
        joined = tuple(named or live)
        spread = len({one.node for one in joined}) > 1
        kind = HangKind.NETWORK if spread else HangKind.UNKNOWN
        spins = on_gpus and not finding.on_host
        return Suspicion(rank=None, kind=kind, why=finding.reason, rivals=joined, spins=spins)
    if not named:
        return None
    first = _first(named, lock_held)
    # If the records show each root separately, none of them waits for another.
    roots = {one.rank: one for one in finding.culprits}
    others = tuple(one for one in named if one is not first and one.rank in roots)
    if finding.kind in ("desync_shape", "desync_order"):
        return Suspicion(rank=first, kind=HangKind.DESYNC, why=finding.reason, rivals=(first,), others=others)
    # The host has run ahead of its GPU, so its position does not show what hangs.
    on_gpu = roots[first.rank].on_gpu if first.rank in roots else finding.queued
    return Suspicion(
        rank=first,
        kind=HangKind.STUCK_IN_COMPUTE if on_gpu else _kind(first, lock_held),
        why=_with_lock(first, lock_held, finding.reason),
        rivals=(first,) if others else _ranks_at_place(first, named),
        spins=on_gpu,
        others=others,
        chain=finding.chain,
    )


def _least_advanced(live: Sequence[RankSample], lock_held: AbstractSet[int]) -> Suspicion:
    """Without records: suspect the rank that is furthest behind, for which the others wait."""
    # Ranks may wait for messages at any position, since stages never advance equally.
    working = [one for one in live if not one.waits_for_message] or live
    step = min(one.step for one in working)
    behind = [one for one in working if one.step == step]
    first = _first(behind, lock_held)
    rivals, kind, why = _ranks_at_place(first, behind), _kind(first, lock_held), "it is furthest behind"
    if len(rivals) > 1 and len(live) > 1:
        why = f"of {len(rivals)} ranks at the same place it has been there longest"
        # Ranks load and save independently. In a collective, the longest wait proves little.
        if kind is HangKind.STUCK_IN_COMPUTE:
            kind = HangKind.UNKNOWN
    return Suspicion(rank=first, kind=kind, why=_with_lock(first, lock_held, why), rivals=rivals)


def _kind(one: RankSample, lock_held: AbstractSet[int]) -> HangKind:
    return HangKind.LOCK_HELD if one.rank in lock_held else _KINDS.get(one.phase, HangKind.UNKNOWN)


def _with_lock(one: RankSample, lock_held: AbstractSet[int], why: str) -> str:
    return f"{why}; nothing can run in its interpreter (Python's lock is held)" if one.rank in lock_held else why


def _ranks_at_place(first: RankSample, ranks: Sequence[RankSample]) -> tuple[RankSample, ...]:
    """Return the ranks that have come as far as `first`, itself included."""
    place = _place(first)
    return tuple(one for one in ranks if one.step == first.step and _place(one) == place)


def _place(one: RankSample) -> tuple[int, int, int, int]:
    """Return the position of a rank in the program's order; the lowest is furthest behind."""
    return (one.step, _TURN.get(one.phase, _NOWHERE), one.collective, _PLACE.get(one.phase, _NOWHERE))


def _first(ranks: Sequence[RankSample], lock_held: AbstractSet[int]) -> RankSample:
    return min(ranks, key=lambda one: (*_place(one), one.rank not in lock_held, -one.age, one.rank))


def _newest(live: Sequence[RankSample], report_gaps: Gaps) -> RankSample:
    if not report_gaps:
        return min(live, key=lambda one: one.age)
    return min(live, key=lambda one: seconds_still(one, report_gaps))


def _still_moving(mover: RankSample, quiet: float, due: float, report_gaps: Gaps) -> str:
    lasting = [began for began, ended in report_gaps.get(mover.node, ()) if not ended]
    if lasting:
        return f"nothing has been heard of {mover.node} for {format_seconds(lasting[0])}; its ranks may move"
    return f"rank {mover.rank} moved {format_seconds(quiet)} ago; nothing is looked into before {format_seconds(due)}"


def _overdue(suspicion: Suspicion, limits: Limits, report_gaps: Gaps, *, waited_for: bool) -> tuple[float, Allowed]:
    """Return the seconds above the limit (negative below) and the limit, for the rank with most time left."""
    over, allowed = float("inf"), Allowed(0.0, "")
    for one in suspicion.rivals:
        its = limits.for_rank(one, waited_for=waited_for, spins=suspicion.spins)
        if seconds_still(one, report_gaps) - its.seconds < over:
            over, allowed = seconds_still(one, report_gaps) - its.seconds, its
    return over, allowed


def _overdue_alone(one: RankSample, suspicion: Suspicion, limits: Limits, report_gaps: Gaps, waited_for: bool) -> float:
    """Return the seconds for which one of several roots exceeds its own limit."""
    return seconds_still(one, report_gaps) - limits.for_rank(one, waited_for=waited_for, spins=suspicion.spins).seconds


def fine(reason: str) -> HangJudgement:
    return HangJudgement(verdict=HangVerdict.FINE, reason=reason)


def _within(suspicion: Suspicion, allowed: Allowed, peers: int) -> HangJudgement:
    first = suspicion.rank
    if first is None:
        return fine(f"no rank stopped first: {suspicion.why}; within {allowed.words}")
    who = f"{_rank_label(first)} has been in {_where(first)}, within {allowed.words}"
    return fine(f"{who}; {_waiting(peers)}" if peers else who)


def _hung(
    suspicion: Suspicion, allowed: Allowed, live: Sequence[RankSample], lock_held: AbstractSet[int]
) -> HangJudgement:
    first = suspicion.rank
    named = {one.rank for one in suspicion.others} | ({first.rank} if first is not None else set())
    waiting = tuple(one.rank for one in live if one.rank not in named)
    limit = f"longer than {allowed.words}"
    if first is None:
        return _hung_together(suspicion, allowed, limit, waiting)
    roots = (first, *sorted(suspicion.others, key=lambda one: one.rank))
    return HangJudgement(
        verdict=HangVerdict.HUNG,
        reason=_who_stopped(roots, suspicion.why, limit, len(waiting)),
        culprit=first.rank,
        node=first.node,
        phase=first.phase,
        step=first.step,
        kind=suspicion.kind,
        waiting=waiting,
        limit=allowed.seconds,
        culprits=tuple(_culprit(one, suspicion, lock_held) for one in roots),
        chain=suspicion.chain,
    )


def _culprit(one: RankSample, suspicion: Suspicion, lock_held: AbstractSet[int]) -> Culprit:
    kind = suspicion.kind
    if one is not suspicion.rank and kind is not HangKind.DESYNC:
        kind = _HALTS[one.state][0] if suspicion.is_halted else kind if suspicion.spins else _kind(one, lock_held)
    return Culprit(rank=one.rank, node=one.node, kind=str(kind), reason=f"it has been in {_where(one)}")


def _who_stopped(roots: Sequence[RankSample], why: str, limit: str, waiting: int) -> str:
    if len(roots) == 1:
        where = f"it has been in {_where(roots[0])}, {limit}"
        return f"{_rank_label(roots[0])} stopped first: {where}; {_waiting(waiting)}; {why}"
    who = ", ".join(f"{_rank_label(one)} in {_where(one)}" for one in roots[:_TOLD])
    more = f" and {len(roots) - _TOLD} more" if len(roots) > _TOLD else ""
    return f"{len(roots)} ranks stopped, each by itself: {who}{more}, {limit}; {_waiting(waiting, 'them')}; {why}"


def _hung_together(suspicion: Suspicion, allowed: Allowed, limit: str, waiting: tuple[int, ...]) -> HangJudgement:
    """Return the judgement when all have joined without progress.
    Blames no rank, and a node only if it is the only one.
    """
    joined = suspicion.rivals
    nodes = sorted({one.node for one in joined})
    oldest = max(joined, key=lambda one: one.age)
    places = ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
    what = f"the network between {places} is suspect" if len(nodes) > 1 else f"all of it is on {places}"
    return HangJudgement(
        verdict=HangVerdict.HUNG,
        reason=f"no rank stopped first: {suspicion.why}; "
        f"no rank has made progress for {format_seconds(oldest.age)}, {limit}; {what}",
        node=nodes[0] if len(nodes) == 1 else None,
        phase=oldest.phase,
        step=oldest.step,
        kind=suspicion.kind,
        waiting=waiting,
        limit=allowed.seconds,
    )


def _rank_label(one: RankSample) -> str:
    return f"rank {one.rank} on {one.node}"


def _waiting(peers: int, whom: str = "it") -> str:
    return f"1 rank waits for {whom}" if peers == 1 else f"{peers or 'no'} ranks wait for {whom}"


def _where(one: RankSample) -> str:
    """Describe its phase, the last step it finished, and the duration."""
    after = "before the end of its first step" if one.first else f"after step {one.step}"
    doing = "" if one.moment is None else f" ({one.moment})"
    return f"{one.phase}{doing} {after} for {format_seconds(one.age)}"
