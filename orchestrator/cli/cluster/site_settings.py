"""Checks of a site's Slurm settings: what they enable or prevent, with the key and the value to set."""

import os
import pwd
import re
from collections.abc import Iterator, Mapping

from orchestrator.cli.cluster.check import INFO, OK, WARN, Check, CommandRunner
from orchestrator.errors import ConfigError, OrchError
from orchestrator.scheduler.interface import Resources
from orchestrator.scheduler.slurm.sbatch_values import minutes
from orchestrator.scheduler.slurm.site_survey import read_rows

PARTITION_LIMITS = ("scontrol", "show", "partition", "-o")
SHORT_WAIT = 10  # seconds; most saves take longer
EXPEDITE_FROM = (25, 11, 3)
"""First version of Slurm whose expedited requeue orch uses."""
_NONE = frozenset({"", "(null)", "NONE", "none"})
Settings = Mapping[str, str]


def parse_config(text: str) -> dict[str, str]:
    """Parse `scontrol show config`, which prints one `Name = value` per line."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def site_settings(settings: Settings, version: tuple[int, ...]) -> Iterator[Check]:
    """Check the settings for failure detection, the time to save, requeueing, plugins, limits and cgroups."""
    yield from _stop(settings)
    yield _node_failure(settings)
    yield from _preemption(settings)
    yield from _requeue(settings, version)
    yield from _plugins(settings)
    yield _limits(settings)
    yield from _processes(settings)


def _stop(settings: Settings) -> Iterator[Check]:
    wait = seconds(settings.get("KillWait"))
    lead = f"{wait} s" if wait is not None else "an unknown time"
    yield Check("stop", OK, f"KillWait {lead}: the time that a job has to save after SIGTERM; --signal extends it")
    if wait is not None and wait < SHORT_WAIT:
        hint = (
            "cluster.signal_lead=300, in ~/.config/orch/config.yaml or at submit, leaves five minutes for a save "
            "before the time limit; for other ends, the administrator sets KillWait=60"
        )
        yield Check("stop", WARN, "that is short: saves that take longer rely on cluster.signal_lead", hint)


def _node_failure(settings: Settings) -> Check:
    timeout = seconds(settings.get("SlurmdTimeout"))
    if not timeout:
        text = "SlurmdTimeout is 0: Slurm never gives up on a silent node, so only heartbeats reveal a failure"
        return Check("node failure", WARN, text, "the administrator sets SlurmdTimeout=300")
    text = f"a dead node is noticed after SlurmdTimeout {timeout} s; then a new job runs without it"
    return Check("node failure", OK, text)


def _preemption(settings: Settings) -> Iterator[Check]:
    mode, kind = settings.get("PreemptMode", "OFF"), settings.get("PreemptType", "")
    if mode.upper() == "OFF" or kind.endswith("none"):
        yield Check("preemption", OK, "jobs are not preempted here")
        return
    if "SUSPEND" in mode.upper() or "GANG" in mode.upper():
        text = f"PreemptMode {mode}: a preempted job may be stopped in place; it looks like a hang until it continues"
        yield Check("preemption", WARN, text, "the administrator sets PreemptMode=REQUEUE or CANCEL")
        return
    text = f"PreemptMode {mode}: a preempted run saves and continues in a new job, outside the budget"
    yield Check("preemption", OK, text)
    if "send_user_signal" not in _words(settings, "PreemptParameters"):
        text = "PreemptParameters has no send_user_signal: a preempted job has KillWait and GraceTime to save, no more"
        hint = (
            "the administrator sets GraceTime=120 for preemptable partitions or QOS, and "
            "PreemptParameters=send_user_signal"
        )
        yield Check("time before preemption", INFO, text, hint)


def _requeue(settings: Settings, version: tuple[int, ...]) -> Iterator[Check]:
    requeue = settings.get("JobRequeue", "?")
    yield Check("requeue", OK, f"JobRequeue {requeue}: orch submits with --no-requeue and starts new jobs itself")
    forced = [
        f"{key}={word}"
        for key, word in (("PrologFlags", "ForceRequeueOnFail"), ("SlurmctldParameters", "requeue_on_resume_failure"))
        if word.lower() in _words(settings, key)
    ]
    if forced:
        text = f"{' and '.join(forced)}: Slurm may requeue a job despite --no-requeue; orch ends it and starts another"
        yield Check("requeue", INFO, text)
    name = "enable_expedited_requeue"
    if name in _words(settings, "SlurmctldParameters"):
        usable = version >= EXPEDITE_FROM
        why = "" if usable else f", but needs Slurm {'.'.join(map(str, EXPEDITE_FROM))} or newer"
        yield Check("expedite", OK if usable else INFO, f"SlurmctldParameters has {name}{why}")
    elif version >= EXPEDITE_FROM:
        text = f"SlurmctldParameters has no {name}: after a node failure a job without spare nodes loses all"
        yield Check("expedite", INFO, text, f"the administrator adds {name} to SlurmctldParameters")
    else:
        text = "this Slurm has no expedited requeue (25.11.3): after a node failure a job without spare nodes loses all"
        yield Check("expedite", INFO, text)


def _plugins(settings: Settings) -> Iterator[Check]:
    plugins = settings.get("JobSubmitPlugins", "")
    if plugins not in _NONE:
        text = f"JobSubmitPlugins {plugins}: they may change or refuse jobs; `orch status RUN` names the changes"
        yield Check("plugins", INFO, text)
    flags = settings.get("PrologFlags", "")
    if flags not in _NONE:
        yield Check("prolog", OK, f"PrologFlags {flags}")


def _limits(settings: Settings) -> Check:
    jobs, array = settings.get("MaxJobCount", "?"), settings.get("MaxArraySize", "?")
    text = f"MaxJobCount {jobs} for all users; MaxArraySize {array} does not matter, because orch submits no arrays"
    enforced = settings.get("AccountingStorageEnforce", "")
    if enforced in _NONE:
        return Check("limits", OK, f"{text}; limits of accounts and QOS are not enforced")
    return Check("limits", OK, f"{text}; AccountingStorageEnforce {enforced}")


def _processes(settings: Settings) -> Iterator[Check]:
    track = settings.get("ProctrackType", "")
    if track and track != "proctrack/cgroup":
        text = f"ProctrackType {track}: processes of a job may outlive it if its slurmstepd is killed"
        yield Check("processes", INFO, text, "the administrator sets ProctrackType=proctrack/cgroup")
    if not settings.get("TaskPlugin", "").count("cgroup"):
        text = "TaskPlugin has no task/cgroup: jobs are not confined to their cores, memory and GPUs"
        hint = (
            "the administrator sets TaskPlugin=task/affinity,task/cgroup; else ask for whole nodes: "
            "+cluster.sbatch.exclusive=true"
        )
        yield Check("cgroups", INFO, text, hint)
        return
    names = ("ConstrainCores", "ConstrainRAMSpace", "ConstrainDevices")
    if not settings.keys() & set(names):
        return
    off = [name for name in names if settings.get(name, "no").lower() != "yes"]
    if off:
        hint = f"the administrator sets {' '.join(f'{name}=yes' for name in off)} in cgroup.conf"
        yield Check("cgroups", INFO, f"cgroup.conf: {', '.join(off)} off: other jobs may use what yours has", hint)
    if "ConstrainRAMSpace" not in off:
        text = "ConstrainRAMSpace yes: checkpoint buffers in shared memory count against the job's memory"
        yield Check("memory", OK, text, "cluster.mem=SIZE")


def partition_limits(source: str, asked: Resources, ask: CommandRunner) -> Iterator[Check]:
    """Check the time limits of the partitions that a configuration names, or of the default partition."""
    try:
        rows = [dict(_PAIR.findall(line)) for line in ask(list(PARTITION_LIMITS)).splitlines()]
    except OrchError as error:
        yield Check("time limit", WARN, f"cannot check the time limits of partitions: {error.what}")
        return
    names = asked.partition.split(",") if asked.partition else []
    for row in rows:
        if row.get("PartitionName") in names or (not names and row.get("Default") == "YES"):
            yield _time_limit(source, asked, row)


def association_limits(settings: Settings, ask: CommandRunner) -> Iterator[Check]:
    """Check the limits on the number and length of this user's jobs, if the site enforces such limits."""
    if not _words(settings, "AccountingStorageEnforce") & {"limits", "safe", "all"}:
        return
    user, cluster = pwd.getpwuid(os.getuid()).pw_name, settings.get("ClusterName", "")
    where = ["where", f"user={user}", f"cluster={cluster}", f"format=Account,Partition,{','.join(_JOB_LIMITS)}"]
    try:
        rows = read_rows(ask(["sacctmgr", "-n", "-P", "show", "assoc", *where]))
    except OrchError as error:
        yield Check("account limits", WARN, f"cannot check the limits of your accounts: {error.what}")
        return
    for account, partition, *values in (row for row in rows if len(row) == len(_JOB_LIMITS) + 2):
        limits = [f"{name} {value}" for name, value in zip(_JOB_LIMITS, values, strict=True) if value]
        place = f"account {account}" + (f" on partition {partition}" if partition else "")
        text = f"{place}: {', '.join(limits) or 'no limits on the number and length of your jobs'}"
        hint = "a run beyond a limit waits; the administrator changes it with `sacctmgr modify user`" if limits else ""
        yield Check("account limits", INFO if limits else OK, text, hint)


