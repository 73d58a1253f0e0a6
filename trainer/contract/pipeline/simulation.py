"""PURE: a schedule run on paper: when each action of its table begins and ends, given the seconds of each stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.contract.pipeline.bubble import RankSeconds
from trainer.contract.pipeline.schedule_table import COMPUTES, Action, Kind, Table


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
