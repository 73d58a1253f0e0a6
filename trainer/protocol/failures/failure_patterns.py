"""Table of known sentences in errors and logs, with their meanings. Each reader draws its own conclusions.

A match only shows that a sentence was printed. It does not show which node is bad, and it does not decide the verdict.
"""

import re
from enum import Flag, StrEnum, auto
from functools import cache
from typing import NamedTuple

VARYING = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)
"""Parts that vary between messages for the same error."""


class Meaning(StrEnum):
    """Meaning of a sentence."""

    STORAGE = "storage"  # a disk is full, read-only or broken
    MEMORY = "memory"  # host memory is exhausted
    GPU_MEMORY = "gpu_memory"
    VARIABLE = "variable"  # an environment variable that torch, gloo or NCCL cannot use
    HARDWARE = "hardware"  # a GPU of this node is broken or unavailable
    PEER_GONE = "peer_gone"  # as worded by torch's own collectives; in other code, such sentences can be the cause
    NO_RENDEZVOUS = "no_rendezvous"  # ranks did not meet
    MISMATCH = "mismatch"  # ranks called different collectives
    OUTSIDE = "outside"  # problems outside the program: the network, a file server, the end of another process
    NO_PROCESSES = "no_processes"  # the node cannot start more threads or processes
    UNREADABLE = "unreadable"  # caused only by the bytes of a weights or state file
    CUT_OFF = "cut_off"  # raised when a truncated file is read, but also by a truncated server response
    BROKEN = "broken"  # caused by the bytes of any file, or by something else
    MISFIT = "misfit"  # raised for an intact weights or state file that does not fit the program
    INSTALLATION = "installation"  # parts of torch or of orch are missing from disk
    MISSING = "missing"  # a missing file
    LOADING = "loading"  # code that loads a checkpoint
    TRAINING_DATA = "training_data"  # code of a data loader
    NO_SECRETS = "no_secrets"  # an agent cannot read the run's secrets
    TIME_LIMIT = "time_limit"
    PREEMPTED = "preempted"
    NODE_LOST = "node_lost"
    REQUEUED = "requeued"
    NOT_LAUNCHED = "not_launched"  # the program of a task was not found, or a node could not start it
    TASK_KILLED = "task_killed"
    CANCELLED = "cancelled"
    TEARDOWN = "teardown"  # printed during teardown


class TextSource(Flag):
    """Kinds of text in which a sentence has the given meaning."""

    ERROR = auto()  # the text of an exception, or the last lines of a program's output
    JOB_LOG = auto()  # output of agents, srun and Slurm


class FailurePattern(NamedTuple):
    """A row of the table."""

    meaning: Meaning
    places: TextSource
    pattern: str


_ERROR, _LOG, _BOTH = TextSource.ERROR, TextSource.JOB_LOG, TextSource.ERROR | TextSource.JOB_LOG
_SOCKET = r"client socket has (timed out|failed to connect)"

