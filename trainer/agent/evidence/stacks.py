"""Stacks of all threads of a rank, written by the rank itself or read from outside."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

from trainer.agent.processes import proc
from trainer.protocol.rank_progress.rank_messages import STACKS

_LOOK = 0.05
_MOST = 1 << 20


def obstacle(pid: int, memory: int) -> str | None:
    """Return why the rank cannot be asked for its stacks, or None. A signal without a handler would kill it."""
    if memory < 0:
        return "there is no memory for its stacks"
    signs = proc.read_activity(pid)
    if signs is None or signs.state in "ZX":
        return "the process is dead"
    if signs.state in "Tt":
        return "the process is stopped and handles no signal"
    if not _catches(pid, STACKS):
        return "the process is not ready for the signal (yet)"
    return None


def _catches(pid: int, number: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    masks = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(masks) and bool(int(masks[0], 16) >> (number - 1) & 1)


async def ask(pid: int, memory: int) -> bytes:
    """Make the rank write its stacks into `memory`, a memfd, and wait until it is done; may be cancelled.
    WARNING: both processes share the file position, so it is reset before the signal and never moved by reading.
    """
    os.ftruncate(memory, 0)
    os.lseek(memory, 0, os.SEEK_SET)
    os.kill(pid, STACKS)
    size = 0
    while True:
        await asyncio.sleep(_LOOK)
        now = os.fstat(memory).st_size
        if now and now == size:
            return os.pread(memory, _MOST, 0)
        size = now


def py_spy() -> str | None:
    """Return the path of py-spy beside this Python or in PATH, or None."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def dump_with_py_spy(program: str, pid: int, seconds: float) -> bytes:
    """Return py-spy's dump of the running process, taken without stopping it; raises OSError with py-spy's message."""
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise OSError(f"py-spy took more than {seconds:.1f} s") from None
    if not done.stdout:
        raise OSError(f"py-spy: {done.stderr.decode(errors='replace').strip()[:500]}")
    return done.stdout
