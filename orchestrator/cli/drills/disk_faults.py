"""Faults that no process of the job has to bring about: a damaged checkpoint, and a disk that takes no more."""

import os
import resource
import shutil
from pathlib import Path

import psutil

from checkpointing.tiers.catalog import Catalog, Entry
from orchestrator.errors import Precondition
from trainer.contract.run_dir import RunDir

_WRITER = "orch-writer"
_DAMAGE = 64
"""Bytes that are turned over in the middle of the largest file."""


def expendable(folder: RunDir) -> Entry:
    """The newest committed checkpoint; raises Precondition when there is no older one to go on from without it."""
    found = Catalog(folder.checkpoints).committed() if folder.checkpoints.is_dir() else []
    if len(found) < 2:
        raise Precondition(
            f"{folder.name} has {len(found)} committed checkpoints in its own folder: without the newest one it could "
            "not go on", where=str(folder.checkpoints), hint=f"orch save {folder.name}   orch ckpt ls {folder.name}",
        )  # fmt: skip
    return found[0]


def damage_newest(folder: RunDir) -> tuple[int, Path]:
    """Turn bytes of the newest committed checkpoint over; returns its step and the file. Raises Precondition."""
    newest = expendable(folder)
    files = [path for path in (folder.checkpoints / newest.name).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    middle = largest.stat().st_size // 2
    if largest.stat().st_nlink > 1:  # another run begins with the same file: it keeps the good one
        own = largest.with_name(f"{largest.name}.own")
        shutil.copyfile(largest, own)
        os.replace(own, largest)
    descriptor = os.open(largest, os.O_RDWR | os.O_CLOEXEC)
    try:
        before = os.pread(descriptor, _DAMAGE, middle)
        os.pwrite(descriptor, bytes(255 - byte for byte in before), middle)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return newest.step, largest


def fill_disk(job_id: str) -> int:
    """Let no checkpoint writer of a job on this machine write to a file any more; returns how many there are.

    A limit on the size of files stands for the full disk: a real one would stop everybody else on it as well.
    """
    job = psutil.Process(int(job_id.partition("-")[0]))
    writers = [process for process in job.children(recursive=True) if _title(process).startswith(_WRITER)]
    for writer in writers:
        _, hard = resource.prlimit(writer.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (0, hard))
    return len(writers)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended meanwhile
        return ""
