"""An agent's observations of a user's programs, between two samples."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from trainer.agent.processes.log_pipes import LogPipes
from trainer.agent.processes.proc import catches_signal, is_descendant
from trainer.agent.rank_processes.local_ranks import LocalRank, LocalRanks
from trainer.agent.watch.program_sample import LoopSearch, ProgramSample
from trainer.protocol.config import JobConfig
from trainer.protocol.messages.ranks import STACKS
from trainer.protocol.run_dir import AttemptDir

_AFTER, _EVERY = 0.25, 0.04
"""Seconds without a step after which a rank's stacks are compared, and between two dumps, as shares of
`detection.hang.slow`: 30 s and 5 s by default.
"""
_BEFORE_FIRST = 0.5
"""Share of a pause before the first step that counts: RL programs repeat it, others only prepare their data once."""
_MOST_STACKS = 1 << 20

Rhythm = Callable[[int], tuple[float, float]]
"""Returns, for a rank, the time of its newest print (0: never) and the usual longest pause between two prints."""


def no_rhythm(rank: int) -> tuple[float, float]:
    """Return an unknown rhythm."""
    return 0.0, 0.0


@dataclass(kw_only=True)
class _Observed:
    """Observations of one rank."""

    moved_at: int = 0
    stepped: bool = False
    longest: float = 0.0
    asked: float = 0.0  # time of the newest request for stacks
    search: LoopSearch = field(default_factory=LoopSearch)


class ProgramWatch:
    """Observes the programs of one generation on one node."""

    def __init__(
        self, rhythm: Rhythm = no_rhythm, slow: float = 120.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`slow` is `detection.hang.slow`."""
        self._rhythm, self._clock = rhythm, clock
        self._after, self._every = _AFTER * slow, _EVERY * slow
        self._observed: dict[int, _Observed] = {}

    def pid(self, local: LocalRank) -> int | None:
        """Return the process that trains: the one that reports, if the rank's own process has started it."""
        reporter = local.find_reporter()
        if reporter is None or local.pid is None:
            return local.pid
        return reporter if is_descendant(reporter, local.pid) else local.pid

    def sample(self, local: LocalRank, now: float) -> ProgramSample:
        """Return what is known about the rank's program now."""
        record, observed = local.cell.program(), self._observed.setdefault(local.rank, _Observed())
        moved_at = local.last.moved_at
        if moved_at != observed.moved_at:
            share = 1.0 if observed.stepped else _BEFORE_FIRST
            if observed.moved_at:
                observed.longest = max(observed.longest, share * (moved_at - observed.moved_at) * 1e-9)
            observed.moved_at, observed.stepped = moved_at, local.has_stepped()
        printed, gap = self._rhythm(local.rank)
        return ProgramSample(
            flags=0 if record is None else int(record.flags),
            longest=observed.longest,
            log_age=max(0.0, now - printed) if printed else 0.0,
            log_gap=gap,
            loop=observed.search.place(moved_at),
            own_rank=-1 if record is None or record.rank is None else record.rank,
        )

    def compare_stacks(self, local: LocalRank, state: str) -> None:
        """Take the dump that was requested last time, and request another one. A halted rank answers no signal."""
        observed, now, pid = self._observed.setdefault(local.rank, _Observed()), self._clock(), self.pid(local)
        moved_at = local.last.moved_at
        is_still = now - moved_at * 1e-9 >= self._after
        if pid is None or state in "TtZX" or not is_still or now - observed.asked < self._every:
            return
        if observed.asked > moved_at * 1e-9 and os.fstat(local.stacks).st_size:
            dump = os.pread(local.stacks, _MOST_STACKS, 0).decode(errors="replace")
            observed.search.add(dump, moved_at)
        observed.asked = now
        if catches_signal(pid, STACKS):  # a signal without a handler would kill it
            os.ftruncate(local.stacks, 0)
            os.lseek(local.stacks, 0, os.SEEK_SET)
            with suppress(ProcessLookupError):
                os.kill(pid, STACKS)


def watch_programs(attempt: AttemptDir, config: JobConfig, ranks: LocalRanks, logs: LogPipes) -> ProgramWatch:
    """Return the watch of a command's ranks on this node."""
    if ranks.per_node and len(ranks.by_rank) > 1:  # it is unknown which of the ranks has printed a line
        return ProgramWatch(slow=config.detection.hang.slow)
    return ProgramWatch(lambda rank: logs.rhythm(attempt.rank_log(rank)), config.detection.hang.slow)
