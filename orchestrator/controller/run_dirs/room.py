"""Whether a run's folder has room for what the next job is about to write there."""

import errno
import shutil

from checkpointing.storage.storage_errors import disk_words, write_probe
from trainer.contract.run_dir import RunDir

LEAST = 1 << 18
"""Bytes that the small files of a job may take: with less, it cannot even say why it ends."""
_MOST_PROBED = 64 << 20
"""Bytes that are written to see whether they can be: for more, what the file system says has to do."""


def missing_room(folder: RunDir, checkpoint: int) -> str:
    """Why no job can be started in this run's folder, `disk full ...`; empty when one can.

    `checkpoint`: bytes of one that there has to be room for, besides the job's small files; 0: none.
    """
    free = _free(folder) if checkpoint else None
    if free is not None and free < checkpoint + LEAST:
        left, wanted = free / (1 << 20), checkpoint / (1 << 20)
        room = f"{left:.1f} MiB are free, a checkpoint takes {wanted:.1f} MiB"
        return f"{disk_words(errno.ENOSPC)}: {room} ({folder.path})"
    return write_probe(folder.path, min(checkpoint + LEAST, _MOST_PROBED))


def _free(folder: RunDir) -> int | None:
    """Bytes that are free, and those that the next job frees first; None where the file system does not tell."""
    from checkpointing.retention.garbage import find_debris  # storage backends: only after a disk was full
    from checkpointing.tiers.catalog import Catalog  # the same

    try:
        usage = shutil.disk_usage(folder.path)
        debris = sum(one.bytes for one in find_debris(Catalog(folder.checkpoints)))
    except OSError:
        return None
    return usage.free + debris if usage.total else None
