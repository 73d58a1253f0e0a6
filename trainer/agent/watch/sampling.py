"""An agent's samples of its ranks, and the coordinator's snapshot of all ranks."""

import heapq
import os
import time
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from trainer.agent.processes.proc import (
    ProcessActivity,
    descendants,
    group_members,
    read_activity,
    threads_cpu_seconds,
    threads_named,
)
from trainer.agent.rank_processes.local_ranks import LocalRank, LocalRanks
from trainer.agent.watch.hang_limits import FAST, HALTED, RankSample
from trainer.agent.watch.program_sample import ProgramSample
from trainer.agent.watch.program_watch import ProgramWatch
from trainer.agent.watch.stragglers import should_report_work
from trainer.protocol.messages.agents import ProgressReport
from trainer.protocol.rank_progress.progress import quantile, sum_counts


class JobSnapshot:
    """The newest sample of every rank in one generation, with its age."""

    def __init__(self, started: float, world: int) -> None:
        self._world = world
        self._seen: dict[int, tuple[float, RankSample]] = {}
        self._order: list[int] = []  # sorted ranks with a sample
        self.moved = started
        """Time of the last movement of any rank, on the coordinator's clock."""
        self.halted: set[int] = set()
        """Ranks whose newest samples show a halted process."""
        self._p99: dict[str, dict[str, float]] = {}  # phase -> node -> seconds

    def add_report(self, report: ProgressReport, node: str, now: float) -> None:
        """Add one agent's report. Raises ValueError for impossible values."""
        stages = {row[0]: row for row in report.stages if row}
        programs = {row[0]: ProgramSample.from_row(row) for row in report.programs}
        for row in report.samples:
            sample = RankSample.from_row(row, node, stages.get(row[0], ()), programs.get(row[0]))
            if not 0 <= sample.rank < self._world:
                raise ValueError(f"no such rank: {sample.rank}")
            if sample.rank not in self._seen:
                insort(self._order, sample.rank)
            self._seen[sample.rank] = (now, sample)
            if not sample.ended:
                self.moved = max(self.moved, now - sample.age)
            if sample.state in HALTED and not sample.ended:
                self.halted.add(sample.rank)
            else:
                self.halted.discard(sample.rank)
        for phase, seconds in report.p99.items():
            self._p99.setdefault(phase, {})[node] = seconds

    def is_suspended(self) -> bool:
        """Return whether signals have stopped all of several ranks, so that none waits for another."""
        if not self.halted or len(self._seen) < self._world:
            return False
        states = [sample.state for _, sample in self._seen.values() if not sample.ended]
        return len(states) > 1 and set(states) == {"T"}

    def at(self, now: float) -> list[RankSample]:
        """Return the sample of every rank seen, by rank."""
        return self._age_samples(self._order, now)

    def worst(self, now: float, most: int, ratios: Mapping[int, float]) -> list[RankSample]:
        """Return at most `most` ranks: those with the largest `ratios`, then those that have not moved for longest."""
        if len(self._seen) <= most:
            return self.at(now)

        def still(rank: int) -> tuple[float, float]:
            received, sample = self._seen[rank]
            return ratios.get(rank, 0.0), sample.age - received

        return self._age_samples(heapq.nlargest(most, self._order, key=still), now)

    def _age_samples(self, ranks: Iterable[int], now: float) -> list[RankSample]:
        seen = map(self._seen.__getitem__, ranks)
        return [_age_sample(sample, max(0.0, now - received)) for received, sample in seen]

    def p99(self) -> dict[str, float]:
        return {phase: max(by_node.values()) for phase, by_node in self._p99.items()}

    def __len__(self) -> int:
        return len(self._seen)


def _age_sample(sample: RankSample, seconds: float) -> RankSample:
    lock = sample.lock + seconds if sample.lock else 0.0
    return replace(sample, age=sample.age + seconds, alive=sample.alive + seconds, lock=lock)


STILL = 1.0
"""Seconds without a write to its cell after which a rank is examined more closely."""
_LOOK_EVERY = 0.5
_BUSY = 0.05
"""Share of a core above which CPU time counts as activity, since waiting processes also wake up now and then."""
_BYTES = 4096
"""Minimum I/O in bytes between samples that counts as activity; larger than one log line."""
_STARVED = 0.5
"""Minimum share of time waiting for a core that counts as activity, since a busy machine delays the process."""
_ANSWERS = "pt_workerserver"
"""Name of the threads in which torch answers a rank's flight record queries."""
_NOTHING = ProcessActivity("", 0.0, 0)


def active_processes(phase: str, state: str, pid: int, children: Collection[int], writer: int | None) -> set[int]:
    """Return the processes whose work counts as a rank's activity."""
    # A halted rank cannot use the results of other processes. Within a step, no rank waits for its writer.
    others = set() if state in HALTED else {*children, *((writer,) if phase not in FAST else ())}
    return {pid, *(one for one in others if one is not None)}


