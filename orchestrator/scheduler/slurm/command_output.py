"""Slurm commands and their parsed output. Without a usable answer, they raise `SlurmUnreachable`."""

import calendar
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from orchestrator.errors import Precondition, SlurmUnreachable
from orchestrator.scheduler.interface import ENDED_STATES, UNREADABLE, JobStatus, find_name_and_comment
from trainer.protocol.cut_text import cut

SEPARATOR = "\x1f"  # end of every field: a character that job names, reasons and comments do not contain by accident

SQUEUE_FIELDS = (
    ("JobID", 64), ("State", 32), ("Reason", 256), ("exit_code", 16), ("RestartCnt", 16), ("PriorityLong", 24),
    ("SubmitTime", 32), ("StartTime", 32), ("EndTime", 32), ("TimeLimit", 32), ("Requeue", 8), ("Partition", 256),
    ("Account", 128), ("QOS", 128), ("NodeList", 16384), ("Comment", 512), ("Command", 1024), ("STDOUT", 1024),
    ("Name", 512),
)  # fmt: skip
SEARCH_FIELDS = (
    ("JobID", "%A"), ("State", "%T"), ("ArrayTask", "%K"), ("Comment", "%k"), ("Command", "%o"), ("Name", "%j"),
)  # fmt: skip
SEARCH_FORMAT = "".join(f"{code}{SEPARATOR}" for _, code in SEARCH_FIELDS)
"""Format of short rows without padding, in which all jobs of a user are searched for orch's."""
OUTPUT_FIELDS = (("JobID", 64), ("State", 32), ("STDOUT", 1024))
OUTPUT_FORMAT = ",".join(f"{name}:{width}{SEPARATOR}" for name, width in OUTPUT_FIELDS)
SACCT_FIELDS = ("JobIDRaw", "State", "Reason", "ExitCode", "Submit", "End", "NodeList", "Comment", "JobName")
Version = tuple[int, ...]
_VERSION = re.compile(r"^slurm\S* (\d+)\.(\d+)(?:\.(\d+))?", re.ASCII)


def read_version(text: str) -> Version:
    """Return the version that `scontrol --version` prints, such as (25, 11, 3); empty if it prints something else."""
    found = _VERSION.match(text)
    return tuple(int(part or 0) for part in found.groups()) if found else ()


def queue_fields(version: Version) -> tuple[tuple[str, int], ...]:
    """Return squeue's columns with their widths; older versions refuse a format with an unknown column."""
    # Since 26.05, any node of the list may be the first one of the job.
    return (
        (("JobID", 64), ("Sluid", 32), ("BatchHost", 256), *SQUEUE_FIELDS[1:]) if version >= (25, 11) else SQUEUE_FIELDS
    )


def accounting_fields(version: Version) -> tuple[str, ...]:
    """Return sacct's columns."""
    return ("JobIDRaw", "SLUID", "FailedNode", *SACCT_FIELDS[1:]) if version >= (24, 11) else SACCT_FIELDS


def queue_format(version: Version) -> str:
    return ",".join(f"{name}:{width}{SEPARATOR}" for name, width in queue_fields(version))


SQUEUE_FORMAT, SACCT_FORMAT = queue_format(()), ",".join(accounting_fields(()))
"""Formats that every version accepts."""

_SETTINGS = {"time limit": "TimeLimit", "requeue": "Requeue", "partition": "Partition", "account": "Account",
             "qos": "QOS"}  # fmt: skip
"""Slurm's names of settings that a site may change after the request, keyed by common name."""

MOST_NODES = 100_000  # maximum number of names that a host list may expand to
_ITEM = re.compile(r"(?:[^,\[]|\[[^\]]*\]?)+")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"(\d+)-(\d+)(?:/(\d+))?", re.ASCII)
_LONGEST_NUMBER = 18  # maximum number of digits; a range with more exceeds MOST_NODES or is unrealistic

