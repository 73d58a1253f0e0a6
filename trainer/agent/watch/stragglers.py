"""Stragglers: slow ranks by section, and waits of pipelines and rings. Pure.
A rank that has continued past a message that its receiver waits for has never sent it.
Ranks with the same model-parallel coordinate do the same work on other data. Each is compared with the median of the
*others*. In a group of two, a rank is slow only if it is slower than its peer and than its own past. If no rank has a
peer (pure tensor or pipeline parallelism), each is compared with its own past, and that ratio with its neighbours': a
common slowdown comes from the data or the machine. A single rank is never judged.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from trainer.agent.flight.flight_record import FlightRecord
from trainer.agent.flight.p2p_messages import P2PMessage
from trainer.agent.watch.hang_limits import RankSample
from trainer.costs.stage_split import rank_of_stage
from trainer.protocol.config_sections.fault_detection_config import StragglerConfig
from trainer.protocol.config_sections.parallel_config import ParallelConfig, PipelineConfig, mesh_coordinates
from trainer.protocol.rank_progress.progress import SECTIONS
from trainer.protocol.rank_progress.stage_activity import (
    AWAITED_SENDS,
    OF_ACTIVATIONS,
    RECEIVES,
    Activity,
    StageActivity,
)

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
    """Ranks with neighbouring pipeline stages; pipelines are the outermost dimension of the mesh."""

    def __init__(self, config: PipelineConfig, world: int) -> None:
        self.config, self._inner = config, max(1, world // config.ranks)

    def message(self, rank: int, moment: StageActivity) -> StageMessage | RingMessage | None:
        """Return the message that `rank` waits for at this moment, or None."""
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
        """Return the rank that has `stage` for the tokens of rank `like`."""
        return rank_of_stage(self.config, stage) * self._inner + like % self._inner


def with_stage_waits(
    flights: Mapping[int, FlightRecord], seen: Iterable[RankSample], neighbours: StageNeighbours
) -> list[FlightRecord]:
    """Return the records, each with the message between stages that its rank waits for; NCCL's contain their own."""
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
    """Return ranks that have continued past a message that another stage waits for."""
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
    """Return whether the program of `source` has passed the send of `message`."""
    sent = source.sent
    if sent is None or "eval" in (source.phase, waiting.phase) or source.step != waiting.step:
        return sent is not None and source.step > waiting.step
    counts = sent.activations if message.activation else sent.gradients
    place = message.stage // neighbours.config.ranks
    # Before its own passes of this step, its counts are those of the previous step.
    if sent.after_step != waiting.step or place >= len(counts) or counts[place] <= message.micro_batch:
        return False
    # A rank that waits for this message to be received has already sent it.
    return source.moment is None or neighbours.message(source.rank, source.moment) != message


WINDOW = 4
"""Steps per window, the shortest interval in which ranks are compared; windows end at its multiples."""
_SURE = 4.0  # standard deviations of the group's own noise by which a slow rank must exceed its peers
_MIXED = 16  # in groups up to this size a quartile is meaningless
_FALSE_NAMES = 5e-6  # allowed per window of a whole group
_RAREST = 5e-4  # minimum assumed share of hiccups in a healthy group
_FAR = 6.0  # standard deviations from its neighbours that make a window a hiccup


@dataclass(frozen=True, kw_only=True)
class Level:
    """Resolution of the comparison: `span` windows of `WINDOW` steps are combined."""

    span: int
    name: str

    def noise(self, noise: float) -> float:
        return noise / math.sqrt(self.span)


SHORT, LONG = Level(span=1, name="short"), Level(span=6, name="long")
"""Short windows detect a much slower rank soon; long ones detect a slightly slower one."""


@dataclass(frozen=True, kw_only=True)
class StragglerVerdict:
    """A rank is slower than its peers or, if `over`, as fast as they are again."""

    rank: int
    node: str
    section: str  # largest excess: data, forward, backward or optimizer
    ratio: float
    step: int  # last step examined, counted as the ranks count their work
    steps: int  # slow steps so far
    gpu_hours: float  # lost by the whole world, which waits for it
    reason: str
    over: bool = False


