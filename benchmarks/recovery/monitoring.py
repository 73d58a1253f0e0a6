"""What a watched run costs: the product with all that is on by default, and a bare loop of the same, one by one."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from benchmarks.recovery.job import Job, free_port
from benchmarks.recovery.watching import NotInTimeError, lines, until

_PATIENCE = 300.0
_FROM, _STEPS = 20, 150
"""Steps before the first that counts, and how many count."""
_RANKS = 4
# No save and no end fall into what is measured: what saves cost is measured by benchmarks.checkpoint.
_SETTINGS = ("train.steps=100000", "checkpoint.every=100000", "cluster.nodes=2", "cluster.ranks_per_node=2")


def cost(folder: Path, kind: str) -> dict[str, float]:
    """`ratio` of the median step times, and `cpu`: seconds per step and rank that the product takes more.

    The product's side is all of it but saves: ranks, agents, and whatever agents start on their nodes; the controller,
    of which there is one for all runs, is left out. Both sides train on the same machine, one after the other.
    What is compared is the whole product, not its watching alone: metrics, work logs and agreement are in it as well.
    A step takes some hundred times the CPU that is looked for, so that one round alone says little.
    """
    with Job(folder, kind, "tiny-gpt", *_SETTINGS) as job:
        job.reached(_FROM, _PATIENCE)
        seconds, cpu = _stretch(job.work_log(0), job.on_nodes)
    bare_seconds, bare_cpu = _bare(folder / "bare", job.path("config.json"))
    return {"ratio": seconds / bare_seconds, "cpu": cpu - bare_cpu, "bare": bare_seconds, "bare_cpu": bare_cpu}


def _bare(logs: Path, config: Path) -> tuple[float, float]:
    """Median seconds of a step, and CPU seconds of a step and rank, in processes that nothing watches."""
    logs.mkdir(parents=True)
    shared = {
        **os.environ, "WORLD_SIZE": str(_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    words = [sys.executable, "-m", "benchmarks.recovery.bare", str(config), str(logs), "100000"]
    ranks = [
        subprocess.Popen(words, env={**shared, "RANK": str(rank)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for rank in range(_RANKS)
    ]
    try:
        _wait(logs / "rank-0.jsonl", _FROM)
        return _stretch(logs / "rank-0.jsonl", lambda: [rank.pid for rank in ranks])
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _stretch(log: Path, pids: Callable[[], Iterable[int]]) -> tuple[float, float]:
    """Median seconds of a step, and CPU seconds of a step and rank, from now on."""
    counted = sorted(pids())
    began, before = time.time(), sum(map(cpu_seconds, counted))
    _wait(log, int(lines(log)[-1]["step"]) + _STEPS)
    ended, after = time.time(), sum(map(cpu_seconds, counted))
    if sorted(pids()) != counted:
        raise NotInTimeError("a stretch in which no process comes or goes")
    _wait(log, int(lines(log)[-1]["step"]) + 1)  # so that the end lies between two lines
    told = [float(line["time"]) for line in lines(log)]
    within = [after - before for before, after in zip(told, told[1:], strict=False) if began <= before < ended]
    steps = _steps(told, ended) - _steps(told, began)
    return statistics.median(within), (after - before) / steps / _RANKS


def _steps(told: list[float], at: float) -> float:
    """Steps that were done at a time, with the share of the one that was going on."""
    done = sum(one <= at for one in told)
    return done + (at - told[done - 1]) / (told[done] - told[done - 1])


def _wait(log: Path, step: int) -> None:
    def look() -> bool | None:
        told = lines(log)
        return True if told and told[-1]["step"] >= step else None

    until(look, _PATIENCE, f"step {step} in {log.name}")


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, those that have ended too; /proc tells it in hundredths of a second only.

    The number is what clock_getcpuclockid(3) makes of a pid.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error