TABLE = tuple(
    FailurePattern(*row)
    for row in (
        # Gaps are bounded (`.{0,500}`, never `.*`) because a log may be one endless line. In a job's log the first
        # matching row counts: Slurm's cancel message names its reason in the same line.
        (Meaning.NO_SECRETS, _LOG, r"refuses to train: cannot read the run's secrets"),
        (Meaning.TIME_LIMIT, _LOG, r"DUE TO TIME LIMIT"),
        (Meaning.PREEMPTED, _LOG, r"DUE TO PREEMPTION"),
        (Meaning.NODE_LOST, _LOG, r"DUE TO NODE FAILURE|srun: error: Node failure on"),
        (Meaning.NODE_LOST, _LOG, r"UNCORRECTABLE MEMORY ERROR AT"),
        (Meaning.NODE_LOST, _LOG, r"STEPD TERMINATED ON .{0,500} DUE TO JOB NOT ENDING WITH SIGNALS"),
        (Meaning.STORAGE, _BOTH, r"No space left on device|\[Errno 28\](?! inotify)"),
        # torch's archive writer does not name the errno on a full disk
        (Meaning.STORAGE, _BOTH, r"inline_container\.cc.{0,500}unexpected pos"),
        (Meaning.STORAGE, _BOTH, r"Disk quota exceeded|\[Errno 122\]"),
        (Meaning.STORAGE, _BOTH, r"Read-only file system|\[Errno 30\]"),
        (Meaning.STORAGE, _BOTH, r"Input/output error|\[Errno 5\]"),
        (Meaning.STORAGE, _BOTH, r"File too large|\[Errno 27\]|File size limit exceeded"),
        # In a log, the lowercase words come from orch itself, for a save that failed while training continued.
        (Meaning.STORAGE, _ERROR, r"(?i:no space left on device|disk quota exceeded)"),
        (Meaning.STORAGE, _ERROR, r"(?i:read-only file system|input/output error)"),
        # The log belongs to a finished job. A program may still reopen its files, so its error counts as external.
        (Meaning.STORAGE, _LOG, r"Stale file handle|\[Errno 116\]"),
        (Meaning.OUTSIDE, _ERROR, r"Stale file handle"),
        (Meaning.NOT_LAUNCHED, _LOG, r"execve\(\): .{0,1000}(No such file or directory|Permission denied)"),
        (Meaning.NOT_LAUNCHED, _LOG, r"No module named '?(trainer|orchestrator|checkpointing|submitit)"),
        # The last four are from Apptainer, Podman, Charliecloud and chroot.
        (Meaning.NOT_LAUNCHED, _LOG, r"slurmstepd: error: pyxis: "),
        (Meaning.NOT_LAUNCHED, _LOG, r"^FATAL: {2,}"),
        (Meaning.NOT_LAUNCHED, _LOG, r"executable file .{0,300}not found in \$PATH"),
        (Meaning.NOT_LAUNCHED, _LOG, r"can't execve\(2\): .{0,500}No such file or directory"),
        (Meaning.NOT_LAUNCHED, _LOG, r"chroot: failed to run command .{0,500}No such file or directory"),
        (Meaning.INSTALLATION, _LOG, r"^orch-agent: refuses to start: .{0,500} is Python [\d.]+, and orch needs "),
        # A revoked credential belongs to a job that was cancelled in the meantime.
        (Meaning.NOT_LAUNCHED, _LOG,
         r"Task launch for \S{1,100} failed on node \S{1,300}: (?!Job credential revoked)"),
        (Meaning.NOT_LAUNCHED, _LOG, r"^Error running slurm prolog: "),
        (Meaning.NOT_LAUNCHED, _LOG, r"could not find submitted jobs|Could not find job pickle"),
        (Meaning.MEMORY, _LOG, r"[Dd]etected \d+ oom[-_]kill event"),
        (Meaning.MEMORY, _LOG, r"[Oo]ut of memory: Killed process"),
        (Meaning.MEMORY, _LOG, r"srun: error: \S+: tasks? [\d,-]+: Out Of Memory"),
        (Meaning.TASK_KILLED, _LOG,
         r"srun: error: \S+: tasks? [\d,-]+: (Killed|Segmentation fault|Bus error|Aborted)"),
        # The kernel's messages are above; these are raised by Python and torch when the kernel does not kill the
        # process.
        (Meaning.MEMORY, _ERROR, r"^[\w.]*MemoryError\b|Caught \w*MemoryError\b"),
        (Meaning.MEMORY, _ERROR, r"\[Errno 12\]|Cannot allocate memory"),
        # /dev/shm is memory, not disk. These are torch's names for its files in /dev/shm.
        (Meaning.MEMORY, _ERROR, r"unable to (write to|allocate shared memory.{0,20}for) file </torch_"),
        (Meaning.MEMORY, _ERROR, r"DefaultCPUAllocator: (can't allocate|not enough) memory"),
        (Meaning.GPU_MEMORY, _ERROR, r"^OutOfMemoryError\b|CUDA out of memory|CUDA error: out of memory"),
        (Meaning.GPU_MEMORY, _ERROR, r"CUBLAS_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED: Out of memory"),
        (Meaning.HARDWARE, _ERROR, r"(?i:uncorrectable (ECC|NVLink) error|fallen off the bus|GPU is lost)"),
        (Meaning.HARDWARE, _ERROR, r"(?i:hardware stack error|no CUDA-capable device is detected)"),
        (Meaning.HARDWARE, _ERROR, r"(?i:CUDA-capable device\(s\) is/are busy or unavailable)"),
        (Meaning.HARDWARE, _ERROR, r"(?i:system not yet initialized|system has unsupported display driver)"),
        (Meaning.VARIABLE, _ERROR, r"Invalid value for environment variable|Unable to find (address|interface) for: "),
        (Meaning.VARIABLE, _ERROR, r"no socket interface found|The value of TORCH_\w+ must be"),
        (Meaning.PEER_GONE, _BOTH, r"Connection (reset|closed) by (remote )?peer|remote process exited"),
        (Meaning.PEER_GONE, _ERROR, r"Broken pipe|Read error|Write error|Connection was likely closed"),
        (Meaning.PEER_GONE, _ERROR, r"Application timeout caused pair closure|Connection refused|Socket Timeout"),
        (Meaning.PEER_GONE, _ERROR, r"Timed out waiting \d+ms for (recv|send)|wait timeout after \d+ms"),
        (Meaning.PEER_GONE, _ERROR, r"Failed to recv|failed to (recv|send)|socketProgress|connectFullMesh failed"),
        (Meaning.PEER_GONE, _ERROR, r"ncclRemoteError|ncclSystemError|NCCL communicator was aborted"),
        (Meaning.PEER_GONE, _ERROR, r"Some NCCL operations have failed or timed out"),
        (Meaning.PEER_GONE, _ERROR, rf"{_SOCKET}|waiting for clients"),
        # Also printed for a lost peer. They mean a failed rendezvous only if no torch collective raised them.
        (Meaning.NO_RENDEZVOUS, _BOTH, _SOCKET),
        (Meaning.NO_RENDEZVOUS, _LOG, r"Timed out after \d+ seconds waiting for clients"),
        (Meaning.NO_RENDEZVOUS, _ERROR, r"DistNetworkError|DistStoreError|Address already in use|clients joined"),
        (Meaning.NO_RENDEZVOUS, _ERROR, r"connectFullMesh|Timed out waiting \d+ms"),
        # printed by gloo before it aborts the process, and by torch with TORCH_DISTRIBUTED_DEBUG=DETAIL
        (Meaning.MISMATCH, _ERROR, r"Is there a distributed collective mismatch"),
        (Meaning.MISMATCH, _ERROR, r"Detected mismatch between collectives on ranks"),
        (Meaning.OUTSIDE, _ERROR, r"name resolution|Name or service not known|Transport endpoint is not connected"),
        (Meaning.OUTSIDE, _ERROR, r"Connection (timed out|refused)|Network is unreachable|No route to host"),
        (Meaning.OUTSIDE, _ERROR, r"Failed to resolve|Max retries exceeded|Remote end closed|Connection reset"),
        (Meaning.OUTSIDE, _ERROR, r"(?i:connect(ion)?|read) ?time(d out|out)|UNEXPECTED_EOF_WHILE_READING"),
        (Meaning.OUTSIDE, _ERROR, r"\b(429 Client|50[0234] Server) Error\b|HTTP Error (429|50[0234])\b"),
        (Meaning.OUTSIDE, _ERROR, r"Too Many Requests|Bad Gateway|Service (Temporarily )?Unavailable"),
        (Meaning.OUTSIDE, _ERROR, r"DataLoader worker .{0,200}(killed|exited unexpectedly)"),
        # Network file systems: a client evicted by Lustre, CIFS, FUSE, an expired Kerberos or AFS key
        (Meaning.OUTSIDE, _ERROR, r"\[Errno (6[47]|7[01]|10[0-478]|11[0-36]|12[16-9])\]"),
        (Meaning.NO_PROCESSES, _ERROR, r"can't start new thread|Resource temporarily unavailable|\[Errno 11\]"),
        (Meaning.NO_PROCESSES, _ERROR, r"pthread_create.{0,40} failed|Thread creation failed"),
        (Meaning.UNREADABLE, _ERROR, r"SafetensorError|deserializing header|central directory"),
        # except when the system fails to open a file or allocate memory
        (Meaning.UNREADABLE, _ERROR, r"PytorchStreamReader(?!.{0,200}: (file \w+|allocation) failed)"),
        (Meaning.UNREADABLE, _ERROR, r"UnpicklingError|invalid load key|unexpected EOF|BadZipFile"),
        (Meaning.UNREADABLE, _ERROR, r"load(ing|ed) state[_ ]dict|storage has wrong byte size"),
        (Meaning.CUT_OFF, _ERROR, r"EOFError|JSONDecodeError"),
        (Meaning.BROKEN, _ERROR, r"(?i:corrupt|truncated|damaged|\bincomplete\b|malformed)"),
        (Meaning.BROKEN, _ERROR, r"(?i:checksum|\bcrc|\bdigest\b|\bmagic\b|unexpected end|end of file|ended before)"),
        (Meaning.BROKEN, _ERROR, r"UnicodeDecodeError|DataLossError|while decompressing|gzipped|requires a buffer of"),
        (Meaning.BROKEN, _ERROR, r"(?i:(size|shape) mismatch|(missing|unexpected) key)"),
        (Meaning.BROKEN, _ERROR, r"\[Errno (22|74|117)\]"),
        (Meaning.MISFIT, _ERROR, r"load(ing|ed) state[_ ]dict|(?i:(size|shape) mismatch|(missing|unexpected) key)"),
        (Meaning.MISFIT, _ERROR, r"Weights only load failed\. This file can still be loaded|Unsupported global"),
        (Meaning.INSTALLATION, _ERROR, r"; part of the installation is missing \(environment "),
        (Meaning.MISSING, _ERROR, r"No such file or directory|no file named|Can't find a valid checkpoint"),
        (Meaning.LOADING, _ERROR, r"torch\.load\(|load_state_dict\(|load_file\(|load_(from_)?checkpoint|\bdcp\.load\("),
        (Meaning.LOADING, _ERROR, r"torch/serialization\.py\", line \d+, in \w*load"),
        (Meaning.TRAINING_DATA, _ERROR, r"torch/utils/data/|in DataLoader worker"),
        (Meaning.REQUEUED, _LOG, r"DUE TO JOB REQUEUE"),
        (Meaning.CANCELLED, _LOG, r"CANCELLED AT .{0,500} \*\*\*$"),
        (Meaning.TEARDOWN, _LOG, r"srun: (Job step aborted|forcing job termination|Force Terminated)"),
        (Meaning.TEARDOWN, _LOG, r"srun: error: \S+: tasks? [\d,-]+: (Terminated|Exited with exit code)"),
    )
)  # fmt: skip


def has_meaning(text: str, *meanings: Meaning) -> bool:
    """Return whether `text`, an error or the last lines of a program's output, has one of these meanings."""
    return any(pattern.search(text) for pattern in _of_errors(meanings))


def log_line_meaning(line: str) -> Meaning | None:
    """Return the meaning of a line in a job's log."""
    return next((meaning for meaning, pattern in _of_job_logs() if pattern.search(line)), None)


@cache
def _of_errors(meanings: tuple[Meaning, ...]) -> list[re.Pattern[str]]:
    return [re.compile(row.pattern) for row in TABLE if row.meaning in meanings and TextSource.ERROR in row.places]


@cache
def _of_job_logs() -> list[tuple[Meaning, re.Pattern[str]]]:
    return [(row.meaning, re.compile(row.pattern)) for row in TABLE if TextSource.JOB_LOG in row.places]
