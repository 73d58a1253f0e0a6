"""Meanings of sbatch's refusals and of Slurm's pending reasons. Pure.

Sources of refusals, in Slurm's tree: its table of errors (src/common/slurm_errno.c), the errors that sbatch retries
(src/sbatch/sbatch.c), limits that slurmctld prints on a separate line (src/common/job_state_reason.c), configless
start-up (src/common/read_config.c).

Sources of reasons: their names in Slurm's tree (src/common/job_state_reason.c) and its manual (squeue, JOB REASON
CODES).
"""

import re
from dataclasses import dataclass
from enum import Enum, auto

from orchestrator.errors import Retryable, SubmitAmbiguous, SubmitRejected
from orchestrator.scheduler.interface import Resources
from orchestrator.scheduler.slurm.command_output import no_contact
from orchestrator.scheduler.slurm.node_capacity import asked_words
from trainer.protocol.cut_text import cut


@dataclass(frozen=True)
class RefusalRule:
    """A table row. `words` are patterns for sbatch's output, `hint` is advice, and `change` is the key to change."""

    retryable: Retryable
    hint: str
    words: tuple[str, ...]
    change: str = ""


_SITE = "only Slurm's administrators can end this; see `scontrol ping`, `sinfo -s` and `scontrol show reservation`"
_LIMIT = "this clears when your jobs, or others in your account, end: `squeue --me`, `sacctmgr show qos`"
_PER_JOB = "request less (cluster.time, cluster.nodes, cluster.gpus_per_node), or choose another cluster.qos"
_ACCOUNT = "cluster.account and cluster.qos must be open to you on this partition: `sacctmgr show assoc user=$USER`"
_PARTITION = "`sinfo -s` lists partitions"
SIZE = "`sinfo -Nel` shows what nodes have: change cluster.nodes, cpus_per_task, mem, gpus_per_node or constraint"
GRES = "`sinfo -o '%N %G'` shows what nodes have besides cores and memory"
_OPTION = "change the `cluster` part of the configuration; `orch submit --print-sbatch` shows the script"

REFUSALS = (
    # Limits: slurmctld prints the limit's name on a line before the general message.
    RefusalRule(Retryable.NEVER, _PER_JOB, (r"(QOS|Assoc)MaxWall", "QOSTimeLimit"), "cluster.time=MINUTES"),
    RefusalRule(Retryable.NEVER, _PER_JOB, (
        r"(QOS|Assoc)(Max|Min)\w*(PerJob|PerNode)", r"(QOS|Assoc)Min",
    ), "cluster.nodes=NUMBER"),
    RefusalRule(Retryable.YES, _LIMIT, (
        r"(QOS|Assoc)(Max|Grp)\w+", "QOSUsageThreshold", "violates accounting/qos policy",
        "breached requested qos usage threshold", "maxjobcount limit", "job queue full",
    )),
    # Site conditions: downtime, maintenance, upgrades, load.
    RefusalRule(Retryable.YES, _SITE, (
        "temporarily unable to accept", "resource temporarily unavailable", "creation temporarily disabled",
        "rate limit exceeded", "requested nodes are busy", "required ports are in use", "submissions disabled",
        "requested operation is presently disabled", "in standby", r"partition (configuration )?not available",
        "partition in down state", "required node not available", "maintenance reservation",
        r"reservation (is in use|not usable)", "licenses currently unavailable", "waiting for burst buffer",
        "resource limit exceeded", "i/o error writing script", "slurm internal error", "job credential",
        "incompatible versions", "plugin initialization failed", "unable to open file",
    )),
    # For a valid job, these mean an unreachable directory or slurmdbd; in a new run, they mean a typo.
    RefusalRule(Retryable.ONCE_ACCEPTED, _ACCOUNT, (
        r"invalid (account|qos|wckey)", "user's group not permitted", "permission denied", "access denied",
        r"invalid (user|group) id",
    ), "cluster.account=NAME cluster.qos=NAME"),
    RefusalRule(Retryable.ONCE_ACCEPTED, SIZE, (
        "requested node configuration is not available", "requested nodes not in this",
    )),
    RefusalRule(Retryable.ONCE_ACCEPTED, GRES, (
        "invalid generic resource", r"invalid (gres|tres|trackable)",
    ), "cluster.sbatch.gres=NAME:NUMBER"),
    # Errors in the request, never outages.
    RefusalRule(Retryable.NEVER, _PARTITION, ("invalid partition", "no partition specified"), "cluster.partition=NAME"),
    RefusalRule(Retryable.NEVER, "`sinfo -N` lists nodes", ("invalid node name",), "cluster.exclude=NODES"),
    RefusalRule(Retryable.NEVER, _PER_JOB, (
        "time limit is invalid", r"invalid (job )?time", "time limit specification",
    ), "cluster.time=MINUTES"),
    RefusalRule(Retryable.NEVER, SIZE, (
        "more processors requested", r"count (specification )?(invalid|(per node )?can ?not be satisfied)",
        r"memory (required by task|specification)", r"too many (tasks|nodes|cpus)", "size specification",
    )),
    RefusalRule(Retryable.NEVER, "`sinfo -o '%N %f'` lists features", (
        r"invalid (feature|constraint)",
    ), "cluster.constraint=FEATURE"),
    RefusalRule(Retryable.NEVER, "`scontrol show licenses` lists licenses", (
        "invalid license",
    ), "cluster.sbatch.licenses=NAME"),
    RefusalRule(Retryable.NEVER, "`scontrol show reservation` lists reservations", (
        r"(reservation is invalid|invalid reservation)",
    ), "cluster.sbatch.reservation=NAME"),
    RefusalRule(Retryable.NEVER, _OPTION, (
        "invalid preferred feature", "mutually exclusive",
        r"(unrecognized|invalid) .*(option|value|argument|specification)", "requires an argument",
        r"invalid (--?\S+ spec|job array|number of|memory|gpu|exclude|nodelist)", "pathname .* too long",
    )),
)  # fmt: skip
"""The first matching row decides."""