_JOB_LIMITS = ("MaxJobs", "MaxSubmitJobs", "MaxWall")
_PAIR = re.compile(r"(\w+)=(\S*)")


def _time_limit(source: str, asked: Resources, row: Settings) -> Check:
    name, most, usual = row["PartitionName"], row.get("MaxTime", ""), row.get("DefaultTime", "NONE")
    grace = seconds(row.get("GraceTime")) or 0
    extra = f", GraceTime {grace} s" if grace else ""
    text = f"partition {name}: MaxTime {most}, DefaultTime {usual}{extra}; {source} asks for {asked.time}"
    try:
        too_long = most != "UNLIMITED" and minutes("cluster.time", asked.time) > minutes("MaxTime", most)
    except ConfigError:
        return Check("time limit", OK, text)
    if too_long:
        return Check("time limit", WARN, text, f"cluster.time={most}: longer runs continue in further jobs")
    return Check("time limit", OK, text)


def _words(settings: Settings, key: str) -> frozenset[str]:
    return frozenset(word.strip().lower() for word in settings.get(key, "").split(","))


def seconds(text: str | None) -> int | None:
    """Return the leading number: `30 sec` is 30."""
    match = re.match(r"(\d+)", text or "")
    return int(match[1]) if match else None


def read_version(text: str) -> tuple[int, ...]:
    """Return the version in the output of `sbatch --version`: `slurm-wlm 24.11.5` is (24, 11, 5)."""
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part) for part in match.groups("0")) if match else ()
