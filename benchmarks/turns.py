"""Turn-by-turn training of two sides on one machine; confidence interval of a median."""

import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.recovery.job import BenchmarkRun, free_port
from benchmarks.recovery.polling import lines, until
from trainer.protocol.logs.line_file import read_new_lines

PATIENCE = 300.0
_FROM = 20
"""Warm-up steps before the first measured one."""
_TURN_SECONDS = 2.0
_BARE = {
    "OMP_NUM_THREADS": "1",
    "TORCH_FR_BUFFER_SIZE": "0",
    # The values that glibc reaches in a process with as many imports as ours: otherwise the loop returns memory in
    # every step, and has a thousand page faults that ours does not have.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
"""Environment of a bare loop: one thread like ours, no flight recorder."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Result of one turn of a side: the median of its steps, their number, and CPU seconds of all processes."""

    seconds: float
    steps: int
    cpu: float


class Side:
    """Processes that train in turn with others and are stopped meanwhile."""

    def __init__(self, log: Path, watching: Collection[int], watched: Collection[int]) -> None:
        """`log` has every step of rank 0; `watching` are stopped longest, so that they never see a stopped rank."""
        self._log, self._watching, self._watched = log, sorted(watching), sorted(watched)
        self.turns: list[Turn] = []
        self._steps: list[float] = []

    def pause(self) -> None:
        """Stop at the end of a step of rank 0, so that turns consist of whole steps."""
        # A line may be incomplete.
        offset, ended = self._log.read_bytes().rfind(b"\n") + 1, False
        while not ended:
            time.sleep(0.001)
            new, offset = read_new_lines(self._log, offset)
            ended = any(_is_of_rank_zero(json.loads(line)) for line in new if line)
        for pid in (*self._watching, *self._watched):
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in (*self._watched, *self._watching):
            os.kill(pid, signal.SIGCONT)

    def turn(self) -> None:
        """Train alone for a while, and record the turn."""
        first, before = len(lines(self._log)), self._spent()
        self.resume()
        time.sleep(_TURN_SECONDS)
        self.pause()
        told = [float(line["time"]) for line in lines(self._log)[first:] if _is_of_rank_zero(line)]
        seconds = [after - before for before, after in zip(told, told[1:], strict=False)]
        self._steps += seconds
        self.turns.append(Turn(seconds=statistics.median(seconds), steps=len(told), cpu=self._spent() - before))

    def _spent(self) -> float:
        return sum(map(cpu_seconds, (*self._watching, *self._watched)))

    @property
    def step_seconds(self) -> float:
        """Median of all steps of all turns."""
        return statistics.median(self._steps)

    def cpu_seconds(self, ranks: int) -> float:
        """Return the CPU seconds per step and rank."""
        return sum(turn.cpu for turn in self.turns) / sum(turn.steps for turn in self.turns) / ranks


def job_side(job: BenchmarkRun, ranks: int) -> Side:
    """Return the side of a run on its nodes, with ranks bound to cores, once it has warmed up.

    The controller, shared by all runs, is left out.
    """
    job.wait_for_step(_FROM, PATIENCE)
    agents = {agent.pid for agent in job.processes("orch-agent")}
    _bind([job.pid(rank) for rank in range(ranks)])
    return Side(job.work_log(0), agents, job.on_nodes() - agents)


@contextlib.contextmanager
def bare_side(logs: Path, words: Sequence[str], ranks: int) -> Iterator[Side]:
    """Start `python WORDS` as unmonitored ranks; yield their side once warm. Each rank writes `logs`/rank-N.jsonl."""
    logs.mkdir(parents=True)
    shared = {
        **os.environ, **_BARE, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        said = stack.enter_context((logs / "said.log").open("wb"))
        begun = [
            subprocess.Popen(
                [sys.executable, *words], env={**shared, "RANK": str(rank)}, stdout=said, stderr=subprocess.STDOUT
            )
            for rank in range(ranks)
        ]
        try:
            log = logs / "rank-0.jsonl"
            until(lambda: _has_warmed_up(log, begun), PATIENCE, f"step {_FROM} of the bare loop")
            _bind([rank.pid for rank in begun])
            yield Side(log, (), [rank.pid for rank in begun])
        finally:
            for rank in begun:
                rank.kill()
                rank.wait()


def take_turns(ours: Side, bare: Side, turns: int) -> None:
    """Run each side alone, in changing order; afterwards resume ours, so that its run can be ended."""
    sides = [ours, bare]
    try:
        for side in sides:
            side.pause()
        for number in range(turns):
            for side in sides if number % 2 else reversed(sides):
                side.turn()
    finally:
        ours.resume()


def _is_of_rank_zero(line: dict[str, Any]) -> bool:
    """Return whether the line is of rank 0; the bare loop has a file for each rank."""
    return bool(line.get("rank", 0) == 0)


def _has_warmed_up(log: Path, ranks: Sequence[subprocess.Popen[bytes]]) -> bool | None:
    """Return True once warm, else None; raises RuntimeError as soon as a rank of the bare loop has ended."""
    ended = [f"rank {number} with code {rank.poll()}" for number, rank in enumerate(ranks) if rank.poll() is not None]
    if ended:
        said = (log.parent / "said.log").read_text(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"the bare loop ended: {', '.join([*ended, *said])}")
    return len(lines(log)) >= _FROM or None


def _bind(ranks: Sequence[int]) -> None:
    """Bind each rank with all its threads to one core."""
    cores = sorted(os.sched_getaffinity(0))
    for place, pid in enumerate(ranks):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), {cores[place * len(cores) // len(ranks)]})


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, ended ones included; /proc has a resolution of only 10 ms.

    The number is the clock that clock_getcpuclockid(3) derives from a pid.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error


def interval(ordered: list[float]) -> tuple[float, float]:
    """Return the narrowest symmetric pair of order statistics that contains the median in 95 of 100 cases."""
    count, outside, place = len(ordered), 0.0, 0
    while place < count // 2:
        outside += 2 * math.comb(count, place) / 2**count
        if outside > 0.05:
            break
        place += 1
    first = max(0, place - 1)
    return ordered[first], ordered[count - 1 - first]