UNKNOWN = RefusalRule(Retryable.YES, "orch does not recognize this message from Slurm; ask your site what it means", ())

_ANSWERED = re.compile(r"batch job submission failed|allocation failure", re.IGNORECASE)
"""Prefixes of slurmctld's refusal in sbatch's output. The second one appears with --test-only."""
_BEFORE_WORDS = re.compile(
    r"(sbatch: |error: |fatal: |batch job submission failed: |allocation failure: )+", re.IGNORECASE
)
_USAGE = re.compile(r"try \"sbatch --help\"", re.IGNORECASE)

_SILENT = re.compile(
    r"could not establish a configuration source|unable to resolve|name or service not known|dns srv lookup failed"
    r"|temporary failure in name resolution|munged?\b|authentication|can't find an address"
    r"|message (send|receive) failure|communication",
    re.IGNORECASE,
)
"""Messages that only the client writes. They mean that no answer arrived, so later look-ups decide."""


def submit_error(output: str) -> SubmitRejected | SubmitAmbiguous:
    """Return the meaning of sbatch's output: a permanent or temporary refusal, or an ambiguous result."""
    lines = [_BEFORE_WORDS.sub("", line.strip(), count=1) for line in output.splitlines()]
    words = cut("; ".join(dict.fromkeys(line for line in lines if line and not _USAGE.match(line))), 400)
    row = _row(output)
    if row is None:
        return SubmitAmbiguous(
            f"sbatch failed, but the job may exist anyway: {words or 'no message'}",
            hint="nothing is resubmitted until look-ups show whether the job exists",
        )
    return SubmitRejected(f"Slurm refused the job: {words}", hint=row.hint, retryable=row.retryable, change=row.change)


def is_of_sbatch(output: str) -> bool:
    """Return whether sbatch or slurmctld wrote this, rather than a site's wrapper around sbatch."""
    lines = [line for line in output.splitlines() if line.strip() and not _USAGE.match(line)]
    return bool(_ANSWERED.search(output)) or all(line.startswith("sbatch:") for line in lines)


def _row(text: str) -> RefusalRule | None:
    answered = _ANSWERED.search(text) is not None
    # sbatch was killed by its time limit while retrying, so its last try may have been accepted.
    if no_contact(text) or _SILENT.search(text) or (not answered and re.search(r"retrying\s*$", text, re.IGNORECASE)):
        return None
    for row in REFUSALS:
        if any(re.search(words, text, re.IGNORECASE) for words in row.words):
            return row
    # A site's plugin may print anything. It is an answer, and the refusal may be temporary.
    return UNKNOWN if answered else None


STAYS = "this does not clear on its own"
MAY_STAY = "this may never clear on its own"
LONG_WAIT = 600.0  # seconds after which a wait that should clear is reported as one that may not


class Lasts(Enum):
    """Conditions that end a wait."""

    CLEARS = auto()  # when jobs end or time passes
    MAY_STAY = auto()  # when someone else acts
    STAYS = auto()  # never, unless the request changes


@dataclass(frozen=True)
class Wait:
    """Meaning of a pending reason. `change` lists keys to change, and `look` is a command that shows details."""

    lasts: Lasts
    words: str
    change: str = ""
    look: str = ""
    for_nodes: bool = False  # a job with fewer nodes may start sooner


