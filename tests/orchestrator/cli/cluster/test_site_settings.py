"""`orch doctor`: what the settings of a site's Slurm enable or prevent."""

from collections.abc import Iterable

import pytest

from orchestrator.cli.cluster.check import INFO, OK, WARN, Check
from orchestrator.cli.cluster.site_settings import (
    association_limits,
    parse_config,
    partition_limits,
    read_version,
    site_settings,
)
from orchestrator.errors import SlurmUnreachable
from orchestrator.scheduler.interface import Resources

CONFIG = """Configuration data as of 2026-01-01T00:00:00
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = lab
JobRequeue              = 1
JobSubmitPlugins        = (null)
KillWait                = 30 sec
MaxArraySize            = 1001
MaxJobCount             = 10000
PreemptMode             = REQUEUE
PreemptParameters       = (null)
PreemptType             = preempt/partition_prio
ProctrackType           = proctrack/cgroup
PrologFlags             = (null)
SlurmctldParameters     = (null)
SlurmdTimeout           = 20 sec
TaskPlugin              = task/affinity,task/cgroup

Cgroup Support Configuration:
ConstrainCores          = yes
ConstrainDevices        = yes
ConstrainRAMSpace       = yes
"""
NEW, OLD = (26, 5, 5), (22, 5, 8)


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def found(version: tuple[int, ...] = NEW, **changes: str) -> dict[str, Check]:
    return by_name(site_settings(parse_config(CONFIG) | changes, version))


def test_a_site_without_surprises() -> None:
    checks = found()
    assert "SlurmdTimeout 20 s" in checks["node failure"].text
    assert "saves and continues in a new job" in checks["preemption"].text
    assert "MaxJobCount 10000" in checks["limits"].text
    assert {name for name, check in checks.items() if check.level != OK} == {"time before preemption", "expedite"}


@pytest.mark.parametrize(
    ("changes", "name", "level", "hint"),
    [
        ({"KillWait": "5 sec"}, "stop", WARN, "cluster.signal_lead=300"),
        ({"KillWait": "5 sec"}, "stop", WARN, "KillWait=60"),
        ({"SlurmdTimeout": "0 sec"}, "node failure", WARN, "SlurmdTimeout=300"),
        ({"PreemptMode": "SUSPEND,GANG"}, "preemption", WARN, "PreemptMode=REQUEUE"),
        ({}, "time before preemption", INFO, "PreemptParameters=send_user_signal"),
        ({"PrologFlags": "Alloc,ForceRequeueOnFail"}, "requeue", INFO, ""),
        ({"SlurmctldParameters": "a=1,requeue_on_resume_failure"}, "requeue", INFO, ""),
        ({}, "expedite", INFO, "adds enable_expedited_requeue to SlurmctldParameters"),
        ({"SlurmctldParameters": "enable_expedited_requeue"}, "expedite", OK, ""),
        ({"JobSubmitPlugins": "lua"}, "plugins", INFO, ""),
        ({"ProctrackType": "proctrack/linuxproc"}, "processes", INFO, "ProctrackType=proctrack/cgroup"),
        ({"TaskPlugin": "task/none"}, "cgroups", INFO, "+cluster.sbatch.exclusive=true"),
        ({"ConstrainDevices": "no"}, "cgroups", INFO, "ConstrainDevices=yes in cgroup.conf"),
    ],
)
def test_a_setting_that_prevents_something(changes: dict[str, str], name: str, level: str, hint: str) -> None:
    check = found(**changes)[name]
    assert check.level == level
    assert hint in check.hint


def test_expedited_requeue_needs_a_new_slurm() -> None:
    assert "needs Slurm 25.11.3" in found(OLD, SlurmctldParameters="enable_expedited_requeue")["expedite"].text
    assert found(OLD)["expedite"].hint == "", "no setting helps"
    assert [read_version(text) for text in ("slurm-wlm 22.05.8", "slurm 26.05.5\n", "?")] == [OLD, NEW, ()]


def test_preemption_off_needs_no_advice() -> None:
    assert "time before preemption" not in found(PreemptMode="OFF")


PARTITIONS = (
    "PartitionName=low AllowGroups=ALL Default=YES DefaultTime=01:00:00 GraceTime=120 MaxTime=UNLIMITED State=UP\n"
    "PartitionName=short AllowGroups=ALL Default=NO DefaultTime=NONE GraceTime=0 MaxTime=04:00:00 State=UP\n"
)


@pytest.mark.parametrize(
    ("asked", "names", "level", "hint"),
    [
        ({"time": "2-00:00:00"}, ["partition low: MaxTime UNLIMITED, DefaultTime 01:00:00, GraceTime 120 s"], OK, ""),
        ({"time": "2-00:00:00", "partition": "short"}, ["partition short: MaxTime 04:00:00"], WARN, "=04:00:00"),
        ({"time": "4:00:00", "partition": "short"}, ["partition short"], OK, ""),
        ({"time": "60", "partition": "low,short"}, ["partition low", "partition short"], OK, ""),
    ],
)
def test_time_limits_of_the_named_partitions(asked: dict[str, str], names: list[str], level: str, hint: str) -> None:
    checks = list(partition_limits("first", Resources(nodes=1, **asked), lambda words: PARTITIONS))  # type: ignore[arg-type]
    assert [check.text.startswith(name) for check, name in zip(checks, names, strict=True)] == [True] * len(names)
    assert {check.level for check in checks} == {level}
    assert all(hint in check.hint for check in checks)


def test_time_limits_without_an_answer() -> None:
    def silent(command: list[str]) -> str:
        raise SlurmUnreachable("scontrol got no answer")

    (check,) = partition_limits("first", Resources(nodes=1), silent)
    assert (check.level, "scontrol got no answer" in check.text) == (WARN, True)


def test_limits_of_the_users_accounts() -> None:
    asked: list[list[str]] = []

    def answer(words: list[str]) -> str:
        asked.append(words)
        return "vision|||10|\nvision|gpu|2|4|1-00:00:00\nfree||||\n"

    assert list(association_limits({}, answer)) == []
    assert asked == [], "limits are not enforced"
    enforced = {"AccountingStorageEnforce": "associations,limits,qos,safe", "ClusterName": "lab"}
    checks = list(association_limits(enforced, answer))
    assert [(check.level, check.text) for check in checks] == [
        (INFO, "account vision: MaxSubmitJobs 10"),
        (INFO, "account vision on partition gpu: MaxJobs 2, MaxSubmitJobs 4, MaxWall 1-00:00:00"),
        (OK, "account free: no limits on the number and length of your jobs"),
    ]
    assert "cluster=lab" in asked[0]


def test_cgroup_settings_that_slurm_does_not_show_are_not_judged() -> None:
    settings = {name: value for name, value in parse_config(CONFIG).items() if not name.startswith("Constrain")}
    assert not {"cgroups", "memory"} & set(by_name(site_settings(settings, NEW)))
