"""A rank's exit: its last output and the exception shown in it."""

import asyncio
import json
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.agent.fork_server.link import ForkServerLink
from trainer.agent.processes.background_tasks import run_detached
from trainer.agent.processes.log_pipes import LogPipes
from trainer.agent.rank_processes.launcher_report import LauncherReport, lines_of_rank, read_report
from trainer.agent.rank_processes.local_ranks import LocalRank, LocalRanks
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.failure_patterns import Meaning, has_meaning
from trainer.protocol.failures.rank_end import RankEnd, exit_words, find_outcome, pack_error_file
from trainer.protocol.logs.log_rotation import read_tail
from trainer.protocol.messages.ranks import generation_mark
from trainer.protocol.run_dir import AttemptDir
from trainer.protocol.secrets.secret_redaction import in_use

_WHAT = re.compile(r"^[ \t]*what\(\):[ \t]*(\S.*)$", re.MULTILINE)
"""Uncaught exception as the C++ runtime prints it; `\\s` would scan all following blank lines for each match."""


LINES, WIDTH = 20, 200
"""Limits on the log lines sent and displayed."""
_MOST = 1 << 20
"""Maximum bytes read from a log."""
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)|\x1b.")
_CONTROLS = {number: None for number in (*range(9), *range(11, 32), *range(127, 160))} | {9: " "}
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""Prefix that torch puts on every line of a traceback."""
TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?:: (.*))?$")
_NOT_COMPILED = re.compile(r"^(SyntaxError|IndentationError|TabError): (.*)$")
"""Errors that Python prints without a traceback for a main script."""


@dataclass(frozen=True, kw_only=True)
class LastOutput:
    """Last lines without escape sequences, bytes written in this generation, and the exception's class and message."""

    lines: tuple[str, ...] = ()
    written: int = 0
    exception: str | None = None
    message: str | None = None
    uncaught: str | None = None  # newest C++ exception
    report: LauncherReport = field(default_factory=LauncherReport)  # of the launcher that started the ranks, if any


def last_output(
    log: Path, generation: int, error_file: Path, ranks: Sequence[int] = (), dead: int | None = None
) -> LastOutput:
    """Return this generation's last output from a rank's log and from the error file of torch's `@record`.
    `ranks` are those that a launcher has started and that share the log; `dead` is the one that died first, if known.
    """
    try:
        raw = read_tail(log, _MOST).rpartition(f"{generation_mark(generation)}\n".encode())[2]
    except OSError:
        raw = b""
    text = raw.decode(errors="replace")
    lines, report = [_plain(line) for line in text.split("\n")], LauncherReport()
    if ranks:
        report, lines = read_report(lines)
        named = dead if report.local_rank is None else dict(enumerate(ranks)).get(report.local_rank, dead)
        lines = lines if named is None else lines_of_rank(lines, named)
    exception, message = _read_error_file(error_file) or _parse_traceback(lines) or (None, None)
    shown, caught = [line[:WIDTH] for line in lines if line.strip()][-LINES:], _WHAT.findall(text)
    return LastOutput(
        lines=tuple(shown),
        written=len(raw),
        exception=exception,
        message=message,
        uncaught=caught[-1].strip() if caught else None,
        report=report,
    )


def _plain(line: str) -> str:
    """Return a line as a terminal would finally show it: without escapes, and with a progress bar's last state."""
    return _ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2]).translate(_CONTROLS).rstrip()


def _parse_traceback(lines: list[str]) -> tuple[str, str | None] | None:
    """Return the exception in the final line of the last traceback, or None."""
    lines = [RANK_PREFIX.sub("", line) for line in lines]
    starts = [at for at, line in enumerate(lines) if line.startswith(TRACEBACK)]
    for line in lines[starts[-1] + 1 :] if starts else ():
        if line and not line[0].isspace():
            found = _RAISED.match(line)
            return (found[1], found[2]) if found else None
    late = [found for line in lines if (found := _NOT_COMPILED.match(line))]
    return (late[-1][1], late[-1][2]) if late and not starts else None


