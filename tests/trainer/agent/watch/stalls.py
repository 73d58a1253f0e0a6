"""A made-up job is watched, second by second: in hours in which nothing hangs, and until it does."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tests.trainer.agent.watch.made_up_job import FOR_EVER, Actor, Job, Slow, Stay
from trainer.agent.flight.wait_graph import Finding
from trainer.agent.watch.declare_hang import HangJudgement, HangVerdict, judge
from trainer.agent.watch.hang_limits import Limits, RankSample, ReportGaps
from trainer.agent.watch.waiting_ranks import HangKind
from trainer.protocol.config_sections.fault_detection_config import HangConfig
from trainer.protocol.rank_progress.progress import BUCKETS, bucket, quantile

LATE = 6.0
"""Seconds that a report, a second look and the answers to it may add to a limit."""


class Watch:
    """Looks at a job second by second as agents and coordinator do: late, rounded, and with records on demand."""

    def __init__(self, job: Job, config: HangConfig, *, records: bool = True) -> None:
        self.job, self.config, self.rng = job, config, random.Random(job.rng.random())
        self.now = 0.0
        self.judged: Counter[HangVerdict] = Counter()
        self.late = 0.5  # reports of agents are late by up to so many seconds
        self._records = records
        self._reported = {actor.node: 0.0 for actor in job.actors}
        self._silences = ReportGaps()
        self._deaf: dict[str, tuple[float, float]] = {}
        self._counts: dict[str, list[int]] = {}
        self._inquiry: tuple[float, float, Finding] | None = None  # asked, answered, what they say
        self._halted: dict[int, float] = {}

    def pause(self, node: str, begin: float, end: float) -> None:
        """The machine of a node stands still, its agent included."""
        self._deaf[node] = (begin, end)

    def until(self, end: float) -> HangJudgement | None:
        """Judge every second up to `end`; the first judgement that says HUNG."""
        while self.now < end:
            judgement = self._judge()
            self.judged[judgement.verdict] += 1
            if judgement.verdict is HangVerdict.HUNG:
                return judgement
            if judgement.verdict is HangVerdict.LOOK and self._may_ask():
                self._inquiry = self._ask()
            self.now += self.rng.uniform(0.8, 1.0)
        return None

    def _may_ask(self) -> bool:
        return self._inquiry is None or self.now - self._inquiry[0] >= 4

    def _ask(self) -> tuple[float, float, Finding]:
        nothing = Finding(kind="none", reason="no rank has a record")
        finding = self.job.records(self.now) if self._records else nothing
        return self.now, self.now + self.rng.uniform(0, 2), finding

    def _judge(self) -> HangJudgement:
        for node, before in self._reported.items():
            begin, end = self._deaf.get(node, (0.0, 0.0))
            newest = self.now - self.rng.uniform(0, self.late)
            self._reported[node] = max(before, begin if begin <= newest < end else newest)
            self._silences.add_report(node, self._reported[node])
        seen = [self._sight(actor) for actor in self.job.actors]
        halted = {one.rank for one in seen if one.state in "TZ"}
        self._halted = {rank: self._halted.get(rank, self.now) for rank in halted}
        finding, found = None, 0.0
        if self._inquiry is not None and self._inquiry[1] <= self.now:
            found, finding = self.now - self._inquiry[0], self._inquiry[2]
        return judge(
            seen,
            finding,
            Limits(self.config, self.p99()),
            lock_held=frozenset(rank for rank in self.job.locked if seen[rank].age > 3),
            found=found,
            halted_for={rank: self.now - since for rank, since in self._halted.items()},
            report_gaps=self._silences.at(self.now),
        )

    def _sight(self, actor: Actor) -> RankSample:
        reported = self._reported[actor.node]
        stays = actor.stays
        while len(stays) > 1 and stays[1].at <= reported and self._is_shown(stays[1], reported):
            self._count(stays.popleft(), stays[0])
        stay = stays[0]
        age = max(0.0, self.now - stay.at)
        lives_until = FOR_EVER if stay.is_helped() else stay.lives_until
        lived = min(reported, lives_until) - self.rng.uniform(0, 0.5)
        alive = min(age, self.now - lived) if reported - stay.at > 1 else age
        return RankSample(
            rank=actor.rank, node=actor.node, step=stay.step, phase=stay.phase, first=stay.first,
            collective=stay.collective, age=age, alive=alive, state=stay.state, moment=stay.moment, sent=stay.sent,
        )  # fmt: skip

    @staticmethod
    def _is_shown(stay: Stay, reported: float) -> bool:
        """A halt is no move: it is seen from when it happens."""
        return stay.state not in "TZ" or stay.lives_until <= reported

    def _count(self, stay: Stay, following: Stay) -> None:
        if not stay.first and following.at > stay.at:
            self._counts.setdefault(stay.phase, [0] * BUCKETS)[bucket(following.at - stay.at)] += 1

    def p99(self) -> dict[str, float]:
        return {phase: quantile(counts, 0.99) for phase, counts in self._counts.items()}


def legal_hour(seed: int, *, records: bool, job: Job | None = None) -> tuple[Watch, HangJudgement | None]:
    """An hour in which everything is slow that may be, and nothing hangs; `job`: None is one of replicas, or shards."""
    job = job or Job(seed, sharded=seed % 3 == 1, ahead=seed % 3 == 2)
    watch, rng = Watch(job, HangConfig(), records=records), job.rng
    job.begin(restore=rng.choice((30, 1200)), compiling=rng.choice((60, 1200)))
    bad = _play(job, watch, 30)
    spells = [*_spells(job)]
    rng.shuffle(spells)
    for spell in spells:
        bad = bad or _play(job, watch, rng.randrange(20, 60)) or _play(job, watch, 1, *spell)
    bad = bad or _busy_machine(job, watch)
    while bad is None and watch.now < 3600:
        bad = _play(job, watch, 20)
    return watch, bad


def _spells(job: Job) -> Iterator[tuple[Slow, ...]]:
    """What makes a step slow, one after the other."""
    rng, everybody = job.rng, job.everybody()
    one = frozenset({rng.choice(sorted(everybody))})
    phase = rng.choice(("data", "forward", "backward"))
    yield ()
    yield (Slow(ranks=everybody, phase="eval", seconds=300, lives=True),)
    yield (Slow(ranks=one, phase="eval", seconds=300, lives=True),)
    yield (Slow(ranks=frozenset({0}), phase="checkpoint", seconds=180, lives=True),)
    yield (Slow(ranks=one, phase="checkpoint", seconds=180, state="D"),)
    yield (Slow(ranks=frozenset({0}), phase="checkpoint", seconds=600, helper="writer"),)
    yield (Slow(ranks=everybody, phase="compile", seconds=300, helper="children"),)
    yield (Slow(ranks=one, phase="data", seconds=20, helper="children"),)
    yield (Slow(ranks=one, phase="data", seconds=90, state="D"),)
    yield (Slow(ranks=frozenset({0}), phase="checkpoint", seconds=100),)
    yield (Slow(ranks=one, phase=phase, times=20),)
    yield (Slow(ranks=one, phase=phase, times=20, lives=True),)
    yield tuple(Slow(ranks=everybody, phase=name, times=20) for name in ("data", "forward", "backward"))
    yield (Slow(ranks=one, phase="forward", seconds=20, lives=True),)  # computes, though never for so long before


def _busy_machine(job: Job, watch: Watch) -> HangJudgement | None:
    """Everything takes three times as long, ranks are not let to a core for seconds, a machine stands still."""
    watch.late = 3.0
    slow = tuple(Slow(ranks=job.everybody(), phase=name, times=3) for name in ("data", "forward", "backward"))
    bad = None
    for _ in range(6):
        node = job.rng.choice(("n0", "n1"))
        there = [actor for actor in job.actors if actor.node == node]
        unlucky = Slow(ranks=frozenset({job.rng.choice(there).rank}), phase="forward", seconds=job.rng.uniform(2, 6))
        bad = bad or _play(job, watch, 5, *slow) or _play(job, watch, 1, *slow, unlucky)
        if bad is None:
            bad = _stands_still(job, watch, there, job.rng.uniform(5, 60))
    watch.late = 0.5
    return bad


def _stands_still(job: Job, watch: Watch, there: list[Actor], seconds: float) -> HangJudgement | None:
    begin = max(actor.free for actor in there)
    watch.pause(there[0].node, begin, begin + seconds)
    asleep = Slow(
        ranks=frozenset(actor.rank for actor in there), phase="data", seconds=seconds + job.rng.uniform(0, 0.9)
    )
    return _play(job, watch, 1, asleep)


def _play(job: Job, watch: Watch, steps: int, *slow: Slow) -> HangJudgement | None:
    for _ in range(steps):
        job.step(*slow)
        bad = watch.until(min(actor.free for actor in job.actors))
        if bad is not None:
            return bad
    return None


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A hang that was staged: what it is, whose, since when, and by when it has to be named."""

    kind: HangKind
    culprit: int | None
    began: float
    due: float


