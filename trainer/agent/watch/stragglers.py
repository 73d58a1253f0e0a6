"""Stragglers: slow ranks by section, and waits of pipelines and rings. Pure.

A rank that has gone on beyond a message that its receiver waits for has never sent it.

Ranks with the same model-parallel coordinate do the same work on other data. Each is held against the median of the
*others*. In a group of two, a rank is slow only when it is slower than its peer and slower than it was itself. Where no
rank has a peer (pure tensor or pipeline parallelism), each is held against its own past, and that ratio against those
of its neighbours: what makes all of them slower lies in the data or in the machine. A single rank is never judged.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from trainer.agent.flight.flight_record import FlightRecord
from trainer.agent.flight.p2p_messages import P2PMessage
from trainer.agent.watch.hang_limits import RankSample
from trainer.contract.config_sections.fault_detection_config import StragglerConfig
from trainer.contract.config_sections.parallel_config import ParallelConfig, PipelineConfig, place_in
from trainer.contract.pipeline.stage_split import rank_of_stage
from trainer.contract.ranks.progress import SECTIONS
from trainer.contract.ranks.stage_activity import AWAITED_SENDS, OF_ACTIVATIONS, RECEIVES, Activity, Moment

_LAST = 1 << 40
"""The place of a wait in its rank's record: it has called nothing since."""


@dataclass(frozen=True, kw_only=True)
class StageMessage:
    """An activation or a gradient of one micro-batch between two stages; the ranks are those of the world."""

    activation: bool
    micro_batch: int
    stage: int  # that sends it
    source: int
    target: int

    def __str__(self) -> str:
        return f"{'activation' if self.activation else 'gradient'} of micro-batch {self.micro_batch}"


@dataclass(frozen=True, kw_only=True)
class RingMessage:
    """Keys and values on their way around a ring; the ranks are those of the world."""

    source: int
    target: int

    def __str__(self) -> str:
        return "message with keys and values"


