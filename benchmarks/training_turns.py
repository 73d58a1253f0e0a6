"""One of our runs and a bare loop, training in turns on one machine."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.runner import until
from benchmarks.submitted_run import BenchmarkRun, free_port, read_lines
from trainer.protocol.logs.line_file import read_new_lines

_WARM_STEPS, _PATIENCE, _TURN_SECONDS = 20, 300.0, 2.0
_BARE_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_FR_BUFFER_SIZE": "0",
    # The values that glibc reaches in a process with as many imports as ours. Otherwise, the loop returns memory in
    # every step, and has a thousand page faults that ours does not.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Environment of a bare loop: one thread like ours, no flight recorder."""


class Turn(NamedTuple):
    """One side's turn: its median step time, its number of steps, and the CPU seconds of all its processes."""

    seconds: float
    steps: int
    cpu: float


class TrainingSide:
    """Processes that train in turn with others and are stopped during the others' turns."""

    def __init__(self, log: Path, watching: Collection[int], watched: Collection[int]) -> None:
        """`log` has every step of rank 0; `watching` stay stopped longest, so that they never see a stopped rank."""
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
        first, before = len(read_lines(self._log)), self._spent_cpu()
        self.resume()
        time.sleep(_TURN_SECONDS)
        self.pause()
        times = [float(line["time"]) for line in read_lines(self._log)[first:] if _is_of_rank_zero(line)]
        seconds = [after - before for before, after in zip(times, times[1:], strict=False)]
        self._steps += seconds
        self.turns.append(Turn(statistics.median(seconds), len(times), self._spent_cpu() - before))

    def _spent_cpu(self) -> float:
        return sum(map(cpu_seconds, (*self._watching, *self._watched)))

    @property
    def step_seconds(self) -> float:
        """Median of the step times in all turns."""
        return statistics.median(self._steps)

    def cpu_seconds(self, ranks: int) -> float:
        """Return the CPU seconds per step and rank."""
        return sum(turn.cpu for turn in self.turns) / sum(turn.steps for turn in self.turns) / ranks


def train_in_turns(
    job: BenchmarkRun, ranks: int, words: Sequence[str], logs: Path, turns: int
) -> tuple[TrainingSide, TrainingSide]:
    """Train `job` and the bare ranks `python WORDS` in turns, in varying order; return both sides.

    Our side excludes the controller, which all runs share. The run is resumed at the end, so that it can be stopped.
    """
    job.wait_for_step(_WARM_STEPS, _PATIENCE)
    agents = job.processes("orch-agent")
    watching = {agent.pid for agent in agents}
    _bind_to_cores([job.pid(rank) for rank in range(ranks)])
    on_nodes = {process.pid for agent in agents for process in agent.children(recursive=True)}
    ours = TrainingSide(job.work_log(0), watching, on_nodes - watching)
    with _bare_side(logs, words, ranks) as bare:
        try:
            for side in (ours, bare):
                side.pause()
            for number in range(turns):
                for side in (ours, bare) if number % 2 else (bare, ours):
                    side.turn()
        finally:
            ours.resume()
    return ours, bare


@contextlib.contextmanager
def _bare_side(logs: Path, words: Sequence[str], ranks: int) -> Iterator[TrainingSide]:
    """Start unmonitored ranks, and yield their side once warm. Each rank writes `logs`/rank-N.jsonl."""
    logs.mkdir(parents=True)
    shared = {**os.environ, **_BARE_ENVIRONMENT, "WORLD_SIZE": str(ranks), "MASTER_PORT": str(free_port())}
    with (logs / "output.log").open("wb") as output:
        started = [
            subprocess.Popen(
                [sys.executable, *words], env={**shared, "RANK": str(rank)}, stdout=output, stderr=subprocess.STDOUT
            )
            for rank in range(ranks)
        ]
        try:
            log = logs / "rank-0.jsonl"
            until(lambda: _has_warmed_up(log, started), _PATIENCE, f"step {_WARM_STEPS} of the bare loop")
            _bind_to_cores([rank.pid for rank in started])
            yield TrainingSide(log, (), [rank.pid for rank in started])
        finally:
            for rank in started:
                rank.kill()
                rank.wait()


def _is_of_rank_zero(line: dict[str, Any]) -> bool:
    """Return whether the line is from rank 0; the bare loop has a file for each rank."""
    return bool(line.get("rank", 0) == 0)


def _has_warmed_up(log: Path, ranks: Sequence[subprocess.Popen[bytes]]) -> bool | None:
    """Return True once warm, else None. Raises RuntimeError as soon as a rank of the bare loop has exited."""
    ended = [f"rank {number} with code {rank.poll()}" for number, rank in enumerate(ranks) if rank.poll() is not None]
    if ended:
        last = (log.parent / "output.log").read_text(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"the bare loop ended: {', '.join([*ended, *last])}")
    return len(read_lines(log)) >= _WARM_STEPS or None


def _bind_to_cores(ranks: Sequence[int]) -> None:
    """Bind each rank with all its threads to one core."""
    cores = sorted(os.sched_getaffinity(0))
    for place, pid in enumerate(ranks):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), {cores[place * len(cores) // len(ranks)]})


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, including exited threads; /proc has a resolution of only 10 ms.

    The argument is the clock ID that clock_getcpuclockid(3) derives from a pid.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error
