"""Pipeline schedules as tables, their simulated times and their bubbles. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What an action does, with the letters of torch's tables."""

    FORWARD = "F"
    BACKWARD = "B"  # gradients of activations and of weights
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


class Action(NamedTuple):
    """One entry; `micro_batch` is -1 for what is done once for a stage."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch if self.micro_batch >= 0 else ''}"


Table = Sequence[Sequence[Action]]
"""By rank of the pipeline."""


def activations_held(table: Table) -> list[int]:
    """The most pairs of a stage and a micro-batch for which each rank keeps activations at a time.

    They are kept from the forward pass to the last gradient that is computed from them.
    """
    most = []
    for actions in table:
        held = high = 0
        for action in actions:
            held += (action.kind is Kind.FORWARD) - (action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT))
            high = max(high, held)
        most.append(high)
    return most


def formula(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """(p - 1) / (m + p - 1) of `gpipe` and `1f1b` with equal stages; with v stages on each rank, v x m for m.

    Huang et al. 2019, section 2.1; Narayanan et al. 2021, section 2.2, which gives it as a share of the work.
    """
    return (ranks - 1) / (stages_per_rank * micro_batches + ranks - 1)


@dataclass(frozen=True, kw_only=True)
class RankSeconds:
    """What one rank of a pipeline did in one step, in seconds; the mappings are by stage."""

    span: float
    """From the begin of the step to the end of the rank's last computation."""
    computed: Mapping[int, float]
    waited: Mapping[int, float]
    """Waiting for activations or gradients that this stage needs."""
    sends: float = 0.0
    """Waiting at the end of the step until other stages had taken what was sent."""
    reductions: float = 0.0
    """In the reduction of gradients over the data-parallel ranks of a stage."""


def bubbles(ranks: Sequence[RankSeconds]) -> list[float]:
    """The bubble of each rank of a pipeline.

    A rank waits in receives, and after its last computation for the rank that ends last: all begin a step together.
    """
    longest = max((rank.span for rank in ranks), default=0.0)
    if not longest:
        return [0.0 for _ in ranks]
    return [(sum(rank.waited.values()) + longest - rank.span) / longest for rank in ranks]


def bubbles_of_stages(ranks: Sequence[RankSeconds]) -> dict[int, float]:
    """The share of the step that each stage made its rank wait in receives; without the end of the step."""
    longest = max((rank.span for rank in ranks), default=0.0)
    return {stage: seconds / longest for rank in ranks for stage, seconds in rank.waited.items() if longest}


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """What one micro-batch takes in a stage; `send` passes between its end and its arrival in another rank."""

    forward: float
    input_gradient: float
    weight_gradient: float
    send: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Span:
    """One computation; `ready` is when what it needs was there."""

    rank: int
    action: Action
    ready: float
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All computations of a step, those of each rank in their order."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    def ranks(self) -> list[RankSeconds]:
        """As they are measured in a step that trains."""
        return [_rank_seconds(spans) for spans in self.spans]


class DeadlockError(ValueError):
    """The ranks of a table wait for each other; the text names what each waits for."""


def simulate(table: Table, stages: Sequence[StageSeconds]) -> Timeline:
    """Begin every action as soon as its rank is free and its input is there; raises DeadlockError.

    Sends take none of their rank's time, and do not slow each other down.
    """
    arrivals: dict[Action, float] = {}
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
                    end = begin + seconds_of(action, stages)
                    spans[rank].append(Span(rank=rank, action=action, ready=ready, begin=begin, end=end))
                    clocks[rank] = end
                _deliver(action, clocks[rank], stages, own[rank], arrivals)
                places[rank] += 1
                moved = True
    waiting = [f"rank {rank}: {actions[place]}" for rank, (actions, place) in _unfinished(table, places).items()]
    if waiting:
        raise DeadlockError(f"ranks wait for each other: {', '.join(waiting)}")
    return Timeline(spans=tuple(map(tuple, spans)))


def seconds_of(action: Action, stages: Sequence[StageSeconds]) -> float:
    """torch 2.13 computes the whole backward pass of the first stage with its weights: nothing is sent from there."""
    stage = stages[action.stage]
    backward = stage.input_gradient + stage.weight_gradient
    if action.kind is Kind.INPUT_GRADIENT:
        return stage.input_gradient if action.stage else 0.0
    if action.kind is Kind.WEIGHT_GRADIENT:
        return stage.weight_gradient if action.stage else backward
    return stage.forward if action.kind is Kind.FORWARD else backward


def _ready(action: Action, stages: int, arrivals: Mapping[Action, float]) -> float | None:
    """When the input of an action is there; None: not yet known."""
    stage, kind, micro_batch = action
    if kind is Kind.FORWARD and stage > 0:
        return arrivals.get(Action(stage, Kind.RECEIVE_ACTIVATION, micro_batch))
    if kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT) and stage < stages - 1:
        return arrivals.get(Action(stage, Kind.RECEIVE_GRADIENT, micro_batch))
    return 0.0


def _deliver(
    action: Action, now: float, stages: Sequence[StageSeconds], own: set[int], arrivals: dict[Action, float]
) -> None:
    """Note when the result of an action is where it is needed: in the same rank at once."""
    stage, kind, micro_batch = action
    if kind in (Kind.FORWARD, Kind.SEND_ACTIVATION):
        to = Action(stage + 1, Kind.RECEIVE_ACTIVATION, micro_batch)
    elif kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.SEND_GRADIENT):
        to = Action(stage - 1, Kind.RECEIVE_GRADIENT, micro_batch)
    else:
        return
    if kind in COMPUTES and to.stage in own:
        arrivals[to] = now
    elif kind not in COMPUTES:
        arrivals[to] = now + stages[stage].send


def _unfinished(table: Table, places: Sequence[int]) -> dict[int, tuple[Sequence[Action], int]]:
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
