"""The rank that stopped first, and the waits between pipeline stages and in rings. Pure.

If a rank has gone past a message that the receiver is still waiting for, it never sent that message.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import StrEnum

from trainer.agent.flight.flight_record import FlightRecord, P2PMessage
from trainer.agent.flight.wait_graph import Finding
from trainer.agent.watch.hang_limits import HALTED, RankSample
from trainer.costs.stage_split import rank_of_stage
from trainer.protocol.config_sections.pipeline_config import PipelineConfig
from trainer.protocol.rank_progress.progress import AWAITED_SENDS, OF_ACTIVATIONS, RECEIVES, Activity, StageActivity

CONFIRMED = 1.0
"""Seconds for which a process must be seen halted, since a profiler may halt a waiting process for a moment."""

_NOBODY: Mapping[int, float] = {}


class HangKind(StrEnum):
    STOPPED = "stopped"  # its process was stopped by a signal
    DEAD = "dead"  # its process died unnoticed
    STUCK_IN_DATA = "stuck_in_data"
    STUCK_IN_SAVE = "stuck_in_save"
    STUCK_IN_COMPUTE = "stuck_in_compute"
    LOCK_HELD = "lock_held"  # no thread can take Python's lock
    DESYNC = "desync"  # ranks call different collectives: a bug in the program
    NETWORK = "network"  # all have joined a collective across nodes, but none makes progress
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """The rank that stopped first; None if all `rivals` wait in the same collective.
    WARNING: of several rivals, it is unknown which is still working and which wait for it, so all their limits count.
    """

    rank: RankSample | None
    kind: HangKind
    why: str
    rivals: tuple[RankSample, ...]  # includes `rank`
    spins: bool = False  # they are waiting for a GPU, which uses CPU time
    others: tuple[RankSample, ...] = ()  # independent roots other than `rank`
    chain: str = ""

    @property
    def is_halted(self) -> bool:
        return self.kind in (HangKind.STOPPED, HangKind.DEAD)


_ORDER = ("init", "restore", "checkpoint", "eval", "data", "compile", "forward", "backward", "optimizer", "done")
"""Order of phases within a step. Ranks in phases before `forward` do not wait for peers."""

_PLACE = {phase: index for index, phase in enumerate(_ORDER)}


# Micro-batches alternate between forward and backward; only the collectives show which rank is behind.
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


def first_to_stop(
    live: Sequence[RankSample],
    finding: Finding | None,
    lock_held: AbstractSet[int] = frozenset(),
    *,
    on_gpus: bool = False,
    halted_for: Mapping[int, float] = _NOBODY,
) -> Suspicion:
    """Return the rank that stopped first, by the strongest evidence available; limits are not checked here."""
    # What the kernel reports needs no interpretation.
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
    """Return what flight records show, or None if they name no live rank."""
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
    # If the records list each root separately, none of them waits for another.
    roots = {one.rank: one for one in finding.culprits}
    others = tuple(one for one in named if one is not first and one.rank in roots)
    if finding.kind in ("desync_shape", "desync_order"):
        return Suspicion(rank=first, kind=HangKind.DESYNC, why=finding.reason, rivals=(first,), others=others)
    # The host has run ahead of its GPU, so its position does not show what is hanging.
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
    """Suspect the rank that is furthest behind. Without records, the others are assumed to be waiting for it."""
    # Ranks may wait for messages at any position, since stages never advance in step.
    working = [one for one in live if not one.waits_for_message] or live
    step = min(one.step for one in working)
    behind = [one for one in working if one.step == step]
    first = _first(behind, lock_held)
    rivals, kind, why = _ranks_at_place(first, behind), _kind(first, lock_held), "it is furthest behind"
    if len(rivals) > 1 and len(live) > 1:
        why = f"of {len(rivals)} ranks at the same place, it has been there longest"
        # Ranks load and save independently. In a collective, the longest wait proves little.
        if kind is HangKind.STUCK_IN_COMPUTE:
            kind = HangKind.UNKNOWN
    return Suspicion(rank=first, kind=kind, why=_with_lock(first, lock_held, why), rivals=rivals)


def _kind(one: RankSample, lock_held: AbstractSet[int]) -> HangKind:
    return HangKind.LOCK_HELD if one.rank in lock_held else _KINDS.get(one.phase, HangKind.UNKNOWN)


def _with_lock(one: RankSample, lock_held: AbstractSet[int], why: str) -> str:
    return f"{why}; nothing can run in its interpreter (Python's lock is held)" if one.rank in lock_held else why


def _ranks_at_place(first: RankSample, ranks: Sequence[RankSample]) -> tuple[RankSample, ...]:
    """Return the ranks that have got as far as `first`, including `first` itself."""
    place = _place(first)
    return tuple(one for one in ranks if one.step == first.step and _place(one) == place)


def _place(one: RankSample) -> tuple[int, int, int, int]:
    """Return a rank's position in the program's order. The rank with the lowest position is furthest behind."""
    return (one.step, _TURN.get(one.phase, _NOWHERE), one.collective, _PLACE.get(one.phase, _NOWHERE))


def _first(ranks: Sequence[RankSample], lock_held: AbstractSet[int]) -> RankSample:
    return min(ranks, key=lambda one: (*_place(one), one.rank not in lock_held, -one.age, one.rank))


_LAST = 1 << 40
"""Position of a wait in its rank's record, after all its calls."""


