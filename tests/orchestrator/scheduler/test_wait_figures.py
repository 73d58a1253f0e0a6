"""Figures for pending jobs, from recorded answers of three Slurm versions (tests/slurm/accounts.py)."""

import json
import os
import pwd
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import SlurmUnreachable
from orchestrator.scheduler.interface import JobStatus, Resources
from orchestrator.scheduler.slurm.account_limits import LimitReason, describe_limits, read_limits
from orchestrator.scheduler.slurm.fair_share import describe_place, read_fair_shares, read_priorities
from orchestrator.scheduler.slurm.wait_figures import GAP, KEEP, LEAST_WAIT, WaitFigures
from tests.fakes.model_clock import FakeClock

VERSIONS = ("22.05", "24.11", "26.05")
ASKED = Resources(nodes=1, cpus_per_task=4)
AT = "(at 2026-11-28 00:00:00Z)"


def recorded(version: str, wait: str) -> dict[str, Any]:
    path = Path(__file__).parents[2] / "fakes" / "slurm_limits" / f"{version}.json"
    return dict(json.loads(path.read_text())[wait])


class Answers:
    """Slurm's recorded answers to the questions of `WaitFigures`, which are counted."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record, self.asked = record, list[list[str]]()

    def __call__(self, command: list[str]) -> str:
        self.asked.append(command)
        if command[1:4] == ["-o", "show", "partition"]:
            return "PartitionName=low AllowGroups=ALL QoS=N/A DefaultTime=NONE"
        key = {"sprio": "priorities", "sshare": "shares"}.get(command[0]) or (
            "qos" if "flags=qos" in command else "associations"
        )
        return str(self.record[key]["out"])


def figures(answers: Answers, clock: FakeClock | None = None) -> WaitFigures:
    return WaitFigures(answers, clock or FakeClock(), lambda: 1795824000.0)


def job(record: dict[str, Any], **settings: str) -> JobStatus:
    known = {"partition": "low", "account": "below", "qos": "debug", **settings}
    return JobStatus(job_id=record["job"], name="orch-a", state="PENDING", reason=record["reason"], settings=known)


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recordings are of root's jobs."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: pwd.struct_passwd(("root", "x", 0, 0, "", "/", "/bin/sh")))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("wait", "account", "said"),
    [
        ("qos", "poor", "QOS debug: GrpTRES=cpu=6, 4 in use by 1 job; this job requests 4"),
        ("qos for a user", "poor", "QOS solo: MaxTRESPU=cpu=6, 4 in use by 1 job; this job requests 4"),
        ("account", "below", "account capped: GrpTRES=cpu=6, 4 in use by 1 job; this job requests 4"),
        ("association", "rich", "user root in account rich: MaxJobs=1, 1 in use"),
    ],
)
def test_a_job_names_the_limit_that_it_waits_for(version: str, wait: str, account: str, said: str) -> None:
    record = recorded(version, wait)
    assert figures(Answers(record))(job(record, account=account), ASKED, 60.0) == f"{said} {AT}"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_behind_others_names_their_priority_and_the_factor(version: str) -> None:
    record = recorded(version, "priority")
    said = figures(Answers(record))(job(record, account="poor"), ASKED, 60.0)
    queue = {one.job_id: one for one in read_priorities(record["priorities"]["out"])}
    (share,) = read_fair_shares(record["shares"]["out"])
    own = queue.pop(record["job"])
    (first,) = queue.values()
    mine, theirs = dict(own.factors), dict(first.factors)
    factors = f"{mine['fair share']:,.0f} here, {theirs['fair share']:,.0f} on average there"
    assert share.usage is not None
    assert share.shares is not None
    parts = f"{100 * share.usage:.0f} % of the usage, {100 * share.shares:.0f} % of the shares"
    assert said == (
        f"priority {own.priority:,.0f}, behind 1 job of at least {first.priority:,.0f}, mostly by fair share "
        f"({factors}); account poor: fair share {share.factor:.2f} ({parts}) {AT}"
    )
    assert (share.account, share.user) == ("poor", "root")
    assert mine["fair share"] < theirs["fair share"]


NO_FACTORS = """sprio: fatal: You are not running a supported priority plugin
(priority/basic).
Only 'priority/multifactor' is supported."""


def test_a_site_without_priority_factors_costs_one_small_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """squeue would list all users' jobs there."""
    asked = tmp_path / "asked"
    clients = {
        "sprio": f"echo \"{NO_FACTORS}\" >&2; exit 1", "sshare": "exit 0", "scontrol": "exit 0",
        "squeue": "seq 1 5000 | sed 's/$/|4294901000/'",
    }  # fmt: skip
    for name, text in clients.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >> {asked}\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    clock = FakeClock()
    tell = WaitFigures(mono=clock)
    words = {"partition": "low", "account": "a", "qos": "normal"}
    waits = JobStatus(job_id="7", name="orch-a", state="PENDING", reason="Priority", settings=words)
    for hour in range(2):
        for number in range(100):
            assert tell(replace(waits, job_id=str(number)), ASKED, 600.0) == ""
        assert asked.read_text().split() == ["sprio"] * (hour + 1)
        clock.now += KEEP