_NAMELESS = "allocation"  # sacct's name for a job that has none
_CLUSTER = re.compile(r"^CLUSTER: \S+ *\n", re.MULTILINE)
"""Line before each cluster's rows when SLURM_CLUSTERS names clusters, even without a header."""
_ROW_START = re.compile(rf"^ *(\d[\d_+.,%\[\]-]*) *{SEPARATOR}", re.ASCII | re.MULTILINE)
_BLANK = " \n"  # Python counts the separator as whitespace, too
_WORD = re.compile(r"[A-Z_]+", re.ASCII)
_EXIT_PAIR = re.compile(r"(\d+):(\d+)(?::\d+)?", re.ASCII)
_CANCELLED_BY = re.compile(r"CANCELLED by (\d+)", re.ASCII)
_NOTHING_EXITED = frozenset({"NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED"})
"""Ended states in which Slurm saw no process exit."""
_NO_VALUE = frozenset({"", "(null)", "N/A", "n/a", "NONE", "None", "Unknown", "None assigned", "INVALID"})

Mine = Callable[[JobStatus], bool]
"""Predicate on a row's id, name, comment and files only; rows that fail it are not parsed further."""


class UnreadableField(ValueError):
    """The text is not valid output of the command; nothing may be concluded from it."""


class TooManyNodes(UnreadableField):
    """Host list with more names than any cluster has. Expanding it would take minutes and exhaust the memory."""


class Listing(NamedTuple):
    """Jobs in an answer. Unless it is `whole`, a missing job may still exist."""

    jobs: list[JobStatus]
    whole: bool


def read_queue(text: str, mine: Mine = lambda job: True, version: Version = ()) -> Listing:
    """Return jobs listed by `squeue -h -O` with `queue_format` that satisfy `mine`. Raises UnreadableField."""
    return _read(text, tuple(name for name, _ in queue_fields(version)), _parse_queue_row, mine)


def read_search(text: str) -> Listing:
    """Return jobs listed by `squeue -h -o SEARCH_FORMAT`, except array tasks, which orch never submits.

    Their standard output is missing. Raises UnreadableField.
    """
    return _read(text, tuple(name for name, _ in SEARCH_FIELDS), _parse_search_row, lambda job: True)


def read_outputs(text: str, mine: Mine) -> Listing:
    """Return jobs listed by `squeue -h -O OUTPUT_FORMAT` whose output path satisfies `mine`. Raises UnreadableField."""
    return _read(text, tuple(name for name, _ in OUTPUT_FIELDS), _parse_output_row, mine)


def read_accounting(text: str, mine: Mine = lambda job: True, version: Version = ()) -> Listing:
    """Return jobs listed by `sacct -X -D -n -p --delimiter SEPARATOR` with `accounting_fields` that satisfy `mine`.

    Two kinds of rows are left out: rows without a name, which appear when slurmdbd receives a job's end before its
    start, and rows of jobs that slurmctld has lost. Raises UnreadableField.
    """
    return _read(text, accounting_fields(version), _parse_accounting_row, mine)


Row = dict[str, str]


def _read(text: str, names: tuple[str, ...], status: Callable[[Row], JobStatus | None], mine: Mine) -> Listing:
    """Parse each row separately: an unreadable row is UNREADABLE if it is orch's, and otherwise ignored."""
    text = _CLUSTER.sub("", text)
    found: list[JobStatus] = []
    readable, whole = 0, not text or text.endswith("\n")
    for job_id, piece in _pieces(text):
        fields = piece.split(SEPARATOR)
        if not job_id or len(fields) != len(names) + 1:
            # A row begins with its id; without one, the lost row could belong to any job.
            whole = whole and (bool(job_id) or SEPARATOR not in piece)
            name, comment = find_name_and_comment(piece)
            bare = JobStatus(job_id=job_id, name=name, comment=comment, state=UNREADABLE, reason="its row is damaged")
            found += [bare] if mine(bare) else []
            continue
        readable += 1
        row = {name: value.strip(_BLANK) for name, value in zip(names, fields[:-1], strict=True)}
        found += _own(row, job_id, status, mine)
    if text.strip(_BLANK) and not readable:
        raise UnreadableField(f"expected records of {len(names)} fields, got {text[:200]!r}")
    return Listing(found, whole)