class StageNeighbours:
    """The ranks of a job that have neighbouring stages; pipelines are the outermost dimension of the mesh."""

    def __init__(self, config: PipelineConfig, world: int) -> None:
        self.config, self._inner = config, max(1, world // config.ranks)

    def message(self, rank: int, moment: Moment) -> StageMessage | RingMessage | None:
        """What `rank` waits for at this moment; None where it waits for no message."""
        if moment.activity is Activity.WAIT_IN_RING:
            return RingMessage(source=moment.stage, target=rank)
        receives = moment.activity in RECEIVES
        if not receives and moment.activity not in AWAITED_SENDS:
            return None
        activation = moment.activity in OF_ACTIVATIONS
        step = 1 if activation else -1  # activations go to the next stage, gradients to the one before
        sender = moment.stage - step if receives else moment.stage
        if not (0 <= sender < self.config.stages and 0 <= sender + step < self.config.stages):
            return None
        return StageMessage(
            activation=activation, micro_batch=moment.micro_batch, stage=sender,
            source=self._rank(sender, rank), target=self._rank(sender + step, rank),
        )  # fmt: skip

    def _rank(self, stage: int, like: int) -> int:
        """The rank that has `stage` for the tokens of rank `like`."""
        return rank_of_stage(self.config, stage) * self._inner + like % self._inner


def with_stage_waits(
    flights: Mapping[int, FlightRecord], seen: Iterable[RankSample], neighbours: StageNeighbours
) -> list[FlightRecord]:
    """The records, and in each the message between stages that its rank waits for; NCCL's hold their own."""
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
    """Ranks that have gone on beyond a message for which another stage waits."""
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
    """Whether the program of `source` has the sending of `message` behind it."""
    sent = source.sent
    if sent is None or "eval" in (source.phase, waiting.phase) or source.step != waiting.step:
        return sent is not None and source.step > waiting.step
    counts = sent.activations if message.activation else sent.gradients
    place = message.stage // neighbours.config.ranks
    # Before its own passes of this step its counts are those of the step before.
    if sent.after_step != waiting.step or place >= len(counts) or counts[place] <= message.micro_batch:
        return False
    # Who waits until this very message is taken has sent it.
    return source.moment is None or neighbours.message(source.rank, source.moment) != message


WINDOW = 4
"""Steps of a window, the shortest stretch in which ranks are compared; windows end at its multiples."""
_SURE = 4.0  # standard deviations of the group's own noise that a slow rank must lie above its peers
_MIXED = 16  # in groups up to this size a quartile says nothing
_FALSE_NAMES = 5e-6  # allowed for each window of a whole group
_RAREST = 5e-4  # a group of healthy ranks is never believed to have fewer hiccups
_FAR = 6.0  # standard deviations from its neighbours that make a window a hiccup


@dataclass(frozen=True, kw_only=True)
class Level:
    """How closely one looks: `span` windows of `WINDOW` steps are taken together."""

    span: int
    name: str

    def noise(self, noise: float) -> float:
        return noise / math.sqrt(self.span)


SHORT, LONG = Level(span=1, name="short"), Level(span=6, name="long")
"""Short windows see a rank that is much slower soon, long ones see one that is a little slower at all."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A rank is slower than its peers, or (`over`) as fast as they are again."""

    rank: int
    node: str
    section: str  # the one with the largest excess: data, forward, backward or optimizer
    ratio: float
    step: int  # up to which it was looked at, counted as the ranks count their work
    steps: int  # in which it was slow, so far
    gpu_hours: float  # lost by the whole world, which waits for it
    reason: str
    over: bool = False


def coordinate(parallel: ParallelConfig, world_size: int) -> Callable[[int], Hashable]:
    """Ranks for which this gives the same value do the same work: those of one place in a pipeline, in cp and in tp."""
    stages = parallel.pipeline.ranks
    sizes = (stages, world_size // (stages * parallel.cp * parallel.tp), parallel.cp, parallel.tp)

    def place(rank: int) -> Hashable:
        stage, _, *shares = place_in(sizes, rank)
        return stage, *shares

    return place


def should_report_work(told: int, steps: int) -> bool:
    """Whether a rank's work up to `steps` should be reported when it was last reported up to `told`.

    A reading from the very end of a window makes it exact; what lies between two windows is of no use.
    """
    return steps // WINDOW > told // WINDOW


def reference(ordered: Sequence[float]) -> float:
    """The median of the others, for every rank in the slower half: whichever of them is left out, it is the same."""
    return _middle(ordered, len(ordered) - 1)


def _middle(ordered: Sequence[float], count: int, first: int = 0) -> float:
    """The median of `count` sorted values from `first` on."""
    return (ordered[first + (count - 1) // 2] + ordered[first + count // 2]) / 2


def spread(ordered: Sequence[float]) -> float:
    """The robust standard deviation of a healthy rank's ratio to its peers, from one window of a group."""
    count = len(ordered)
    if count > _MIXED:
        return (ordered[count * 3 // 4] - ordered[count // 4]) / 1.349 / _middle(ordered, count)
    slower, faster = reference(ordered), _middle(ordered, count - 1, 1)
    aside = [abs(value / (slower if 2 * at >= count else faster) - 1) for at, value in enumerate(ordered)]
    return median(aside) / 0.6745


def limit(level: Level, noise: float, config: StragglerConfig) -> float:
    """The ratio above which a window of this level is slow; `noise` is that of one short window."""
    return 1 + max(config.ratio - 1, _SURE * level.noise(noise))


def raised(level: Level, noise: float, config: StragglerConfig) -> float:
    """What each single window must exceed; long windows are few, so only their median must exceed the limit."""
    bar = limit(level, noise, config)
    return bar if level is SHORT else 1 + (bar - 1) / 2


def steady(ratios: Sequence[float], noise: float) -> float:
    """The mean of neighbouring windows without those in which the rank only hiccuped."""
    middle = median(ratios)
    aside = sorted(abs(ratio - middle) for ratio in ratios)
    farthest = max(_FAR * noise, aside[len(aside) // 2])
    return fmean(ratio for ratio in ratios if abs(ratio - middle) <= farthest)


def needed(level: Level, hiccups: float, ranks: int, config: StragglerConfig) -> int:
    """Windows in a row that must be slow; `hiccups`: the share of a healthy group's windows that were."""
    if level is LONG:
        return config.windows
    often = min(0.5, max(_RAREST, hiccups))
    return max(config.windows, math.ceil(math.log(_FALSE_NAMES / ranks) / math.log(often)))


def is_slow(
    level: Level, ratios: Sequence[float], *, noise: float, hiccups: float, ranks: int, config: StragglerConfig,
    than: str = "its peers",
) -> tuple[bool, str]:  # fmt: skip
    """Whether a rank with these newest raised windows in a row is a straggler, and why (not); `than` what, in words."""
    wanted = needed(level, hiccups, ranks, config)
    if len(ratios) < wanted:
        return False, f"slow in {len(ratios)} of {wanted} {level.name} windows"
    bar, found = limit(level, noise, config), median(ratios[-wanted:])
    if found <= bar:
        return False, f"{found:.2f} x {than} is not above {bar:.2f} x"
    return True, f"{found:.2f} x {than} in {wanted} {level.name} windows in a row (limit {bar:.2f} x)"


def is_over(ratio: float, named: float) -> bool:
    """Whether a window is nearer to the peers than to the ratio with which the rank was named."""
    return ratio < 1 + (named - 1) / 2


def section(own: Sequence[float], others: Sequence[float]) -> tuple[str, float]:
    """The section (in the order of `SECTIONS`) with the largest excess over the peers, and its ratio."""
    at = max(range(len(own)), key=lambda index: own[index] - others[index])
    ratio = own[at] / others[at] if others[at] > 0 else math.inf
    return SECTIONS[at].name.lower(), ratio
