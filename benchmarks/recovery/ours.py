"""Faults injected into real runs of the product; all times are recorded by agents, ranks and the coordinator."""

import contextlib
import json
import math
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.recovery.job import BenchmarkRun, hit
from benchmarks.recovery.polling import NotInTimeError, lines, until
from trainer.protocol.events import EventKind

_START_SECONDS, _NOTICE_SECONDS, _BACK_SECONDS = 120.0, 60.0, 60.0
_HIT_AT = 13
_SETTINGS = ("train.steps=5000", "checkpoint.every=5", "train.batch_size=16", "train.seq_len=128")
_VICTIM = 3
SCRIPT = Path(__file__).with_name("script.py")


def kill(folder: Path, kind: str, *settings: str) -> dict[str, float]:
    """Measure SIGKILL of a rank: time to notice, time back to a step, and the latter as a share of the cold start.

    `settings` are added to those shared by all runs.
    """
    with BenchmarkRun(folder, kind, "tiny-gpt", *_SETTINGS, *settings) as job:
        first = job.event(EventKind.GENERATION_FIRST_STEP, _START_SECONDS, generation=1)
        cold = first.time - job.began()
        job.wait_for_step(_HIT_AT, _START_SECONDS)
        at = hit(job.pid(_VICTIM), signal.SIGKILL)
        noticed = job.event(EventKind.RANK_EXITED, _NOTICE_SECONDS, after=at, rank=_VICTIM).time
        back = job.event(EventKind.GENERATION_FIRST_STEP, _BACK_SECONDS, generation=2).time
    return {"noticed": noticed - at, "back": back - noticed, "cold": cold, "share": (back - noticed) / cold}


def stop(folder: Path, kind: str) -> dict[str, float]:
    """Measure SIGSTOP of a rank: time to the declaration, with the culprit named and its evidence on disk.

    `wrong` means that another rank was named, `unkept` that evidence was missing at the declaration; in both cases it
    counts as not declared.
    """
    with BenchmarkRun(folder, kind, "tiny-gpt", *_SETTINGS) as job:
        job.wait_for_step(_HIT_AT, _START_SECONDS)
        at = hit(job.pid(_VICTIM), signal.SIGSTOP)
        incident = job.event(EventKind.INCIDENT, _NOTICE_SECONDS, after=at)
        bundle = job.path(str(incident.data["evidence"]))
        kept = [path.name for path in bundle.rglob("*") if path.is_file()]
        # Readers of the event may rely on the evidence, so it is written before the event.
        late = [path for path in bundle.rglob("*") if path.is_file() and path.stat().st_mtime > incident.time]
        back = job.event(EventKind.GENERATION_FIRST_STEP, _BACK_SECONDS, generation=2).time
    wrong, unkept = incident.data["rank"] != _VICTIM, not kept or bool(late)
    return {
        "declared": math.inf if wrong or unkept else incident.time - at,
        "back": back - incident.time,
        "wrong": float(wrong),
        "unkept": float(unkept),
    }


def lose_node(folder: Path, kind: str) -> dict[str, float]:
    """Kill the agent of a node with all its descendants, and measure until a spare takes its place."""
    with BenchmarkRun(folder, kind, "tiny-gpt", *_SETTINGS, "cluster.spare_nodes=1") as job:
        job.wait_for_step(_HIT_AT, _START_SECONDS)
        at = hit(job.agent(1).pid, signal.SIGKILL)
        lost = job.event(EventKind.AGENT_LOST, _NOTICE_SECONDS, after=at).time
        job.event(EventKind.SPARE_USED, _NOTICE_SECONDS, after=at)
        back = job.event(EventKind.GENERATION_FIRST_STEP, _BACK_SECONDS, generation=2).time
    return {"noticed": lost - at, "back": back - lost}


def kill_in_script(folder: Path, kind: str, step_seconds: float) -> dict[str, float]:
    """Measure as `kill` does, on the script that torchrun also runs."""
    with _script(folder, kind, step_seconds) as (job, logs):
        old = wait_for_victim(logs, _HIT_AT)
        cold = float(lines(logs / "rank-0.jsonl")[0]["time"]) - job.began()
        at = hit(old, signal.SIGKILL)
        noticed = job.event(EventKind.RANK_EXITED, _NOTICE_SECONDS, after=at, rank=_VICTIM).time
        back = first_again(logs, at, _BACK_SECONDS)
    return {"noticed": noticed - at, "back": back - noticed, "cold": cold, "share": (back - noticed) / cold}


def stop_in_script(folder: Path, kind: str, step_seconds: float, patience: float) -> dict[str, float]:
    """Measure SIGSTOP of a rank of the script; infinity if nothing is declared in time, which is expected.

    Ranks of a command have no progress cell, so they are watched only for their end.
    """
    with _script(folder, kind, step_seconds) as (job, logs):
        at = hit(wait_for_victim(logs, _HIT_AT), signal.SIGSTOP)
        try:
            incident = job.event(EventKind.INCIDENT, patience, after=at)
        except NotInTimeError:
            return {"declared": math.inf}
    right = incident.data["rank"] == _VICTIM
    return {"declared": incident.time - at if right else math.inf, "wrong": float(not right)}


@contextlib.contextmanager
def _script(folder: Path, kind: str, step_seconds: float) -> Iterator[tuple[BenchmarkRun, Path]]:
    """Run torchrun's script as a command of orch; yield the job and the folder of its ranks' logs."""
    logs = folder / "script"
    logs.mkdir(parents=True)
    command = json.dumps([sys.executable, str(SCRIPT), str(logs), "100000", str(step_seconds)])
    shape = ("cluster.nodes=2", "cluster.ranks_per_node=2")
    with BenchmarkRun(folder, kind, "torchrun-script", f"command={command}", *shape) as job:
        yield job, logs


def wait_for_victim(logs: Path, step: int) -> int:
    """Return the victim's process once it has trained this step."""

    def look() -> int | None:
        told = lines(logs / f"rank-{_VICTIM}.jsonl")
        return int(told[-1]["pid"]) if told and told[-1]["step"] >= step else None

    return until(look, _START_SECONDS, f"step {step} of the script")


def first_again(logs: Path, at: float, seconds: float) -> float:
    """Return the time of rank 0's first step in a process that began after `at`; infinity without such a step."""
    old = {line["pid"] for line in lines(logs / "rank-0.jsonl") if line["time"] <= at}

    def look() -> float | None:
        return next((line["time"] for line in lines(logs / "rank-0.jsonl") if line["pid"] not in old), None)

    try:
        return until(look, seconds, "a step after the restart")
    except NotInTimeError:
        return math.inf
