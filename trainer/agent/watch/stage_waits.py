"""PURE: which ranks of a pipeline, or of a ring, wait for which messages, by their own cells: gloo records none.

A rank that has gone on beyond a message that its receiver waits for has never sent it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer.agent.flight.flight_record import FlightRecord
from trainer.agent.flight.p2p_messages import P2PMessage
from trainer.agent.watch.rank_sample import RankSample
from trainer.contract.config_sections.parallel_config import PipelineConfig
from trainer.contract.pipeline.stage_split import rank_of_stage
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