STAGED = ("stopped", "dead", "data", "save", "forward", "backward", "spinning", "lock", "desync", "network")


def stage(
    seed: int, what: str, *, records: bool = True, job: Job | None = None
) -> tuple[Incident, HangJudgement | None, float]:
    """A job that hangs after a while; what was found, and when."""
    job = job or Job(seed, sharded=records and seed % 3 == 1, ahead=seed % 3 == 2)
    watch = Watch(job, HangConfig(), records=records)
    job.begin(compiling=30)
    _play(job, watch, job.rng.randrange(20, 80))
    incident = _strike(job, watch, what)
    found = watch.until(incident.due + 600)
    return incident, found, watch.now


def _strike(job: Job, watch: Watch, what: str) -> Incident:
    culprit = job.rng.randrange(len(job.actors))
    if what in ("desync", "network"):
        return _strike_together(job, watch, what, culprit)
    phase = {"data": "data", "save": "checkpoint", "backward": "backward"}.get(what, "forward")
    if what in ("stopped", "dead"):
        phase = job.rng.choice(("data", "forward", "backward", "checkpoint", "eval"))
    # Meanwhile its writer writes an old save, which excuses neither a phase of a step nor a stopped process.
    helper = "" if what == "save" else "writer"
    slow = Slow(ranks=frozenset({culprit}), phase=phase, seconds=FOR_EVER, lives=what == "spinning", helper=helper)
    job.step(slow)
    began = job.stuck(culprit).at
    config = watch.config
    fast = max(config.least, config.factor * watch.p99().get(phase, 0.0) * 1.5)
    allowed = {"save": config.slow, "spinning": 4 * fast}.get(what, fast)
    if what in ("stopped", "dead"):
        after = job.rng.uniform(0, 0.2)
        job.halt(culprit, "T" if what == "stopped" else "Z", after)
        allowed = after + config.stopped
    if what == "lock":
        job.locked = frozenset({culprit})
    kinds = {
        "stopped": HangKind.STOPPED, "dead": HangKind.DEAD, "data": HangKind.STUCK_IN_DATA,
        "save": HangKind.STUCK_IN_SAVE,
        "lock": HangKind.LOCK_HELD,
    }  # fmt: skip
    return Incident(
        kind=kinds.get(what, HangKind.STUCK_IN_COMPUTE), culprit=culprit, began=began, due=began + allowed + LATE
    )


def _strike_together(job: Job, watch: Watch, what: str, culprit: int) -> Incident:
    """All ranks meet and none gets away."""
    job.step(cut=True)
    began = max(job.stuck(actor.rank).at for actor in job.actors)
    everybody = tuple(sorted(job.everybody()))
    if what == "desync":
        job.finding = Finding(kind="desync_shape", ranks=(culprit,), reason=f"rank {culprit} brought another shape")
    else:
        job.finding = Finding(kind="stuck_together", ranks=everybody, reason="all 8 ranks are inside collective #9")
    fast = max(watch.config.least, watch.config.factor * watch.p99().get("optimizer", 0.0) * 1.5)
    kind, who = (HangKind.DESYNC, culprit) if what == "desync" else (HangKind.NETWORK, None)
    return Incident(kind=kind, culprit=who, began=began, due=began + fast + LATE)