@dataclass(frozen=True, kw_only=True)
class StageMessage:
    """An activation or gradient of one micro-batch between two stages; the ranks are global."""

    activation: bool
    micro_batch: int
    stage: int  # the sending stage
    source: int
    target: int

    def __str__(self) -> str:
        return f"{'activation' if self.activation else 'gradient'} of micro-batch {self.micro_batch}"


@dataclass(frozen=True, kw_only=True)
class RingMessage:
    """Keys and values passed around a ring; the ranks are global."""

    source: int
    target: int

    def __str__(self) -> str:
        return "message with keys and values"


class StageNeighbours:
    """Finds ranks with neighbouring pipeline stages; pipelines are the outermost dimension of the mesh."""

    def __init__(self, config: PipelineConfig, world: int) -> None:
        self.config, self._inner = config, max(1, world // config.ranks)

    def message(self, rank: int, moment: StageActivity) -> StageMessage | RingMessage | None:
        """Return the message that `rank` is waiting for at this moment, or None."""
        if moment.activity is Activity.WAIT_IN_RING:
            return RingMessage(source=moment.stage, target=rank)
        receives = moment.activity in RECEIVES
        if not receives and moment.activity not in AWAITED_SENDS:
            return None
        activation = moment.activity in OF_ACTIVATIONS
        step = 1 if activation else -1  # activations go to the next stage, gradients to the previous one
        sender = moment.stage - step if receives else moment.stage
        if not (0 <= sender < self.config.stages and 0 <= sender + step < self.config.stages):
            return None
        return StageMessage(
            activation=activation, micro_batch=moment.micro_batch, stage=sender,
            source=self._rank(sender, rank), target=self._rank(sender + step, rank),
        )  # fmt: skip

    def _rank(self, stage: int, like: int) -> int:
        """Return the rank that runs `stage` for the tokens of rank `like`."""
        return rank_of_stage(self.config, stage) * self._inner + like % self._inner


def with_stage_waits(
    flights: Mapping[int, FlightRecord], seen: Iterable[RankSample], neighbours: StageNeighbours
) -> list[FlightRecord]:
    """Return the records, each with the stage message that its rank waits for; NCCL's records already contain it."""
    waits = dict(_waits(seen, neighbours))
    found = []
    for rank, flight in flights.items():
        message = waits.get(rank)
        if message is not None and not flight.messages:
            own = P2PMessage(
                f"{message}", message.source, message.target, _LAST, message.source == rank, f"{message}"
            )  # fmt: skip
            flight = replace(flight, messages=(own,))
        found.append(flight)
    return found


def never_sent(seen: Sequence[RankSample], neighbours: StageNeighbours) -> frozenset[int]:
    """Return ranks that have gone on without sending a message that another stage is waiting for."""
    by_rank = {one.rank: one for one in seen if not one.ended}
    found = set()
    for rank, message in _waits(seen, neighbours):
        source = by_rank.get(message.source)
        if source is None or rank != message.target or isinstance(message, RingMessage):
            continue
        if _is_beyond(source, by_rank[rank], message, neighbours):
            found.add(message.source)
    return frozenset(found)


def _waits(seen: Iterable[RankSample], neighbours: StageNeighbours) -> Iterable[tuple[int, StageMessage | RingMessage]]:
    for one in seen:
        if not one.ended and one.moment is not None:
            message = neighbours.message(one.rank, one.moment)
            if message is not None:
                yield one.rank, message


def _is_beyond(source: RankSample, waiting: RankSample, message: StageMessage, neighbours: StageNeighbours) -> bool:
    """Return whether the program of `source` has passed the point where it sends `message`."""
    sent = source.sent
    if sent is None or "eval" in (source.phase, waiting.phase) or source.step != waiting.step:
        return sent is not None and source.step > waiting.step
    counts = sent.activations if message.activation else sent.gradients
    place = message.stage // neighbours.config.ranks
    # Until its own passes of this step begin, its counts are those of the previous step.
    if sent.after_step != waiting.step or place >= len(counts) or counts[place] <= message.micro_batch:
        return False
    # A rank waiting for this message to be received has already sent it.
    return source.moment is None or neighbours.message(source.rank, source.moment) != message
