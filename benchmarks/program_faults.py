"""Faults of training programs: how each is caused from outside, and what orch must then name."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.program_run import ProgramRun
from benchmarks.runner import until
from trainer.protocol.events import EventKind

Item = TypeVar("Item")
VICTIM = 1
"""Rank that is hit; its node is hit by faults of a whole node if the run has no other."""
LOOP = signal.SIGRTMAX - 3
"""Signal for which `tests/programs/loop` installs its endless loop."""
_SAVE_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A fault that has been caused."""

    at: float  # time since the epoch
    target: str  # what was hit, in the words of the table
    is_named: Callable[[ProgramRun], bool]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A column of the table."""

    title: str
    cause: Callable[[ProgramRun], Strike]
    pause: float = 0.1
    """Seconds between two steps."""
    settings: tuple[str, ...] = ()
    disk: str = ""
    """Size of the file system for the program's checkpoints; empty: an ordinary folder."""


def leave_alone(run: ProgramRun) -> Strike:
    return Strike(at=0.0, target="", is_named=lambda done: True)


def kill_rank(run: ProgramRun) -> Strike:
    return _signal_rank(run, signal.SIGKILL, "rank_killed")


def stop_rank(run: ProgramRun) -> Strike:
    return _signal_rank(run, signal.SIGSTOP, "hang")


def loop_rank(run: ProgramRun) -> Strike:
    return _signal_rank(run, LOOP, "hang")


def _signal_rank(run: ProgramRun, number: int, kind: str) -> Strike:
    rank = min(VICTIM, run.world - 1)
    now = time.time()
    run.ranks()[rank].send_signal(number)
    return Strike(at=now, target=f"rank {rank}", is_named=lambda done: done.first_failure(now) == (kind, rank))


def kill_node(run: ProgramRun) -> Strike:
    node, name = run.nodes - 1, f"local-{run.nodes - 1}"
    if run.lab:
        name = run.lab.nodes_of(str(run.show()["attempts"][0]["job_id"]))[node]
        now = time.time()
        run.lab.cut_power(name)
    else:
        now, agent = time.time(), run.job.agent(node)
        for process in [agent, *agent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def is_named(done: ProgramRun) -> bool:
        failure = done.attempts()[0]["failure"] or {}
        is_lost = failure.get("kind") in ("agent_lost", "node_lost")
        # With one node, no agent is left that could name it.
        return bool(is_lost and (done.nodes == 1 or failure.get("node") == name))

    return Strike(at=now, target=f"node {node}", is_named=is_named)


def preempt(run: ProgramRun) -> Strike:
    now = time.time()
    if run.lab:
        urgent = ("-p", "high", "-N", str(len(run.lab.nodes)), "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2")
        if (done := run.lab.ask("sbatch", *urgent)).returncode:
            raise RuntimeError(f"sbatch: {done.stderr}")
    else:
        run.job.agent(0).send_signal(signal.SIGUSR2)
    return Strike(at=now, target="the job", is_named=lambda done: _ended_as(done, "preempted"))


def await_time_limit(run: ProgramRun) -> Strike:
    event = until(lambda: _first(run.events(EventKind.STOP_REQUESTED, EventKind.GENERATION_ENDED)), 600, "time limit")
    return Strike(at=event.time, target="the job", is_named=lambda done: _ended_as(done, "time_limit"))


def _ended_as(run: ProgramRun, kind: str) -> bool:
    return bool((run.attempts()[0]["failure"] or {}).get("kind") == kind)


def _first(found: Sequence[Item]) -> Item | None:
    return next(iter(found), None)


def tear_newest(run: ProgramRun) -> Strike:
    return _spoil_newest(run, "torn", lambda file: os.truncate(file, file.stat().st_size // 2))


def damage_newest(run: ProgramRun) -> Strike:
    return _spoil_newest(run, "damaged", _flip_bits)


def _flip_bits(file: Path) -> None:
    """Invert a kilobyte in the middle, where a checkpoint has its tensors."""
    size = file.stat().st_size
    length = min(1024, size // 2)
    with file.open("r+b") as stream:
        stream.seek((size - length) // 2)
        found = stream.read(length)
        stream.seek(-length, os.SEEK_CUR)
        stream.write(bytes(byte ^ 255 for byte in found))


def _spoil_newest(run: ProgramRun, how: str, spoil: Callable[[Path], None]) -> Strike:
    """Wait until the newest checkpoint is sealed, stop all ranks, spoil its largest file, and kill them."""
    newest = until(lambda: _find_sealed_newest(run), _SAVE_SECONDS, "a sealed checkpoint that is the newest")
    ranks = run.ranks()
    for process in ranks:
        process.suspend()
    place = Path(str(newest["path"]))
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    spoil(max(files, key=lambda path: path.stat().st_size))
    now = time.time()
    ranks[0].kill()

    def is_named(done: ProgramRun) -> bool:
        moved = done.events(EventKind.CHECKPOINT_SET_ASIDE)
        return [event.data["step"] for event in moved] == [newest["step"]]

    return Strike(at=now, target=f"checkpoint {newest['step']} {how}", is_named=is_named)


def _find_sealed_newest(run: ProgramRun) -> dict[str, Any] | None:
    """Return the newest seal, if it is the second or a later one and the program has saved nothing since."""
    sealed = run.events(EventKind.CHECKPOINT_SEALED)
    newest = max((event.data for event in sealed), key=lambda data: int(data["step"]), default=None)
    numbers = [int(found[-1]) for path in run.saves() if (found := re.findall(r"\d+", path.name))]
    return newest if len(sealed) > 1 and newest is not None and newest["step"] == max(numbers, default=-1) else None


def fill_disk(run: ProgramRun) -> Strike:
    """Fill the file system until a rank has failed, and free it then."""
    until(lambda: _first(run.saves()), _SAVE_SECONDS, "a checkpoint")
    after = time.time()
    ballast = run.out.parent / "ballast"
    with ballast.open("ab", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(bytes(1 << 12)):
            pass
    ended = until(
        lambda: _first([event for event in run.events(EventKind.RANK_EXITED) if event.time > after]), 300,
        "the end of a rank that could not save",
    )  # fmt: skip
    ballast.unlink()

    def is_named(done: ProgramRun) -> bool:
        failure = done.first_failure(after)
        return failure is not None and failure[0] == "storage"

    return Strike(at=ended.time, target="the disk", is_named=is_named)


_WATCHED = ("detection.hang.slow=4", "detection.hang.evidence=5")
"""A loop counts as a hang after 2.5 times `slow`."""
CALM = "calm"
FAULTS = {
    CALM: Fault(title="undisturbed", cause=leave_alone, pause=0.02),
    "kill": Fault(title="SIGKILL", cause=kill_rank),
    "stop": Fault(title="SIGSTOP", cause=stop_rank),
    "loop": Fault(title="endless loop", cause=loop_rank, settings=_WATCHED),
    "node": Fault(title="node death", cause=kill_node),
    "preempt": Fault(title="preemption", cause=preempt),
    "limit": Fault(title="time limit", cause=await_time_limit, pause=2.0,
                   settings=("cluster.time='2:30'", "cluster.signal_lead=75")),
    "torn": Fault(title="torn newest", cause=tear_newest, pause=1.0),
    "damaged": Fault(title="damaged newest", cause=damage_newest, pause=1.0),
    "disk": Fault(title="disk full", cause=fill_disk, disk="24m"),
}  # fmt: skip
"""Columns of the table, keyed by the names for `--faults`."""
