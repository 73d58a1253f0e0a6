"""What a watched run costs: the product with all that is on by default and a bare loop of the same, turn by turn."""

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
from typing import Any

import psutil

from benchmarks.recovery.job import Job, free_port
from benchmarks.recovery.polling import lines, until
from trainer.contract.logs.line_file import read_new_lines

_PATIENCE = 300.0
_FROM = 20
"""Steps before the first that counts."""
_TURNS, _TURN_SECONDS = 15, 2.0
_RANKS = 4
# No save and no end fall into what is measured: what saves cost is measured by benchmarks.checkpoint.
_SETTINGS = ("train.steps=100000", "checkpoint.every=100000", "cluster.nodes=2", "cluster.ranks_per_node=2")
_BARE = {
    "OMP_NUM_THREADS": "1",
    "TORCH_FR_BUFFER_SIZE": "0",
    # What glibc comes to by itself in a process that has imported as much as ours: else the loop gives memory back in
    # every step, and has a thousand page faults for it that ours has not.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
"""The loop's environment: one thread as ours has, no flight recorder."""


class _Side:
    """Processes that train beside others and stand still while those have their turn."""

    def __init__(self, log: Path, watching: Collection[int], watched: Collection[int]) -> None:
        """`log` has every step of rank 0; `watching` sleep longer, so that they see nobody stand still."""
        self._log, self._watching, self._watched = log, sorted(watching), sorted(watched)
        self._seconds: list[float] = []
        self._cpu, self._steps = 0.0, 0

    def pause(self) -> None:
        """At the end of a step of rank 0, so that turns are made of whole steps."""
        offset, ended = self._log.stat().st_size, False
        while not ended:
            time.sleep(0.001)
            new, offset = read_new_lines(self._log, offset)
            ended = any(_is_of_rank_zero(json.loads(line)) for line in new)
        for pid in (*self._watching, *self._watched):
            os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        for pid in (*self._watched, *self._watching):
            os.kill(pid, signal.SIGCONT)

    def turn(self) -> None:
        """Train for a while, alone, and count."""
        first, before = len(lines(self._log)), self._spent()
        self.go_on()
        time.sleep(_TURN_SECONDS)
        self.pause()
        told = [float(line["time"]) for line in lines(self._log)[first:] if _is_of_rank_zero(line)]
        self._cpu += self._spent() - before
        self._steps += len(told)
        self._seconds += [after - before for before, after in zip(told, told[1:], strict=False)]

    def _spent(self) -> float:
        return sum(map(cpu_seconds, (*self._watching, *self._watched)))

    def figures(self) -> tuple[float, float]:
        """Median seconds of a step, CPU seconds of a step and rank."""
        return statistics.median(self._seconds), self._cpu / self._steps / _RANKS


def _is_of_rank_zero(line: dict[str, Any]) -> bool:
    """The bare loop has a file for each rank."""
    return bool(line.get("rank", 0) == 0)


def cost(folder: Path, kind: str) -> dict[str, float]:
    """`ratio` of the median step times, and `cpu`: seconds per step and rank that the product takes more.

    The product's side is all of it but saves: ranks, agents, and whatever agents start on their nodes; the controller,
    of which there is one for all runs, is left out. Both sides train on the same machine, in turns of two seconds.
    What is compared is the whole product, not its watching alone: metrics, work logs and agreement are in it as well.
    The ranks of both are bound to cores alike: where four ranks on two cores are put makes a tenth of a step's time.
    """
    with Job(folder, kind, "tiny-gpt", *_SETTINGS) as job:
        job.reached(_FROM, _PATIENCE)
        agents = {agent.pid for agent in job.processes("orch-agent")}
        with _bare(folder / "bare", job.path("")) as bare:
            _bind([job.pid(rank) for rank in range(_RANKS)])
            ours = _Side(job.work_log(0), agents, job.on_nodes() - agents)
            sides = [ours, bare]
            try:
                for side in sides:
                    side.pause()
                for number in range(_TURNS):
                    for side in sides if number % 2 else reversed(sides):
                        side.turn()
            finally:
                ours.go_on()
            (seconds, cpu), (bare_seconds, bare_cpu) = ours.figures(), bare.figures()
    return {"ratio": seconds / bare_seconds, "cpu": cpu - bare_cpu, "bare": bare_seconds, "bare_cpu": bare_cpu}


@contextlib.contextmanager
def _bare(logs: Path, run: Path) -> Iterator[_Side]:
    """The loop in processes that nothing watches, once it has warmed up."""
    logs.mkdir(parents=True)
    shared = {
        **os.environ, **_BARE, "WORLD_SIZE": str(_RANKS), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    words = [sys.executable, "-m", "benchmarks.recovery.bare_loop", str(run), str(logs), "100000"]
    ranks = [
        subprocess.Popen(words, env={**shared, "RANK": str(rank)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for rank in range(_RANKS)
    ]
    try:
        log = logs / "rank-0.jsonl"
        until(lambda: _has_warmed_up(log, ranks), _PATIENCE, f"step {_FROM} of the bare loop")
        _bind([rank.pid for rank in ranks])
        yield _Side(log, (), [rank.pid for rank in ranks])
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _has_warmed_up(log: Path, ranks: Sequence[subprocess.Popen[bytes]]) -> bool | None:
    """Raises RuntimeError as soon as a rank of the bare loop has ended."""
    ended = [f"rank {number} with code {rank.poll()}" for number, rank in enumerate(ranks) if rank.poll() is not None]
    if ended:
        raise RuntimeError(f"the bare loop ended: {', '.join(ended)}")
    return len(lines(log)) >= _FROM or None


def _bind(ranks: Sequence[int]) -> None:
    """Each rank with all its threads to one core."""
    cores = sorted(os.sched_getaffinity(0))
    for place, pid in enumerate(ranks):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), {cores[place * len(cores) // len(ranks)]})


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, those that have ended too; /proc tells it in hundredths of a second only.

    The number is what clock_getcpuclockid(3) makes of a pid.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error
