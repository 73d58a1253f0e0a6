"""Pipeline schedules as tables, with their simulated times and bubbles. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """Kinds of actions, with their codes in torch's tables."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of both activations and weights
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    SEND_ACTIVATION = "SEND_F"
    RECEIVE_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECEIVE_GRADIENT = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE_GRAD"


COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


class PipelineAction(NamedTuple):
    """An entry in a table; `micro_batch` is -1 for an action that a stage performs once per step."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch if self.micro_batch >= 0 else ''}"


Table = Sequence[Sequence[PipelineAction]]
"""Actions of each pipeline rank, in order."""


def activations_held(table: Table) -> list[int]:
    """Return each rank's maximum number of (stage, micro-batch) pairs with live activations."""
    most = []
    for actions in table:
        held = high = 0
        for action in actions:
            held += (action.kind is Kind.FORWARD) - (action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT))
            high = max(high, held)
        most.append(high)
    return most


def formula(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Return the bubble (p - 1) / (m + p - 1) of `gpipe` and `1f1b` with equal stages.

    With v stages per rank, m is replaced by v x m. Sources: Huang et al. 2019, section 2.1, and Narayanan et al.
    2021, section 2.2, who state the bubble as a share of the work.
    """
    return (ranks - 1) / (stages_per_rank * micro_batches + ranks - 1)


@dataclass(frozen=True, kw_only=True)
class RankSeconds:
    """Times of one pipeline rank in one step, in seconds; the mappings are keyed by stage."""

    span: float
    """Time from the start of the step to the end of the rank's last computation."""
    computed: Mapping[int, float]
    waited: Mapping[int, float]
    """Time spent waiting for activations or gradients that this stage needs."""
    sends: float = 0.0
    """Time spent at the end of the step until the other stages had received all messages."""
    reductions: float = 0.0
    """Time spent reducing gradients over the data-parallel ranks of a stage."""


def bubbles(ranks: Sequence[RankSeconds]) -> list[float]:
    """Return the share of the step that each rank spends in receives and after its last computation."""
    longest = max((rank.span for rank in ranks), default=0.0)
    if not longest:
        return [0.0 for _ in ranks]
    return [(sum(rank.waited.values()) + longest - rank.span) / longest for rank in ranks]


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """Times of one micro-batch in a stage; `send` is the delay until its result reaches another rank."""

    forward: float
    input_gradient: float
    weight_gradient: float
    send: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Span:
    """A computation; `ready` is the time when its inputs became available."""

    rank: int
    action: PipelineAction
    ready: float
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class PipelineTimeline:
    """All computations of a step, in order on each rank."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def seconds(self) -> float:
        """Return the duration of the whole step."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    def ranks(self) -> list[RankSeconds]:
        """Return the times of each rank, in the same form as the times measured in training."""
        return [_rank_seconds(spans) for spans in self.spans]


class DeadlockError(ValueError):
    """The ranks of a table wait for each other; the text lists each rank's pending action."""


def simulate(table: Table, stages: Sequence[StageSeconds]) -> PipelineTimeline:
    """Start each action once its rank is free and its input has arrived; sends take no time. Raises DeadlockError."""
    arrivals: dict[PipelineAction, float] = {}
    clocks, places = [0.0 for _ in table], [0 for _ in table]
    spans: list[list[Span]] = [[] for _ in table]
    own = [{action.stage for action in actions} for actions in table]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(table):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                ready = _ready(action, len(stages), arrivals)
                if ready is None:
                    break
                if action.kind in COMPUTES:
                    begin = max(clocks[rank], ready)
                    end = begin + action_seconds(action, stages)
                    spans[rank].append(Span(rank=rank, action=action, ready=ready, begin=begin, end=end))
                    clocks[rank] = end
                _deliver(action, clocks[rank], stages, own[rank], arrivals)
                places[rank] += 1
                moved = True
    waiting = [f"rank {rank}: {actions[place]}" for rank, (actions, place) in _unfinished_ranks(table, places).items()]
    if waiting:
        raise DeadlockError(f"ranks wait for each other: {', '.join(waiting)}")
    return PipelineTimeline(spans=tuple(map(tuple, spans)))


def action_seconds(action: PipelineAction, stages: Sequence[StageSeconds]) -> float:
    """Return an action's duration. torch 2.13 runs the first stage's whole backward pass with its weight gradients."""
    stage = stages[action.stage]
    backward = stage.input_gradient + stage.weight_gradient
    if action.kind is Kind.INPUT_GRADIENT:
        return stage.input_gradient if action.stage else 0.0
    if action.kind is Kind.WEIGHT_GRADIENT:
        return stage.weight_gradient if action.stage else backward
    return stage.forward if action.kind is Kind.FORWARD else backward


def _ready(action: PipelineAction, stages: int, arrivals: Mapping[PipelineAction, float]) -> float | None:
    """Return the arrival time of an action's input, or None if it is still unknown."""
    stage, kind, micro_batch = action
    if kind is Kind.FORWARD and stage > 0:
        return arrivals.get(PipelineAction(stage, Kind.RECEIVE_ACTIVATION, micro_batch))
    if kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and stage < stages - 1:
        return arrivals.get(PipelineAction(stage, Kind.RECEIVE_GRADIENT, micro_batch))
    return 0.0


def _deliver(
    action: PipelineAction,
    now: float,
    stages: Sequence[StageSeconds],
    own: set[int],
    arrivals: dict[PipelineAction, float],
) -> None:
    """Record the arrival time of an action's result at the next stage; within a rank, it arrives immediately."""
    stage, kind, micro_batch = action
    if kind in (Kind.FORWARD, Kind.SEND_ACTIVATION):
        to = PipelineAction(stage + 1, Kind.RECEIVE_ACTIVATION, micro_batch)
    elif kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.SEND_GRADIENT):
        to = PipelineAction(stage - 1, Kind.RECEIVE_GRADIENT, micro_batch)
    else:
        return
    if kind in COMPUTES and to.stage in own:
        arrivals[to] = now
    elif kind not in COMPUTES:
        arrivals[to] = now + stages[stage].send


def _unfinished_ranks(table: Table, places: Sequence[int]) -> dict[int, tuple[Sequence[PipelineAction], int]]:
    return {
        rank: (actions, place)
        for rank, (actions, place) in enumerate(zip(table, places, strict=True))
        if place < len(actions)
    }


def _rank_seconds(spans: Sequence[Span]) -> RankSeconds:
    computed: dict[int, float] = {}
    waited: dict[int, float] = {}
    free = 0.0
    for span in spans:
        stage = span.action.stage
        computed[stage] = computed.get(stage, 0.0) + span.end - span.begin
        waited[stage] = waited.get(stage, 0.0) + span.begin - free
        free = span.end
    return RankSeconds(span=free, computed=computed, waited=waited)