def _read_error_file(path: Path) -> tuple[str, str | None] | None:
    """Return the exception recorded by `torch.distributed.elastic.multiprocessing.errors.record`, or None."""
    try:
        found: Any = json.loads(path.read_bytes()[:_MOST])["message"]
        text = in_use().text(str(found["message"] if isinstance(found, dict) else found))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    match = _RAISED.match(_plain(text.strip().split("\n")[0]))
    return (match[1], match[2]) if match else None


_LONGEST = 4000
_READ_SECONDS = 2.0
"""Time limit for reads, so that a slow file system does not delay the report to the coordinator."""


def decode_shell_exit(exit_code: int | None, number: int | None) -> tuple[int | None, int | None]:
    """Return the exit code and the signal; a shell's exit code above 128 means that a signal killed its child."""
    if exit_code is not None and 128 < exit_code <= 128 + signal.SIGRTMAX:
        return None, exit_code - 128
    return exit_code, number


def add_local_facts(end: RankEnd, local: LocalRank, ranks: LocalRanks, node: str, *, command: bool) -> RankEnd:
    """Add what the agent has in memory to a rank's end, without using the disk.
    `command` is true for a user's own program, which is known only by its exit and its log.
    """
    while local.receive_message() is not None:
        pass
    exit_code, number = decode_shell_exit(end.exit_code, end.signal) if command else (end.exit_code, end.signal)
    return replace(
        end, generation=ranks.generation, node=node, exit_code=exit_code, signal=number, reported=command,
        step=None if command else local.read_progress().step, stepped=local.has_stepped(),
        out_of_memory=ranks.memory_kill(local.rank, number),
    )  # fmt: skip


_REPORT_SECONDS, _LOOK_SECONDS, _SLOWER = 60.0, 0.2, 1.5
"""Limit for a launcher's report on a lost rank, the first pause between two looks, and the growth of the pauses: a rank
that has ended well leaves no report.
"""


async def end_launcher(ranks: LocalRanks, attempt: AttemptDir, link: ForkServerLink) -> None:
    """Kill a launcher that has lost a rank as soon as it has reported everything, because its exit takes seconds."""
    local, until, pause = next(iter(ranks.by_rank.values())), time.monotonic() + _REPORT_SECONDS, _LOOK_SECONDS
    log, error_file = attempt.rank_log(local.log_rank), attempt.error_file(local.log_rank, ranks.generation)
    while not local.ended and time.monotonic() < until:
        with suppress(TimeoutError, RuntimeError):
            read = partial(last_output, log, ranks.generation, error_file, tuple(ranks.by_rank))
            output = await run_detached(read, _READ_SECONDS)
            if output.report.is_complete and not local.ended:
                link.signal_ranks(signal.SIGKILL)
                return
        await asyncio.sleep(pause)
        pause *= _SLOWER


def write_end(events: EventLog, end: RankEnd, ranks: LocalRanks) -> None:
    reason = "killed by its agent" if ranks.killed else exit_words(end.exit_code, end.signal, end.out_of_memory)
    known = {"exit_code": end.exit_code, "signal": end.signal, "reason": reason}
    events.write(EventKind.RANK_EXITED, rank=end.rank, node=end.node, **known)


def share_end(end: RankEnd, ranks: LocalRanks) -> list[RankEnd]:
    """Return the ends of all ranks that ended with this one, the cause first."""
    others = [one.rank for one in ranks.ranks_of_process(end.rank) if one.rank != end.rank]
    shared = replace(end, secondary=True, out_of_memory="", signal=None, exit_code=end.exit_code or 1)
    return [end, *(replace(end if end.good else shared, rank=rank) for rank in others)]