def _own(row: Row, job_id: str, status: Callable[[Row], JobStatus | None], mine: Mine) -> list[JobStatus]:
    name = row.get("Name", row.get("JobName", ""))
    submitted = _known(row.get("SubmitTime", row.get("Submit", "")))
    bare = JobStatus(
        job_id=job_id, name=name, state=UNREADABLE, submit_time=submitted, comment=_known(row.get("Comment", "")),
        files=_files(row),
    )  # fmt: skip
    if not mine(bare):
        return []
    if _WORD.fullmatch(plain_state(row["State"])) is None:
        return [replace(bare, reason=f"{row['State'][:80]!r} is not a job state")]
    job = status(row)
    return [] if job is None else [job]


def _pieces(text: str) -> Iterator[tuple[str, str]]:
    """Yield the text split at each job id that begins a line and ends a field, with "" for text before the first."""
    starts = list(_ROW_START.finditer(text))
    before = text[: starts[0].start()] if starts else text
    if before.strip(_BLANK):
        yield "", before
    for index, start in enumerate(starts):
        end = starts[index + 1].start() if index + 1 < len(starts) else len(text)
        yield start[1], text[start.start() : end]


def _parse_queue_row(row: Row) -> JobStatus:
    word = plain_state(row["State"])
    code, signal = read_ending(word, row["exit_code"])
    held = row["PriorityLong"] == "0" or row["Reason"].startswith("JobHeld")
    return JobStatus(
        job_id=row["JobID"], name=row["Name"], state=word, submit_time=_known(row["SubmitTime"]),
        comment=_known(row["Comment"]), nodes=_nodes(row), exit_code=code, signal=signal,
        reason=_known(row["Reason"]), restarts=int(row["RestartCnt"]) if row["RestartCnt"].isdigit() else 0,
        start_time=epoch(row["StartTime"]), end_time=epoch(row["EndTime"]), held=word == "PENDING" and held,
        source="queue", files=_files(row), unlaunched=_is_unlaunched(word, row, code, signal),
        settings={name: row[field] for name, field in _SETTINGS.items() if _known(row[field])},
        sluid=_known(row.get("Sluid", "")), batch_node=_known(row.get("BatchHost", "")) or _only_node(row, "Sluid"),
    )  # fmt: skip


def _parse_search_row(row: Row) -> JobStatus | None:
    if _known(row["ArrayTask"]):
        return None
    word, comment = plain_state(row["State"]), _known(row["Comment"])
    return JobStatus(job_id=row["JobID"], name=row["Name"], state=word, comment=comment, files=_files(row))


def _parse_output_row(row: Row) -> JobStatus | None:
    return JobStatus(job_id=row["JobID"], name="", state=plain_state(row["State"]), files=_files(row))


def _parse_accounting_row(row: Row) -> JobStatus | None:
    if row["JobName"] == _NAMELESS and not _known(row["NodeList"]):
        return None
    word = plain_state(row["State"])
    # A job that failed and was requeued for it; after `scontrol requeue` there is no exit code.
    if word == "REQUEUED" and "SLUID" in row and row["ExitCode"] != "0:0":
        word = "FAILED"
    # A slurmctld that lost its state closes job records as CANCELLED. A user's scancel is "CANCELLED by UID".
    if row["State"] == "CANCELLED":
        return None
    code, signal = read_ending(word, row["ExitCode"])
    return JobStatus(
        job_id=row["JobIDRaw"], name=row["JobName"], state=word, submit_time=_known(row["Submit"]),
        comment=_known(row["Comment"]), nodes=_nodes(row), exit_code=code, signal=signal,
        reason=_known(row["Reason"]), end_time=epoch(row["End"]), source="accounting",
        unlaunched=_is_unlaunched(word, row, code, signal),
        cancelled_by=int(by[1]) if (by := _CANCELLED_BY.fullmatch(row["State"])) else None,
        sluid=_known(row.get("SLUID", "")), nodes_down=_failed_nodes(row), batch_node=_only_node(row, "SLUID"),
    )  # fmt: skip


