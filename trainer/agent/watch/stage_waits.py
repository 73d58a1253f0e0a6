"""TODO."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer.agent.flight.flight_record import FlightRecord, P2PMessage
from trainer.agent.watch.hang_limits import RankSample
from trainer.costs.stage_split import rank_of_stage
from trainer.protocol.config_sections.parallel_config import PipelineConfig
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
