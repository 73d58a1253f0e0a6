"""Parent-death signals, process groups, orphans, and the report of an agent that loses its coordinator."""

import ctypes
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from trainer.agent.processes.background_tasks import run_detached
from trainer.protocol.failures.outcome import AgentEnd, AgentReport, ExitCode
from trainer.protocol.node_identity import NodeIdentity
from trainer.protocol.run_dir import AttemptDir

_SECONDS = 5.0
"""Time limit of the report; a hung file system may be why the coordinator was lost."""


async def write(attempt: AttemptDir, identity: NodeIdentity, end: AgentEnd, why: str) -> None:
    """Write the agent's report, if the file system responds."""
    reason = f"{identity.name}{'' if end is AgentEnd.REFUSED else ' lost the coordinator'}: {why}"
    report = AgentReport(node=identity.node, name=identity.name, end=end, reason=reason, time=time.time())
    with suppress(OSError):
        await run_detached(lambda: report.write(attempt.agent_report(identity.node)), _SECONDS)


AGENT_DIED_SIGNAL = signal.SIGRTMIN + 5
"""Parent-death signal of a fork server with ranks; it kills their process groups before it exits."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def set_pdeathsig(parent: int, number: int = signal.SIGKILL) -> None:
    """Request signal `number` on the death of process `parent`; exits at once if it is already dead."""
    _prctl(_PR_SET_PDEATHSIG, number)
    # The parent may have died before the call.
    if os.getppid() != parent:
        os._exit(ExitCode.RETRY)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, so that it can wait for them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_group(group: int, number: int = signal.SIGKILL) -> bool:
    """Signal a process group; returns False if it has no members."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # a member has changed its user: it exists but cannot be killed
        return True
    return True


def kill_children(exclude: Collection[int] = ()) -> bool:
    """Kill every child of this process, adopted orphans included, except `exclude`; returns False if none was left."""
    found = [pid for pid in children() if pid not in exclude]
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return bool(found)


def children() -> list[int]:
    """Return every unreaped child of this process, adopted orphans included."""
    return [int(pid) for task in os.listdir("/proc/self/task") for pid in _task_children(task)]


def _task_children(task: str) -> list[str]:
    try:
        return Path(f"/proc/self/task/{task}/children").read_text().split()
    except FileNotFoundError:  # the thread has ended; its children now belong to another thread
        return []


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