def _is_unlaunched(state: str, row: Row, code: int | None, signal: int | None) -> bool:
    """Return whether the job had nodes and its script got no signal; accounting never records that signal."""
    return state == "CANCELLED" and bool(_known(row["NodeList"])) and signal is None and not code


def _files(row: Row) -> tuple[str, ...]:
    return tuple(path for name in ("Command", "STDOUT") if (path := _known(row.get(name, ""))))


def _nodes(row: Row) -> tuple[str, ...]:
    """Return the job's nodes, or none if the list was truncated or is unreadable; the job's state is known regardless.

    A partial list would be worse than none: it would mean that the other nodes were removed from the job.
    """
    text, width = row["NodeList"], dict(SQUEUE_FIELDS)["NodeList"]
    try:
        return () if "Name" in row and len(text) >= width else expand_nodes(text)
    except UnreadableField:
        return ()


def _only_node(row: Row, newer: str) -> str:
    """Return the job's first node if that starts its script: the only one, or by a Slurm without the column `newer`."""
    nodes = _nodes(row)
    return nodes[0] if len(nodes) == 1 or (nodes and newer not in row) else ""


def _failed_nodes(row: Row) -> tuple[str, ...]:
    """Return the nodes whose failure ended the job."""
    try:
        return expand_nodes(row.get("FailedNode", ""))
    except UnreadableField:
        return ()


