"""End of a rank, from the kernel, its own report or its log, and the order of these reports."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trainer.agent.processes.background_tasks import run_detached
from trainer.agent.processes.log_pipes import LogPipes
from trainer.agent.rank_processes.last_output import LastOutput, last_cpp_exception, last_output
from trainer.agent.rank_processes.local_ranks import LocalRank
from trainer.protocol.failures.failure_patterns import Meaning, has_meaning
from trainer.protocol.failures.outcome import RankOutcome
from trainer.protocol.messages.agents import RankExit
from trainer.protocol.messages.ranks import ReportedEnd
from trainer.protocol.rank_progress.rank_messages import find_outcome, pack_error_file
from trainer.protocol.run_dir import AttemptDir

Task = asyncio.Task[None]


class ExitReports:
    """Ordered exit reports: the first exit matters most, so no report is sent before those of earlier exits."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, None]], Task]) -> None:
        """`spawn` starts a task that ends with its agent."""
        self._spawn = spawn
        self._last: Task | None = None

    def add(self, read: Callable[[], Awaitable[RankExit]], send: Callable[[RankExit], None]) -> None:
        """Read the information on an exit now, and send it when its turn comes."""
        self._last = self._spawn(self._send(read, send, self._last))

    async def wait_until_sent(self) -> None:
        """Wait until all reports added so far are sent."""
        await _wait(self._last)

    async def _send(
        self, read: Callable[[], Awaitable[RankExit]], send: Callable[[RankExit], None], before: Task | None
    ) -> None:
        known = await read()
        await _wait(before)
        send(known)


async def _wait(task: Task | None) -> None:
    if task is not None and not task.done():
        await asyncio.wait([task])


_LONGEST = 4000
_READ_SECONDS = 2.0
"""Time limit of reads from the file system, so that a slow one does not delay the report to the coordinator."""


def decode_shell_exit(exit_code: int | None, number: int | None) -> tuple[int | None, int | None]:
    """Return exit code and signal; a shell's exit code above 128 means that a signal killed its child."""
    if exit_code is not None and 128 < exit_code <= 128 + signal.SIGRTMAX:
        return None, exit_code - 128
    return exit_code, number


@dataclass(frozen=True, kw_only=True)
class ExitInfo:
    """Data on a rank from its socket, its shared memory and the kernel; involves no disk."""

    rank: int
    node: str
    step: int
    stepped: bool
    reported_end: ReportedEnd | None
    memory_kill: str = ""  # description of the kernel's out-of-memory kill

    @classmethod
    def from_rank(cls, local: LocalRank, node: str, memory_kill: str = "") -> "ExitInfo":
        while local.receive_message() is not None:
            pass
        step = local.read_progress().step
        return cls(
            rank=local.rank, node=node, step=step, stepped=local.has_stepped(), reported_end=local.reported_end,
            memory_kill=memory_kill,
        )  # fmt: skip


async def exit_report(
    attempt: AttemptDir, generation: int, info: ExitInfo, exit_code: int | None, number: int | None, *, command: bool,
    logs: LogPipes,
) -> RankExit:  # fmt: skip
    """Return the report to the coordinator about this rank.
    `command`: it was a user's own program, known only by its exit and its log. Files that the file system does not show
    at once are not awaited: our own rank has reported the same over its socket.
    """
    with suppress(TimeoutError, RuntimeError):  # RuntimeError: the node cannot start another thread
        await run_detached(lambda: logs.settle(attempt.rank_log(info.rank), _READ_SECONDS), _READ_SECONDS)
    killed = RankExit(
        generation=generation, rank=info.rank, reported=False, exit_code=exit_code, signal=number,
        out_of_memory=info.memory_kill,
    )  # fmt: skip
    if command:
        return await _command_exit_report(attempt, info, replace(killed, reported=True))
    own_end: ReportedEnd | RankOutcome | None = info.reported_end
    cpp_exception = None
    with suppress(TimeoutError, RuntimeError):
        read = partial(_left_in_files, attempt, generation, info, aborted=number == signal.SIGABRT)
        written, cpp_exception = await run_detached(read, _READ_SECONDS)
        own_end = written or own_end
    if own_end is None:
        return replace(killed, step=info.step, stepped=info.stepped, message=cpp_exception)
    # It reported everything before it died; a crash in the interpreter's teardown changes nothing.
    return replace(
        killed, reported=True, exit_code=own_end.exit_code, signal=None, step=own_end.step, stepped=info.stepped,
        exception=own_end.exception, message=(own_end.message or "")[:_LONGEST], secondary=own_end.secondary,
        position=own_end.position,
    )  # fmt: skip


async def _command_exit_report(attempt: AttemptDir, info: ExitInfo, end: RankExit) -> RankExit:
    """Return the report of a command, whose step is unknown and whose exception is in its log."""
    if end.exit_code == 0:
        return end
    output, error_file = LastOutput(), attempt.error_file(info.rank, end.generation)
    with suppress(TimeoutError, RuntimeError):
        read = partial(last_output, attempt.rank_log(info.rank), end.generation, error_file)
        output = await run_detached(read, _READ_SECONDS)
    with suppress(TimeoutError, RuntimeError, OSError):
        pack = partial(pack_error_file, attempt, info.node, info.rank, end.generation)
        await run_detached(pack, _READ_SECONDS)
    end = replace(end, lines=output.lines, written=output.written)
    if end.signal is None and output.exception is not None:
        message = (output.message or "")[:_LONGEST]
        secondary = _of_torch(output.exception) and has_meaning(message, Meaning.PEER_GONE)
        return replace(end, exception=output.exception, message=message, secondary=secondary)
    return replace(end, message=output.uncaught) if end.signal == signal.SIGABRT else end


def _of_torch(exception: str) -> bool:
    """Return whether torch's collectives raise this.
    A program's own ConnectionRefusedError is a cause, not a lost peer.
    """
    name = exception.rpartition(".")[2]
    return name == "RuntimeError" or name.startswith("Dist")


def _left_in_files(
    attempt: AttemptDir, generation: int, info: ExitInfo, *, aborted: bool
) -> tuple[RankOutcome | None, str | None]:
    """Return the rank's outcome, or the C++ exception in its log if it was aborted and wrote none."""
    outcome = find_outcome(attempt, info.node, info.rank, generation)
    if outcome is not None:
        return outcome, None
    return None, last_cpp_exception(attempt.rank_log(info.rank), generation) if aborted else None
