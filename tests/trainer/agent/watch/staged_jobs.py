"""Made-up jobs of other layouts: stages that pass micro-batches on, ranks around a ring, experts of uneven work."""

import random
from collections import deque
from collections.abc import Iterator, Sequence

from tests.trainer.agent.watch.made_up_job import FOR_EVER, NORMAL, Actor, Job, Slow
from trainer.agent.flight.analysis import analyse
from trainer.agent.flight.flight_record import DONE, SCHEDULED, CollectiveEntry, FlightRecord, Group
from trainer.agent.flight.wait_graph import Finding
from trainer.agent.watch.hang_limits import RankSample
from trainer.agent.watch.waiting_ranks import StageNeighbours, never_sent, with_stage_waits
from trainer.protocol.config_sections.pipeline_config import PipelineConfig
from trainer.protocol.rank_progress.progress import Activity, SentMessages, StageActivity

MICRO_BATCHES = 6
_KEPT = 8


class PipelineJob(Job):
    """Eight ranks in two or four stages, by 1F1B; records hold collectives alone, as gloo's do."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.stages = 2 if seed % 2 else 4
        self.neighbours = StageNeighbours(PipelineConfig(stages=self.stages), len(self.actors))
        self.uneven = [self.rng.uniform(0.5, 2.0) for _ in range(self.stages)]

    def _passes(self, slow: Sequence[Slow]) -> None:
        per_stage, ended = len(self.actors) // self.stages, dict[tuple[str, int, int], float]()
        todo = {actor.rank: deque(self._order(actor.rank // per_stage)) for actor in self.actors}
        extra = {(one.phase, rank): one for one in slow for rank in one.ranks}
        while any(todo.values()):
            for actor in self.actors:
                while todo[actor.rank] and self._advance(actor, todo[actor.rank][0], ended, extra):
                    todo[actor.rank].popleft()
        for actor in self.actors:
            actor.moment = None

    def _order(self, stage: int) -> Iterator[tuple[str, int]]:
        ahead = min(self.stages - 1 - stage, MICRO_BATCHES)
        for number in range(MICRO_BATCHES + ahead):
            if number < MICRO_BATCHES:
                yield "forward", number
            if number >= ahead:
                yield "backward", number - ahead

    def _advance(
        self, actor: Actor, action: tuple[str, int], ended: dict[tuple[str, int, int], float],
        extra: dict[tuple[str, int], Slow],
    ) -> bool:  # fmt: skip
        """One pass of one micro-batch, after the wait for what it needs; False while nobody knows how long that is."""
        phase, number = action
        per_stage = len(self.actors) // self.stages
        stage, forward = actor.rank // per_stage, phase == "forward"
        source = actor.rank + (-per_stage if forward else per_stage)
        needs = 0 <= source < len(self.actors)
        if needs and (phase, source, number) not in ended:
            return False
        if action == ("forward", 0):
            actor.sent = SentMessages(after_step=actor.step, activations=(0,), gradients=(0,))
        arrives = ended[phase, source, number] if needs else 0.0
        if arrives > actor.free:
            actor.moment = StageActivity(
                Activity.WAIT_FOR_ACTIVATION if forward else Activity.WAIT_FOR_GRADIENT, stage, number
            )
            actor.stay(phase if actor.stays else "forward", arrives - actor.free)
        actor.moment = StageActivity(Activity.FORWARD if forward else Activity.BACKWARD, stage, number)
        own = NORMAL[phase] / MICRO_BATCHES * self.uneven[stage] * self.rng.lognormvariate(0, 0.15)
        one = extra.get((phase, actor.rank))
        if one is None:
            actor.stay(phase, own)
        else:
            more = one.seconds if number == 0 else 0.0
            actor.stay(phase, own * one.times + more, lives=one.lives, state=one.state, helper=one.helper)
        ended[phase, actor.rank, number] = actor.free
        assert actor.sent is not None
        counts = (number + 1, actor.sent.gradients[0]) if forward else (actor.sent.activations[0], number + 1)
        if actor.free < FOR_EVER:
            actor.sent = SentMessages(after_step=actor.step, activations=counts[:1], gradients=counts[1:])
        return True

    def records(self, now: float) -> Finding:
        """As the coordinator finds it: gloo's records of collectives, and what stages wait for by their cells."""
        if self.finding is not None:
            return self.finding
        seen = [self._sample(actor, now) for actor in self.actors]
        flights = {actor.rank: self._record(actor, now) for actor in self.actors}
        ranks = [actor.rank for actor in self.actors]
        return analyse(with_stage_waits(flights, seen, self.neighbours), ranks, (), never_sent(seen, self.neighbours))

    def _sample(self, actor: Actor, now: float) -> RankSample:
        stay = next((one for one in reversed(actor.stays) if one.at <= now), actor.stays[0])
        return RankSample(
            rank=actor.rank, node=actor.node, step=stay.step, phase=stay.phase, moment=stay.moment, sent=stay.sent
        )

    def _record(self, actor: Actor, now: float) -> FlightRecord:
        entered = sum(at <= now for at in actor.joins)
        everybody = [sum(at <= now for at in one.joins) for one in self.actors]
        over = min(min(everybody), entered)
        entries = tuple(
            CollectiveEntry("0", number, "all_reduce", "[4]", 4, "Float", DONE if number <= over else SCHEDULED, number)
            for number in range(max(1, entered - _KEPT), entered + 1)
        )
        group = Group(tuple(range(len(self.actors))), entered, over, sure=True)
        return FlightRecord(rank=actor.rank, groups={"0": group}, entries=entries, whole=True)


class RingJob(Job):
    """Eight ranks around a ring: in each pass every rank sends on seven times, and waits for the one before it."""

    def _passes(self, slow: Sequence[Slow]) -> None:
        for phase in ("forward", "backward"):
            self._play_all(phase, slow)
            begun = [actor.free for actor in self.actors]
            for _ in range(len(self.actors) - 1):
                for actor in self.actors:
                    actor.messages += 1
                    actor.stay(phase, 0.0)
                begun = [max(own, begun[rank - 1]) + 0.002 * self.rng.random() for rank, own in enumerate(begun)]
                for actor, at in zip(self.actors, begun, strict=True):
                    actor.free = at


class ExpertJob(Job):
    """Eight ranks that exchange tokens in both passes; popular experts make some compute many times as long."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, sharded=True)
        self._popular = random.Random(seed)

    def _work(self, actor: Actor, phase: str) -> float:
        many = self._popular.choice((0.3, 1.0, 1.0, 6.0)) if phase in ("forward", "backward") else 1.0
        return super()._work(actor, phase) * many


LAYOUTS: dict[str, type[Job]] = {"pipeline": PipelineJob, "ring": RingJob, "experts": ExpertJob}