def join_resized(jobs: list[JobStatus]) -> list[JobStatus]:
    """Return one record for each job that lost nodes while it ran, with its original submit time.

    Slurm closes a job's record as RESIZING when a node leaves it (--no-kill), and opens another with a new submit time.
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


def ended_jobs(jobs: list[JobStatus]) -> list[JobStatus]:
    """Return the ended jobs among accounting rows: the newest incarnation of each job, by its submit time.

    Only the queue proves that a job lives. A requeued job leaves a REQUEUED row forever, and a job lost by slurmctld
    leaves a row that stays PENDING or RUNNING. Earlier incarnations with a SLUID are kept in `earlier`.
    """
    found: dict[tuple[str, str], list[JobStatus]] = {}
    for job in sorted(join_resized(jobs), key=lambda job: job.submit_time):
        found.setdefault((job.job_id, job.name), []).append(job)
    return [
        replace(last, earlier=ended_incarnations(before))
        for *before, last in found.values()
        if last.state in ENDED_STATES or last.state == UNREADABLE
    ]


def ended_incarnations(jobs: Iterable[JobStatus]) -> tuple[JobStatus, ...]:
    """Return the rows that accounting closed for a requeued job and that a SLUID identifies."""
    return tuple(job for job in jobs if job.sluid and job.state in ENDED_STATES)


DOWN = frozenset({"DOWN", "FAIL", "FAILING"})
OUT_OF_SERVICE = DOWN | {"DRAINED", "DRAINING", "INVAL", "MAINT", "REBOOT"}
"""INVAL: the node came back with fewer resources than configured, for example without one of its GPUs."""
_NODE_MARKS = "+*~#!%$@^-"
"""Suffixes of a node state: not responding (*), power saving (~#!%), in a maintenance reservation ($), about to
reboot (@^), or planned for a job (-)."""


def read_node_states(text: str, asked: frozenset[str], wanted: frozenset[str]) -> frozenset[str]:
    """Return nodes in `asked` that `sinfo -h -N -o "%N %T"` shows in a wanted state.

    The `*` of a node that does not respond proves nothing. A node without a row has left the cluster. Raises
    UnreadableField if a node is missing and some row is malformed.
    """
    rows = [line.split() for line in text.splitlines() if line.strip()]
    states = {row[0]: row[1] for row in rows if len(row) == 2 and row[0] in asked}
    if set(states) != asked and any(len(row) != 2 for row in rows):
        raise UnreadableField(f"expected a node and a state in every line, got {text[:200]!r}")
    return frozenset(node for node, state in states.items() if plain_state(state.rstrip(_NODE_MARKS)) in wanted)


def _known(value: str) -> str:
    return "" if value in _NO_VALUE else value


def plain_state(text: str) -> str:
    """Return the bare state: "CANCELLED by 0" and "CANCELLED+" are CANCELLED."""
    words = text.split()
    return words[0].rstrip("+*").upper() if words else ""


def read_ending(state: str, text: str) -> tuple[int | None, int | None]:
    """Read the exit code, or else the signal, of a job in this state from squeue's `exit_code` or sacct's `ExitCode`.

    The text is `code:signal` (`3:0`, `0:9`) or, from squeue before 24.11, a raw wait status (768, 9); other text is
    unknown. After a node failure, Slurm writes a number of its own. sacct before 25.11 subtracts 128 from codes of 128
    and more, so FAILED with code 0 is unknown.
    """
    if state not in ENDED_STATES or state in _NOTHING_EXITED:
        return None, None
    if text.isascii() and text.isdigit():
        status = int(text)
        code, signal = (status >> 8) & 0xFF, status & 0x7F
    elif (match := _EXIT_PAIR.fullmatch(text)) is not None:
        code, signal = int(match[1]), int(match[2])
    else:
        return None, None
    if signal:
        return None, signal
    return None if state == "FAILED" and code == 0 else code, None


def epoch(text: str) -> float | None:
    """Return a time that Slurm printed under TZ=UTC as seconds since the epoch, or None if it is unknown."""
    try:
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return None


def expand_nodes(text: str) -> tuple[str, ...]:
    """Return the names in a Slurm host list, in its order: "gpu[003-004],login" is gpu003, gpu004, login.

    Raises UnreadableField, and TooManyNodes before any expansion.
    """
    if _known(text) == "":
        return ()
    if sum(map(_count_names, _ITEM.findall(text))) > MOST_NODES:
        raise TooManyNodes(f"more than {MOST_NODES} nodes: {text[:80]!r}")
    from ClusterShell.NodeSet import NodeSet, NodeSetException  # heavy: only needed if there are nodes to name

    try:
        return tuple(NodeSet(text, resolver=_no_groups()))
    except NodeSetException as error:
        raise UnreadableField(f"not a host list: {text[:80]!r}") from error


def _count_names(item: str) -> int:
    """Return how many names an item of a host list expands to: 12 for "rack[1-3]n[1-4]"."""
    return math.prod(sum(map(_count_numbers, ranges.split(","))) for ranges in _BRACKETS.findall(item))


def _count_numbers(part: str) -> int:
    """Return how many numbers "3", "1-9" or "1-9/2" expands to."""
    found = _RANGE.fullmatch(part.strip())
    if found is None:
        return 1
    if max(map(len, found.groups(""))) > _LONGEST_NUMBER:
        return MOST_NODES + 1
    first, last, step = (int(number) for number in found.groups("1"))
    return max(0, last - first) // max(1, step) + 1


def fold_nodes(names: tuple[str, ...]) -> str:
    """Return the shortest Slurm host list of these names."""
    from ClusterShell.NodeSet import NodeSet  # heavy: only needed if there are nodes to name

    return str(NodeSet.fromlist(list(names), resolver=_no_groups()))


def _no_groups() -> object:
    """Return a resolver without groups: a node group configured for ClusterShell must not expand a name."""
    from ClusterShell.NodeUtils import GroupResolver  # heavy: see above

    return GroupResolver()


TIMEOUT_S = 30.0

NO_CONTACT = (
    "unable to contact slurm controller", "unable to contact the slurm controller", "socket timed out",
    "connection refused", "zero bytes were transmitted or received", "connection timed out", "protocol authentication",
    "problem talking to the database", "connection reset", "communication connection failure",
    "message receive failure", "slurm controller is in standby", "unable to establish", "lost connection",
    "slurm backup controller", "could not establish a configuration source",
)  # fmt: skip
"""Messages that Slurm's clients print when they get no answer."""

_ASK_AGAIN = "nothing was assumed; `scontrol ping` shows when Slurm is back"
_CONFIGURE = "work on a login node of the cluster, or `export SLURM_CONF=FILE`"
_OWN_OPTIONS = ("SQUEUE_", "SACCT_", "SCANCEL_", "SBATCH_", "SINFO_", "SCONTROL_")


def query_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for queries: no options from a user's shell, times in UTC, messages in English."""
    kept = {key: value for key, value in environ.items() if not key.startswith(_OWN_OPTIONS)}
    return {**kept, "TZ": "UTC", "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}


def require(program: str) -> None:
    """Raise Precondition if this machine has no Slurm client."""
    if shutil.which(program) is None:
        raise Precondition(
            f"{program} is not on PATH: there is no Slurm on this machine",
            hint="work on a login node of the cluster, or use cluster.kind=local",
        )


def require_configuration(environ: Mapping[str, str]) -> None:
    """Raise SlurmUnreachable if SLURM_CONF names a missing file: every command would wait a minute for it."""
    named = environ.get("SLURM_CONF", "")
    if named and not os.path.isfile(named):
        what = f"SLURM_CONF={named}: no such file, so no Slurm command works"
        raise SlurmUnreachable(what, hint="unset SLURM_CONF, or name the file with Slurm's configuration")


def run_command(
    command: list[str], timeout: float = TIMEOUT_S, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to completion. Raises SlurmUnreachable if it is missing, times out or gets no answer.

    `environ` replaces this process's environment.
    """
    environ = os.environ if environ is None else environ
    if shutil.which(command[0], path=environ.get("PATH", os.defpath)) is None:
        hint = "load Slurm's module, or work on a login node of the cluster"
        raise SlurmUnreachable(f"{command[0]} is not on PATH: cannot query Slurm", hint=hint)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False,
            stdin=subprocess.DEVNULL, env=query_environment(environ),
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SlurmUnreachable(
            f"{command[0]} gave no answer within {timeout:.0f} s",
            hint="nothing was assumed and nothing was changed; try again later",
        ) from error
    if done.returncode != 0 and no_contact(done.stderr):
        raise unreachable(command[0], done.stderr)
    return done


def no_contact(text: str) -> bool:
    """Return whether this is a Slurm client's message about a missing answer."""
    lowered = text.lower()
    return any(words in lowered for words in NO_CONTACT)


_CAUSES = (
    ("unable to contact slurm controller", "slurmctld does not answer", _ASK_AGAIN),
    ("could not establish a configuration source", "it finds no slurm.conf on this host", _CONFIGURE),
)
"""Part of a client's message, its meaning, and the hint; the first one found decides."""


def unreachable(program: str, text: str) -> SlurmUnreachable:
    """Return the error for a command without a usable answer, with its message."""
    lowered = text.lower()
    known = next(((why, hint) for part, why, hint in _CAUSES if part in lowered), None)
    why, hint = known or (cut(" ".join(text.split()), 300) or "no message", _ASK_AGAIN)
    return SlurmUnreachable(f"{program} got no usable answer from Slurm: {why}", hint=hint)
