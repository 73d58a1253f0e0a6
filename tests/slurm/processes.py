"""Find and end the lab's own processes by their folder, never by name."""

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil


def alive(pids: Iterable[int]) -> list[int]:
    """Return the processes that still run; zombies do not."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def environment_of(pid: int) -> dict[str, str]:
    """Return the initial environment of a process; empty if it has ended or belongs to another user."""
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in block.split(b"\0") if item)
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}


def using(place: Path) -> Iterator[int]:
    """Yield processes with this file open, or with an open file or their current folder in this folder."""
    prefix = f"{place.resolve()}/"
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and _touches(entry, prefix):
            yield int(entry.name)


def _touches(process: Path, prefix: str) -> bool:
    links = [process / "cwd"]
    try:
        links += list((process / "fd").iterdir())
    except OSError:
        return False
    for link in links:
        try:
            if f"{os.readlink(link)}/".startswith(prefix):
                return True
        except OSError:
            continue
    return False


def job_processes(conf: Path, node: str | None = None) -> list[int]:
    """Return the processes of all jobs of the cluster with this slurm.conf, or of those on one node."""
    found = []
    for pid in psutil.pids():
        environ = environment_of(pid)
        if environ.get("SLURM_CONF") != str(conf) or "SLURMD_NODENAME" not in environ or "SLURM_JOB_ID" not in environ:
            continue
        if pid != os.getpid() and node in (None, environ["SLURMD_NODENAME"]):
            found.append(pid)
    return found


def steps_of(work: Iterable[int]) -> list[int]:
    """Return the slurmstepds that started these processes."""
    found = set()
    for pid in work:
        try:
            found |= {parent.pid for parent in psutil.Process(pid).parents() if parent.name() == "slurmstepd"}
        except psutil.NoSuchProcess:
            continue
    return sorted(found)


def send(pids: Iterable[int], signal: int) -> None:
    """Signal the processes that still exist."""
    for pid in pids:
        try:
            os.kill(pid, signal)
        except ProcessLookupError:
            continue


def wait_gone(pids: Iterable[int], timeout: float) -> list[int]:
    """Wait until all have ended; return those that have not in time."""
    deadline = time.monotonic() + timeout
    left = alive(pids)
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = alive(left)
    return left