def coordinate(parallel: ParallelConfig, world_size: int) -> Callable[[int], Hashable]:
    """Return a function whose value is equal for ranks with the same work: same pipeline stage, cp and tp position."""
    stages = parallel.pipeline.ranks
    sizes = (stages, world_size // (stages * parallel.cp * parallel.tp), parallel.cp, parallel.tp)

    def place(rank: int) -> Hashable:
        stage, _, *shares = mesh_coordinates(sizes, rank)
        return stage, *shares

    return place


def should_report_work(told: int, steps: int) -> bool:
    """Return whether to report a rank's work up to `steps` if work up to `told` was reported.
    A reading from the very end of a window makes it exact; readings within a window are useless.
    """
    return steps // WINDOW > told // WINDOW


def reference(ordered: Sequence[float]) -> float:
    """Return the median of the others, which is the same for every rank in the slower half."""
    return _middle(ordered, len(ordered) - 1)


def _middle(ordered: Sequence[float], count: int, first: int = 0) -> float:
    """Return the median of `count` sorted values from `first` on."""
    return (ordered[first + (count - 1) // 2] + ordered[first + count // 2]) / 2


def spread(ordered: Sequence[float]) -> float:
    """Return the robust standard deviation of a healthy rank's ratio to its peers, from one window of a group."""
    count = len(ordered)
    if count > _MIXED:
        return (ordered[count * 3 // 4] - ordered[count // 4]) / 1.349 / _middle(ordered, count)
    slower, faster = reference(ordered), _middle(ordered, count - 1, 1)
    aside = [abs(value / (slower if 2 * at >= count else faster) - 1) for at, value in enumerate(ordered)]
    return median(aside) / 0.6745


def limit(level: Level, noise: float, config: StragglerConfig) -> float:
    """Return the ratio above which a window of this level is slow; `noise` is that of one short window."""
    return 1 + max(config.ratio - 1, _SURE * level.noise(noise))


def window_limit(level: Level, noise: float, config: StragglerConfig) -> float:
    """Return the ratio each window must exceed. Long windows are few, so only their median must exceed the limit."""
    bar = limit(level, noise, config)
    return bar if level is SHORT else 1 + (bar - 1) / 2


def steady(ratios: Sequence[float], noise: float) -> float:
    """Return the mean of neighbouring windows, excluding hiccups."""
    middle = median(ratios)
    aside = sorted(abs(ratio - middle) for ratio in ratios)
    farthest = max(_FAR * noise, aside[len(aside) // 2])
    return fmean(ratio for ratio in ratios if abs(ratio - middle) <= farthest)


def needed_windows(level: Level, hiccups: float, ranks: int, config: StragglerConfig) -> int:
    """Return the number of consecutive slow windows required; `hiccups`: share of slow windows in a healthy group."""
    if level is LONG:
        return config.windows
    often = min(0.5, max(_RAREST, hiccups))
    return max(config.windows, math.ceil(math.log(_FALSE_NAMES / ranks) / math.log(often)))


def is_slow(
    level: Level, ratios: Sequence[float], *, noise: float, hiccups: float, ranks: int, config: StragglerConfig,
    than: str = "its peers",
) -> tuple[bool, str]:  # fmt: skip
    """Return whether these newest consecutive raised windows show a straggler, and the reason.
    `than` names the reference.
    """
    wanted = needed_windows(level, hiccups, ranks, config)
    if len(ratios) < wanted:
        return False, f"slow in {len(ratios)} of {wanted} {level.name} windows"
    bar, found = limit(level, noise, config), median(ratios[-wanted:])
    if found <= bar:
        return False, f"{found:.2f} x {than} is not above {bar:.2f} x"
    return True, f"{found:.2f} x {than} in {wanted} {level.name} windows in a row (limit {bar:.2f} x)"


def is_over(ratio: float, named: float) -> bool:
    """Return whether a window is nearer to the peers than to the ratio at which the rank was named."""
    return ratio < 1 + (named - 1) / 2


def section(own: Sequence[float], others: Sequence[float]) -> tuple[str, float]:
    """Return the section (in the order of `SECTIONS`) with the largest excess over the peers, and its ratio."""
    at = max(range(len(own)), key=lambda index: own[index] - others[index])
    ratio = own[at] / others[at] if others[at] > 0 else math.inf
    return SECTIONS[at].name.lower(), ratio
