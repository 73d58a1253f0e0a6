"""What Slurm's commands print, as values: pure functions."""

import calendar
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from orchestrator.scheduler.base import ENDED_STATES, JobStatus

SEPARATOR = "\x1f"
"""Ends every field: a character that no job name, reason or comment can bear by accident."""

SQUEUE_FIELDS = (
    ("JobID", 64), ("State", 32), ("Reason", 256), ("exit_code", 16), ("RestartCnt", 16), ("PriorityLong", 24),
    ("SubmitTime", 32), ("EndTime", 32), ("NodeList", 16384), ("Comment", 512), ("Name", 512),
)  # fmt: skip
SQUEUE_FORMAT = ",".join(f"{name}:{width}{SEPARATOR}" for name, width in SQUEUE_FIELDS)
SACCT_FIELDS = ("JobIDRaw", "State", "Reason", "ExitCode", "Submit", "End", "NodeList", "Comment", "JobName")
SACCT_FORMAT = ",".join(SACCT_FIELDS)

_NAMELESS = "allocation"  # what sacct shows for a job without a name
_JOB_ID = re.compile(r"\d+([_+].*)?", re.ASCII | re.DOTALL)
_NO_VALUE = frozenset({"", "(null)", "N/A", "NONE", "None", "Unknown", "None assigned", "INVALID"})


class Garbage(ValueError):
    """The text is not what the command prints; nothing may be concluded from it."""


class Ending(NamedTuple):
    """How the batch step ended: at most one of the two is not None when Slurm knows."""

    exit_code: int | None
    signal: int | None


def read_queue(text: str) -> list[JobStatus]:
    """Jobs as `squeue -h -O SQUEUE_FORMAT` lists them; raises Garbage."""
    found = []
    for row in _rows(text, len(SQUEUE_FIELDS)):
        for (name, width), value in zip(SQUEUE_FIELDS, row, strict=True):
            if name != "Name" and len(value) >= width:
                raise Garbage(f"squeue cut {name} short at {width} characters")
        job, state, reason, code, restarts, priority, submitted, end, nodes, comment, name = row
        word = plain_state(state)
        ending = wait_status(code) if word in ENDED_STATES else Ending(None, None)
        found.append(
            JobStatus(
                job_id=job, name=name, state=word, submit_time=_known(submitted), comment=_known(comment),
                nodes=expand_nodes(nodes), exit_code=ending.exit_code, signal=ending.signal, reason=_known(reason),
                restarts=int(restarts) if restarts.isdigit() else 0, end_time=epoch(end),
                held=word == "PENDING" and (priority == "0" or reason.startswith("JobHeld")), source="queue",
            )
        )  # fmt: skip
    return found


def read_accounting(text: str) -> list[JobStatus]:
    """Jobs as `sacct -X -D -n -p --delimiter SEPARATOR -o SACCT_FORMAT` lists them; raises Garbage.

    A row without a name is left out: slurmdbd has heard of the job's end before its start, and cannot tell whose it is.
    """
    found = []
    for job, state, reason, code, submitted, end, nodes, comment, name in _rows(text, len(SACCT_FIELDS)):
        if name == _NAMELESS and not _known(nodes):
            continue
        word = plain_state(state)
        ending = exit_pair(code) if word in ENDED_STATES else Ending(None, None)
        found.append(
            JobStatus(
                job_id=job, name=name, state=word, submit_time=_known(submitted), comment=_known(comment),
                nodes=expand_nodes(nodes), exit_code=ending.exit_code, signal=ending.signal, reason=_known(reason),
                end_time=epoch(end), source="accounting",
            )
        )  # fmt: skip
    return found


def join_resized(jobs: list[JobStatus]) -> list[JobStatus]:
    """One record for each job that has lost nodes on its way, bearing the time at which it was really submitted.

    Slurm closes a job's record as RESIZING when a node leaves it (--no-kill), and opens another, submitted just then.
    """
    closed: dict[tuple[str, str], JobStatus] = {}
    found = []
    for job in sorted(jobs, key=lambda job: job.submit_time):
        before = closed.pop((job.job_id, job.name), None)
        whole = job if before is None else replace(job, submit_time=before.submit_time)
        if job.state == "RESIZING":
            closed[job.job_id, job.name] = whole
        else:
            found.append(whole)
    return [*found, *closed.values()]


_DOWN = frozenset({"DOWN", "FAIL", "FAILING"})


def read_down_nodes(text: str) -> frozenset[str]:
    """Nodes that `sinfo -h -N -o "%N %T"` shows as down; the `*` of a node that does not answer is no verdict yet."""
    rows = [line.split() for line in text.splitlines() if line.strip()]
    if any(len(row) != 2 for row in rows):
        raise Garbage(f"expected a node and a state in every line, got {text[:200]!r}")
    return frozenset(node for node, state in rows if plain_state(state) in _DOWN)


def _rows(text: str, width: int) -> Iterator[list[str]]:
    """Records of `width` separator-ended fields; a newline within a name does not end a record."""
    fields = text.split(SEPARATOR)
    if fields.pop().strip() or len(fields) % width:
        raise Garbage(f"expected records of {width} fields, got {text[:200]!r}")
    for start in range(0, len(fields), width):
        row = [value.strip() for value in fields[start : start + width]]
        if not _JOB_ID.fullmatch(row[0]) or not row[1]:
            raise Garbage(f"expected a job id and a state, got {row[0][:80]!r}, {row[1][:80]!r}")
        yield row


def _known(value: str) -> str:
    return "" if value in _NO_VALUE else value


def plain_state(text: str) -> str:
    """Slurm's word alone: "CANCELLED by 0" and "CANCELLED+" are CANCELLED."""
    words = text.split()
    return words[0].rstrip("+*").upper() if words else ""


def exit_pair(text: str) -> Ending:
    """sacct's "code:signal": "0:15" is signal 15, "3:0" is exit code 3."""
    match = re.fullmatch(r"(\d+):(\d+)(?::\d+)?", text, re.ASCII)
    if match is None:
        return Ending(None, None)
    code, signal = int(match[1]), int(match[2])
    return Ending(None, signal) if signal else Ending(code, None)


def wait_status(text: str) -> Ending:
    """squeue's exit_code: a raw wait status, 768 is exit code 3, 9 is signal 9."""
    if not text.isdigit():
        return Ending(None, None)
    status = int(text)
    return Ending(None, status & 0x7F) if status & 0x7F else Ending((status >> 8) & 0xFF, None)


def epoch(text: str) -> float | None:
    """Seconds since the epoch of a time that Slurm printed under TZ=UTC; None for its words for unknown."""
    try:
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return None


def expand_nodes(text: str) -> tuple[str, ...]:
    """Names of a Slurm host list, in its order: "gpu[003-004],login" is gpu003, gpu004, login; raises Garbage."""
    if _known(text) == "":
        return ()
    from ClusterShell.NodeSet import NodeSet, NodeSetException  # heavy: only where there are nodes to name

    try:
        return tuple(NodeSet(text, resolver=_no_groups()))
    except NodeSetException as error:
        raise Garbage(f"not a host list: {text[:80]!r}") from error


def fold_nodes(names: tuple[str, ...]) -> str:
    """The shortest Slurm host list of these names."""
    from ClusterShell.NodeSet import NodeSet  # heavy: only where there are nodes to name

    return str(NodeSet.fromlist(list(names), resolver=_no_groups()))


def _no_groups() -> object:
    """Plain names only: a node group of a ClusterShell configuration must not turn one name into others."""
    from ClusterShell.NodeUtils import GroupResolver  # heavy: see above

    return GroupResolver()