_WAITS: tuple[tuple[str, Wait], ...] = (
    ("BadConstraints", Wait(Lasts.STAYS, "no nodes have everything it requests",
     "cluster.nodes=NUMBER cluster.cpus_per_task=NUMBER cluster.mem=SIZE", "`sinfo -Nel`", for_nodes=True)),
    ("PartitionTimeLimit|(QOS|Assoc)MaxWall.*|QOSTimeLimit|AssociationTimeLimit", Wait(
     Lasts.STAYS, "cluster.time is longer than allowed here", "cluster.time=MINUTES", "`sinfo -o '%P %l'`")),
    ("(QOS|Assoc)Max.*(PerJob|PerNode).*|(QOS|Assoc)Min.*|MaxMemPerLimit", Wait(
     Lasts.STAYS, "one job may not request this much, or this little", "cluster.nodes=NUMBER", "`sacctmgr show qos`")),
    ("InvalidAccount|AccountNotAllowed|.*account not permitted.*", Wait(
     Lasts.STAYS, "the account may not run here", "cluster.account=NAME", "`sacctmgr show assoc user=$USER`")),
    ("InvalidQOS|QOSNotAllowed|.*qos not permitted.*", Wait(
     Lasts.STAYS, "the QOS may not be used here", "cluster.qos=NAME", "`sacctmgr show qos`")),
    ("ReservationDeleted", Wait(
     Lasts.STAYS, "its reservation is gone", "~cluster.sbatch.reservation", "`scontrol show reservation`")),
    ("DependencyNeverSatisfied|JobHoldMaxRequeue|BurstBufferStageInFailed|DeadLine", Wait(
     Lasts.STAYS, "Slurm will never start it")),
    ("JobHeldAdmin", Wait(Lasts.MAY_STAY, "an administrator holds it; ask your site")),
    ("PartitionNodeLimit", Wait(Lasts.MAY_STAY, "it requests more nodes than the partition allows or has in service",
     "cluster.nodes=NUMBER", "`scontrol show partition`", for_nodes=True)),
    ("PartitionDown|PartitionInactive", Wait(
     Lasts.MAY_STAY, "the partition does not accept jobs now", "cluster.partition=NAME", "`sinfo -s`")),
    ("ReqNodeNotAvail.*maintenance.*", Wait(
     Lasts.CLEARS, "its nodes are reserved for maintenance, which begins before its time limit ends", for_nodes=True)),
    ("ReqNodeNotAvail.*|NodeDown|nodes required for job are down.*", Wait(Lasts.MAY_STAY,
     "nodes that it needs are down, drained or reserved", "cluster.nodes=NUMBER", "`sinfo -R`", for_nodes=True)),
    ("(QOS|Assoc)Grp.*Minutes.*|QOSUsageThreshold", Wait(
     Lasts.MAY_STAY, "the budget of the account or QOS is used up", "cluster.account=NAME", "`sshare`")),
    (r"(QOS|Assoc)(Grp|Max).*|Max\w+PerAccount|QOSJobLimit|QOSResourceLimit|Association(Job|Resource)Limit", Wait(
     Lasts.CLEARS, "a limit on concurrent jobs, which clears when other jobs end")),
    ("Resources", Wait(Lasts.CLEARS, "it waits for free nodes", for_nodes=True)),
    ("Priority", Wait(Lasts.CLEARS, "jobs with higher priority go first", for_nodes=True)),
    ("Licenses", Wait(Lasts.CLEARS, "it waits for licenses")),
    ("NvidiaImexChannels", Wait(Lasts.CLEARS, "it waits for an IMEX channel, which a job returns when it ends")),
    ("Reservation", Wait(Lasts.CLEARS, "it waits for its reservation to begin")),
    ("BeginTime", Wait(Lasts.CLEARS, "it may not begin yet")),
    ("Dependency", Wait(Lasts.CLEARS, "it waits for another job")),
    ("JobHeldUser|job requeued in held state", Wait(Lasts.MAY_STAY, "a user holds it")),
    ("Cleaning|Prolog|SchedDefer|BurstBuffer.*|.*burst buffer.*", Wait(Lasts.CLEARS, "Slurm is not ready to start it")),
)  # fmt: skip
"""The first pattern that matches the whole reason decides."""


def find_wait(reason: str) -> Wait | None:
    """Return the meaning of a pending reason, or None if it is unknown or empty.

    Slurm prints some reasons as phrases instead of names, separated by blanks or `_`.
    """
    phrase = reason.strip().replace("_", " ")
    return next((wait for pattern, wait in _WAITS if re.fullmatch(pattern, phrase, re.IGNORECASE)), None)


def waits_for_nodes(reason: str) -> bool | None:
    """Return whether a job with fewer nodes might start sooner, or None while Slurm has given no reason.

    An unknown reason counts as a wait for nodes: since 26.05, Slurm names the topology instead of `Resources`.
    """
    if reason in ("", "None"):
        return None
    wait = find_wait(reason)
    return wait is None or wait.for_nodes


def waiting_words(reason: str, asked: Resources, run: str, waited: float) -> str:
    """Return why a job has been waiting for `waited` seconds.

    An example is ` (Priority): jobs with higher priority go first`. If the wait may not end, the remedy follows.
    """
    if reason in ("", "None"):
        return ""
    wait = find_wait(reason)
    if wait is None:
        return f" ({reason})"
    text = f" ({reason}): {wait.words}"
    if reason == "BadConstraints":
        text = f"{text} ({asked_words(asked)})"
    if wait.lasts is Lasts.CLEARS or (wait.lasts is Lasts.MAY_STAY and waited < LONG_WAIT):
        return text
    flag = STAYS if wait.lasts is Lasts.STAYS else MAY_STAY
    looks = f"; see {wait.look}" if wait.look else ""
    cure = f", then `orch resume {run} {wait.change}`" if wait.change else " ends it"
    return f"{text}; {flag}{looks}; `orch cancel {run}`{cure}"
