"""Reports of launchers about the rank that failed, as they print them at the end of their output. Pure."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class LauncherReport:
    """Facts about a failed rank that its launcher has printed; None: unknown."""

    local_rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    is_complete: bool = False  # the launcher has ended its ranks, and prints nothing more about the program


_REPORTS = (
    # torchrun, accelerate launch and fabric run
    re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+) \(pid: \d+\) of binary"),
    # torch.multiprocessing.spawn
    re.compile(r"-- Process (?P<rank>\d+) terminated with the following error:"),
    re.compile(r"process (?P<rank>\d+) terminated with signal (?P<signal>SIG[A-Z0-9]+)"),
    re.compile(r"process (?P<rank>\d+) terminated with exit code (?P<code>\d+)"),
    # deepspeed, which names the command of the last rank and not that of the failed one
    re.compile(r"exits with return code = (?P<code>-?\d+)"),
    # composer
    re.compile(r"Global rank \d+ \(PID \d+\) exited with code (?P<code>-?\d+)"),
    # Open MPI
    re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on signal (?P<number>\d+)"),
)
"""Patterns, one for each form of report. Most launchers print one line for the rank that failed first."""
_OWN_TRACEBACK = _REPORTS[0]
"""Report after which only the launcher's own traceback follows. Printing it and exiting can take seconds."""
_PREFIX = re.compile(r"^\[rank(\d+)\]: ?")
"""Prefix that torch puts on every line of a rank's traceback."""


def read_report(lines: Sequence[str]) -> tuple[LauncherReport, list[str]]:
    """Return what a launcher printed about the rank that failed, and the lines that the program printed."""
    for at, line in enumerate(lines):
        for pattern in _REPORTS:
            if (found := pattern.search(line)) is not None:
                is_complete = pattern is _OWN_TRACEBACK
                return replace(_read_match(found), is_complete=is_complete), list(lines[:at] if is_complete else lines)
    return LauncherReport(), list(lines)


def _read_match(found: re.Match[str]) -> LauncherReport:
    groups = found.groupdict()
    rank, code = groups.get("rank"), groups.get("code")
    number = int(groups["number"]) if groups.get("number") else None
    name = groups.get("signal")
    if name is not None and name in signal.Signals.__members__:
        number = signal.Signals[name].value
    report = LauncherReport(local_rank=None if rank is None else int(rank), signal=number)
    if code is None:
        return report
    return replace(report, signal=-int(code)) if int(code) < 0 else replace(report, exit_code=int(code))


def lines_of_rank(lines: Sequence[str], rank: int) -> list[str]:
    """Return the lines without the tracebacks of other ranks, which usually have only lost their peer."""
    prefixed = [(_PREFIX.match(line), line) for line in lines]
    return [line for found, line in prefixed if found is None or int(found[1]) == rank]