class AnswerTimes:
    """CPU time that ranks spend answering the agent's own queries, which does not count as activity."""

    def __init__(self) -> None:
        self._threads: dict[int, tuple[int, ...]] = {}

    def __call__(self, pid: int) -> float:
        """Return the CPU seconds that the rank has spent on answers since it started."""
        if not self._threads.get(pid):
            self._threads[pid] = threads_named(pid, _ANSWERS)
        return threads_cpu_seconds(pid, self._threads[pid])


def no_writer(rank: int) -> int | None:
    """Return None: these ranks have no checkpoint writer."""
    return None


@dataclass(kw_only=True)
class _RankHistory:
    """Facts kept about one rank between two checks."""

    started: float
    reported: tuple[int, str, bool, bool] = (
        -1,
        "",
        False,
        False,
    )  # newest write, state, exit, whether it reports steps
    looked: float | None = None  # set while it does not move
    lived: float = 0.0
    state: str | None = None
    signs: dict[int, ProcessActivity] = field(default_factory=dict)  # of all its processes, by PID
    stacks_at: int = 0  # time of its last stack dump
    stack_bytes: int = 0  # in total

    def moves(self) -> None:
        self.looked, self.state, self.signs = None, None, {}


class Sampler:
    """Samples of one generation's ranks on one node; `name` is the node's. `programs` observes a user's program.
    `writer` returns the process that writes a rank's checkpoints; `signs`, `answers` and `groups` read /proc.
    """

    def __init__(
        self, ranks: LocalRanks, name: str, writer: Callable[[int], int | None] = no_writer, *,
        programs: ProgramWatch | None = None,
        clock: Callable[[], float] = time.monotonic, signs: Callable[[int], ProcessActivity | None] = read_activity,
        groups: Callable[[Collection[int]], Mapping[int, list[int]]] | None = None,
        answers: Callable[[int], float] | None = None,
    ) -> None:  # fmt: skip
        self._ranks, self._name, self._clock, self._signs = ranks, name, clock, signs
        self._programs = programs
        self._answers = answers or AnswerTimes()
        # Launchers may start all ranks in one process group.
        self._writer, self._groups = writer, groups or (descendants if ranks.per_node else group_members)
        self._watched = {rank: _RankHistory(started=clock()) for rank in ranks.by_rank}
        self._looked = float("-inf")
        self._p99: dict[str, float] = {}
        self._worked: dict[int, int] = {}

    def samples(self) -> list[RankSample]:
        everybody = self._ranks.by_rank.values()
        for local in everybody:
            local.read_progress()
        now = self._clock()
        self._look_closer([local for local in everybody if self._is_still(local, now)], now)
        return [self._sample(local, now) for local in everybody]

    def training_pid(self, local: LocalRank) -> int | None:
        """Return the process that trains, which a user's program may have started from a script."""
        return local.pid if self._programs is None else self._programs.pid(local)

    def sees_halted(self) -> bool:
        """Return whether the kernel shows a rank as halted, in which case no limit has to expire first."""
        return any(sample.state in HALTED and not sample.ended for sample in self.samples())

    def report(self, summary: ProgressReport) -> ProgressReport:
        """Return the summary with the changes since the last report."""
        seen = [(sample, self._watched[sample.rank]) for sample in self.samples()]
        changed = [sample for sample, watched in seen if self._has_changed(sample, watched)]
        return replace(
            summary,
            samples=tuple(sample.to_row() for sample in changed),
            p99=self._changed_p99(),
            work=self._work(),
            stages=tuple(_stage_row(sample) for sample in changed if sample.moment or sample.sent),
            programs=tuple(one.program.to_row(one.rank) for one in changed if one.program is not None),
        )

    def _has_changed(self, sample: RankSample, watched: _RankHistory) -> bool:
        local = self._ranks.by_rank[sample.rank]
        now = (local.last.moved_at, sample.state, sample.ended, sample.reports_steps)
        # For a rank that does not move, every check counts as news, since its activity may explain the delay.
        news = now != watched.reported or (sample.age > STILL and not sample.ended)
        watched.reported = now
        return news

    def _age(self, local: LocalRank, now: float) -> float:
        moved = local.last.moved_at * 1e-9 or self._watched[local.rank].started
        return max(0.0, now - moved)

    def _is_still(self, local: LocalRank, now: float) -> bool:
        if self._age(local, now) > STILL:
            return not local.ended and local.pid is not None
        self._watched[local.rank].moves()
        return False

    def _sample(self, local: LocalRank, now: float) -> RankSample:
        watched, reading, age = self._watched[local.rank], local.last, self._age(local, now)
        ticked = local.cell.last_tick_ns() * 1e-9
        return RankSample(
            rank=local.rank,
            node=self._name,
            step=reading.step,
            phase=reading.phase.name.lower(),
            first=not local.has_stepped(),
            collective=reading.collective,
            age=age,
            alive=min(age, now - watched.lived),
            state=watched.state or ("X" if local.ended else "R"),
            lock=max(0.0, now - ticked) if ticked else 0.0,
            ended=local.ended,
            moment=reading.moment,
            sent=local.cell.sent(),
            program=self._programs.sample(local, now) if self._programs is not None else None,
        )

    def _look_closer(self, still: list[LocalRank], now: float) -> None:
        """Examine motionless ranks together, since finding their children takes a pass over the node's processes."""
        if not still or now - self._looked < _LOOK_EVERY:
            return
        self._looked = now
        training = {local.rank: self.training_pid(local) for local in still}
        leading = training if self._ranks.per_node else {local.rank: local.pid for local in still}
        groups = self._groups({pid for pid in leading.values() if pid is not None})
        for local in still:
            pid, leader = training[local.rank], leading[local.rank]
            if leader is not None and pid is not None:
                self._examine_rank(local, pid, groups.get(leader, []), now)
                if self._programs is not None:
                    self._programs.compare_stacks(local, self._watched[local.rank].state or "")

    def _examine_rank(self, local: LocalRank, pid: int, group: list[int], now: float) -> None:
        watched, writer = self._watched[local.rank], self._writer(local.rank)
        before, since = watched.signs, watched.looked
        # Processes that do not count now are read too, so that they are not new if they count later.
        asked = {one: self._signs(one) for one in {pid, writer, *group} if one is not None}
        watched.signs = {one: signs for one, signs in asked.items() if signs is not None}
        if pid in watched.signs:
            watched.signs[pid] = self._without_answers(local, pid, watched.signs[pid])
        watched.state = watched.signs[pid].state if pid in watched.signs else None
        watched.looked = now
        counted = active_processes(local.last.phase.name.lower(), watched.state or "", pid, group, writer)
        counting = {one: signs for one, signs in watched.signs.items() if one in counted}
        if since is not None and _have_worked(before, counting, now - since):
            watched.lived = now

    def _without_answers(self, local: LocalRank, pid: int, signs: ProcessActivity) -> ProcessActivity:
        """Return the rank's activity, excluding the agent's own queries for flight records and stacks."""
        watched, stacks = self._watched[local.rank], os.fstat(local.stacks)
        if stacks.st_mtime_ns != watched.stacks_at:
            watched.stacks_at, watched.stack_bytes = stacks.st_mtime_ns, watched.stack_bytes + stacks.st_size
        cpu, moved = signs.cpu_seconds - self._answers(pid), signs.io_bytes - watched.stack_bytes
        return replace(signs, cpu_seconds=cpu, io_bytes=moved)

    def _changed_p99(self) -> dict[str, float]:
        """Return the 99th percentile of every phase over this node's ranks, if it has changed."""
        rows: dict[str, list[tuple[int, ...]]] = {}
        for local in self._ranks.by_rank.values():
            for phase, counts in local.cell.times().items():
                rows.setdefault(phase.name.lower(), []).append(counts)
        found = {phase: quantile(sum_counts(counts), 0.99) for phase, counts in rows.items()}
        changed = {phase: seconds for phase, seconds in found.items() if self._p99.get(phase) != seconds}
        self._p99.update(changed)
        return changed

    def _work(self) -> tuple[tuple[int, ...], ...]:
        """Return the work done by each rank that has completed a window of steps since its last report."""
        rows = []
        for rank, local in self._ranks.by_rank.items():
            work = local.cell.work()
            if should_report_work(self._worked.get(rank, 0), work.steps):
                self._worked[rank] = work.steps
                rows.append((rank, work.steps, *work.sections))
        return tuple(rows)


def _stage_row(sample: RankSample) -> tuple[int, ...]:
    moment, sent = sample.moment, sample.sent
    place = (0, 0, 0) if moment is None else (moment.code, moment.stage, moment.micro_batch)
    return (sample.rank, *place, *(() if sent is None else sent.to_row()))


def _have_worked(before: Mapping[int, ProcessActivity], signs: Mapping[int, ProcessActivity], seconds: float) -> bool:
    """Return whether the processes did any work. One that has exited subtracts nothing; a new one starts at zero."""
    grown = [(before.get(pid, _NOTHING), one) for pid, one in signs.items()]
    cpu = sum(max(0.0, one.cpu_seconds - was.cpu_seconds) for was, one in grown)
    moved = sum(max(0, one.io_bytes - was.io_bytes) for was, one in grown)
    starved = max((one.starved_seconds - was.starved_seconds for was, one in grown), default=0.0)
    seconds = max(1e-3, seconds)
    return cpu / seconds > _BUSY or moved > _BYTES or starved / seconds > _STARVED