def test_the_partitions_own_qos_is_looked_up_too() -> None:
    record = recorded("22.05", "qos")
    answers = Answers(record)

    def ask(command: list[str]) -> str:
        return "QoS=debug" if "partition" in command else answers(command)

    said = WaitFigures(ask, FakeClock(), lambda: 1795824000.0)(job(record, qos="normal"), ASKED, 60.0)
    assert said.startswith("QOS debug: GrpTRES=cpu=6")
    assert "qos=normal,debug" in answers.asked[0]


def test_questions_are_rare_and_jobs_of_one_queue_share_them() -> None:
    record, clock = recorded("22.05", "qos"), FakeClock()
    answers = Answers(record)
    tell = figures(answers, clock)
    one = job(record)
    assert tell(one, ASKED, LEAST_WAIT - 1) == ""
    assert answers.asked == []
    assert tell(one, ASKED, LEAST_WAIT)
    assert len(answers.asked) == 2
    for number in range(100):
        assert tell(replace(one, job_id=str(number)), ASKED, LEAST_WAIT)
    assert tell(replace(one, settings={**one.settings, "account": "x"}), ASKED, LEAST_WAIT) == ""  # not now
    assert len(answers.asked) == 2
    clock.now += GAP
    assert tell(replace(one, settings={**one.settings, "account": "x"}), ASKED, LEAST_WAIT)
    assert len(answers.asked) == 4
    clock.now += KEEP
    assert tell(one, ASKED, LEAST_WAIT)
    assert len(answers.asked) == 6


def test_a_silent_slurm_is_asked_again_later_and_other_reasons_never() -> None:
    clock, asked = FakeClock(), list[list[str]]()

    def silent(command: list[str]) -> str:
        asked.append(command)
        raise SlurmUnreachable("sprio gave no answer")

    tell = WaitFigures(silent, clock, lambda: 0.0)
    waits = JobStatus(job_id="7", name="orch-a", state="PENDING", reason="Priority", settings={"partition": "low"})
    assert tell(waits, ASKED, 600.0) == tell(waits, ASKED, 600.0) == ""
    assert len(asked) == 1
    clock.now += GAP
    assert tell(waits, ASKED, 600.0) == ""
    assert tell(replace(waits, reason="Resources"), ASKED, 600.0) == ""
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("reason", "qos", "name", "resource"),
    [
        ("QOSGrpGRES", True, "GrpTRES", "gres/"),
        ("QOSGrpCPUMinutesLimit", True, "GrpTRESMins", "cpu"),
        ("AssocGrpGRESRunMinutes", False, "GrpTRESRunMins", "gres/"),
        ("QOSMaxJobsPerUserLimit", True, "MaxJobsPU", ""),
        ("QOSMaxSubmitJobPerUserLimit", True, "MaxSubmitJobsPU", ""),
        ("MaxGRESPerAccount", True, "MaxTRESPA", "gres/"),
        ("AssocGrpWallLimit", False, "GrpWall", ""),
    ],
)
def test_reasons_that_name_a_limit(reason: str, qos: bool, name: str, resource: str) -> None:
    assert LimitReason.parse(reason) == LimitReason(is_qos=qos, name=name, resource=resource)


def test_reasons_without_a_limit_and_unreadable_answers_say_nothing() -> None:
    for reason in ("Priority", "Resources", "QOSMaxWallDurationPerJobLimit", "MaxMemPerLimit", "", "Grp"):
        assert LimitReason.parse(reason) is None
    assert (
        describe_limits("QOSGrpGRES", read_limits("slurm_load_assoc_mgr_info error: denied\n"), ("root",), ASKED) == ""
    )
    assert describe_place("7", read_priorities("sprio: error: not supported\n"), None) == ""


def test_gpu_limits_show_the_request_and_used_minutes() -> None:
    text = (
        "QOS=gpu(4)\n    GrpJobs=N(2) GrpSubmitJobs=N(3) GrpWall=N(1.00)\n"
        "    GrpTRES=cpu=N(40),gres/gpu=8(8)\n    GrpTRESMins=cpu=N(3),gres/gpu=600(600)\n"
    )
    asked = Resources(nodes=2, gpus_per_node=4)
    limits = read_limits(text)
    said = "QOS gpu: GrpTRES=gres/gpu=8, 8 in use by 2 jobs; this job requests 8"
    assert describe_limits("QOSGrpGRES", limits, ("root",), asked) == said
    assert (
        describe_limits("QOSGrpGRESMinutes", limits, ("root",), asked) == "QOS gpu: GrpTRESMins=gres/gpu=600, 600 used"
    )
