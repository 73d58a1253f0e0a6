"""Faults done to real runs of the product; all times are those that agents, ranks and the coordinator wrote down."""

import contextlib
import json
import math
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.recovery.job import Job, hit
from benchmarks.recovery.polling import NotInTimeError, lines, until
from trainer.contract.events import EventKind

_START_SECONDS, _NOTICE_SECONDS, _BACK_SECONDS = 120.0, 60.0, 60.0
_HIT_AT = 13
_SETTINGS = ("train.steps=5000", "checkpoint.every=5", "train.batch_size=16", "train.seq_len=128")
_VICTIM = 3
SCRIPT = Path(__file__).with_name("script.py")


def kill(folder: Path, kind: str, *settings: str) -> dict[str, float]:
    """SIGKILL of a rank: noticed, back at a step, and that as a share of this run's cold start.

    `settings` of the run, beside those of all.
    """
    with Job(folder, kind, "tiny-gpt", *_SETTINGS, *settings) as job:
        first = job.event(EventKind.GENERATION_FIRST_STEP, _START_SECONDS, generation=1)
        cold = first.time - job.began()
        job.reached(_HIT_AT, _START_SECONDS)
        at = hit(job.pid(_VICTIM), signal.SIGKILL)
        noticed = job.event(EventKind.RANK_EXITED, _NOTICE_SECONDS, after=at, rank=_VICTIM).time
        back = job.event(EventKind.GENERATION_FIRST_STEP, _BACK_SECONDS, generation=2).time
    return {"noticed": noticed - at, "back": back - noticed, "cold": cold, "share": (back - noticed) / cold}


def stop(folder: Path, kind: str) -> dict[str, float]:
    """SIGSTOP of a rank: declared, with the culprit named and its evidence on disk.

    `wrong` and `unkept` say that another rank was named, and that there was no evidence when it was declared: it counts
    as not declared then.
    """
    with Job(folder, kind, "tiny-gpt", *_SETTINGS) as job:
        job.reached(_HIT_AT, _START_SECONDS)
        at = hit(job.pid(_VICTIM), signal.SIGSTOP)
        incident = job.event(EventKind.INCIDENT, _NOTICE_SECONDS, after=at)
        bundle = job.path(str(incident.data["evidence"]))
        kept = [path.name for path in bundle.rglob("*") if path.is_file()]
        # Whoever reads the event may rely on the evidence: it is written before the event is.
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
    """The agent of a node is killed, and with it all it had started; a spare takes its place."""
    with Job(folder, kind, "tiny-gpt", *_SETTINGS, "cluster.spare_nodes=1") as job:
        job.reached(_HIT_AT, _START_SECONDS)
        at = hit(job.agent(1).pid, signal.SIGKILL)
        lost = job.event(EventKind.AGENT_LOST, _NOTICE_SECONDS, after=at).time
        job.event(EventKind.SPARE_USED, _NOTICE_SECONDS, after=at)
        back = job.event(EventKind.GENERATION_FIRST_STEP, _BACK_SECONDS, generation=2).time
    return {"noticed": lost - at, "back": back - lost}


def kill_in_script(folder: Path, kind: str, step_seconds: float) -> dict[str, float]:
    """The same as `kill`, on the script that torchrun runs beside it."""
    with _script(folder, kind, step_seconds) as (job, logs):
        old = trained(logs, _HIT_AT)
        cold = float(lines(logs / "rank-0.jsonl")[0]["time"]) - job.began()
        at = hit(old, signal.SIGKILL)
        noticed = job.event(EventKind.RANK_EXITED, _NOTICE_SECONDS, after=at, rank=_VICTIM).time
        back = first_again(logs, at, _BACK_SECONDS)
    return {"noticed": noticed - at, "back": back - noticed, "cold": cold, "share": (back - noticed) / cold}


def stop_in_script(folder: Path, kind: str, step_seconds: float, patience: float) -> dict[str, float]:
    """SIGSTOP of a rank of the script: infinity when nothing is declared in time, which is what is expected.

    Ranks of a command have no progress cell, so that they are watched for their end only.
    """
    with _script(folder, kind, step_seconds) as (job, logs):
        at = hit(trained(logs, _HIT_AT), signal.SIGSTOP)
        try:
            incident = job.event(EventKind.INCIDENT, patience, after=at)
        except NotInTimeError:
            return {"declared": math.inf}
    right = incident.data["rank"] == _VICTIM
    return {"declared": incident.time - at if right else math.inf, "wrong": float(not right)}


@contextlib.contextmanager
def _script(folder: Path, kind: str, step_seconds: float) -> Iterator[tuple[Job, Path]]:
    """The script that torchrun runs, as a command of ours, and where its ranks write."""
    logs = folder / "script"
    logs.mkdir(parents=True)
    command = json.dumps([sys.executable, str(SCRIPT), str(logs), "100000", str(step_seconds)])
    shape = ("cluster.nodes=2", "cluster.ranks_per_node=2")
    with Job(folder, kind, "torchrun-script", f"command={command}", *shape) as job:
        yield job, logs


def trained(logs: Path, step: int) -> int:
    """The process of the victim, once it has trained this step."""

    def look() -> int | None:
        told = lines(logs / f"rank-{_VICTIM}.jsonl")
        return int(told[-1]["pid"]) if told and told[-1]["step"] >= step else None

    return until(look, _START_SECONDS, f"step {step} of the script")


def first_again(logs: Path, at: float, seconds: float) -> float:
    """When rank 0 had trained a step in a process that began after `at`; infinity when it does not come to it."""
    old = {line["pid"] for line in lines(logs / "rank-0.jsonl") if line["time"] <= at}

    def look() -> float | None:
        return next((line["time"] for line in lines(logs / "rank-0.jsonl") if line["pid"] not in old), None)

    try:
        return until(look, seconds, "a step after the restart")
    except NotInTimeError:
        return math.inf