async def complete_end(
    attempt: AttemptDir, end: RankEnd, ranks: LocalRanks, *, command: bool, logs: LogPipes
) -> RankEnd:
    """Complete a rank's end for the coordinator with the rank's own report, from its socket or its files.
    Files that the file system shows late are not awaited, since orch's own ranks report the same over their sockets.
    """
    local = ranks.by_rank[end.rank]
    with suppress(TimeoutError, RuntimeError):  # RuntimeError: the node cannot start another thread
        await run_detached(lambda: logs.settle(attempt.rank_log(local.log_rank), _READ_SECONDS), _READ_SECONDS)
    if command:
        return await _complete_command_end(attempt, end, local, ranks)
    cpp_exception, own = None, local.reported_end
    with suppress(TimeoutError, RuntimeError):
        written, cpp_exception = await run_detached(partial(_left_in_files, attempt, end), _READ_SECONDS)
        own = written or own
    if own is None:
        return replace(end, message=cpp_exception)
    # It had reported everything before it died, so a crash while the interpreter shut down changes nothing.
    return replace(
        end, reported=True, exit_code=own.exit_code, signal=None, step=own.step, exception=own.exception,
        message=(own.message or "")[:_LONGEST], secondary=own.secondary, position=own.position,
    )  # fmt: skip


async def _complete_command_end(attempt: AttemptDir, end: RankEnd, local: LocalRank, ranks: LocalRanks) -> RankEnd:
    if end.exit_code == 0:
        return end
    output, error_file = LastOutput(), attempt.error_file(local.log_rank, end.generation)
    launched, dead = tuple(ranks.by_rank) if ranks.per_node else (), ranks.first_dead()
    with suppress(TimeoutError, RuntimeError):
        log = attempt.rank_log(local.log_rank)
        read = partial(last_output, log, end.generation, error_file, launched, dead)
        output = await run_detached(read, _READ_SECONDS)
    if launched and (end.signal is None or output.report.is_complete):
        end = _follow_report(end, output.report, ranks)
    with suppress(TimeoutError, RuntimeError, OSError):
        pack = partial(pack_error_file, attempt, end.node, local.log_rank, end.generation)
        await run_detached(pack, _READ_SECONDS)
    end = replace(end, lines=output.lines, written=output.written)
    if end.signal is None and output.exception is not None:
        message = (output.message or "")[:_LONGEST]
        secondary = _is_from_torch(output.exception) and has_meaning(message, Meaning.PEER_GONE)
        return replace(end, exception=output.exception, message=message, secondary=secondary)
    return replace(end, message=output.uncaught) if end.signal == signal.SIGABRT else end


def _follow_report(end: RankEnd, report: LauncherReport, ranks: LocalRanks) -> RankEnd:
    """Return the end of the rank that a launcher has reported, instead of the launcher's own end."""
    rank = next((rank for at, rank in enumerate(ranks.by_rank) if at == report.local_rank), end.rank)
    end = replace(end, rank=rank, stepped=ranks.by_rank[rank].has_stepped())
    if report.exit_code is None and report.signal is None:
        return end
    return replace(
        end, exit_code=report.exit_code, signal=report.signal, out_of_memory=ranks.memory_kill(rank, report.signal)
    )


def _is_from_torch(exception: str) -> bool:
    """Return whether torch's collectives raise this exception.
    A program's own ConnectionRefusedError is a cause, not a lost peer.
    """
    name = exception.rpartition(".")[2]
    return name == "RuntimeError" or name.startswith("Dist")


def _left_in_files(attempt: AttemptDir, end: RankEnd) -> tuple[RankEnd | None, str | None]:
    """Return the rank's outcome, or the C++ exception in its log if it was aborted and wrote no outcome."""
    outcome = find_outcome(attempt, end.node, end.rank, end.generation)
    if outcome is not None or end.signal != signal.SIGABRT:
        return outcome, None
    error_file = attempt.error_file(end.rank, end.generation)
    return None, last_output(attempt.rank_log(end.rank), end.generation, error_file).uncaught
