"""What one look at an attempt tells, before anybody judges it."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.controller.collect_evidence import (
    collect_evidence,
    is_unexplained,
    leader_gone,
    lost_interpreter,
    near_limit,
    read_tails,
    removed_nodes,
)
from orchestrator.controller.scheduler_snapshot import SchedulerSnapshot
from orchestrator.observed_since import ObservedSince
from orchestrator.registry.records import Attempt
from orchestrator.scheduler.interface import JobStatus
from orchestrator.states import AttemptState
from tests.scenarios.world import World, config
from trainer.protocol.failures.outcome import AttemptOutcome, AttemptResult, Failure, FailureKind
from trainer.protocol.logs.log_rotation import LogFile, LogsConfig
from trainer.protocol.run_dir import RunDir


def attempt(*nodes: str) -> Attempt:
    return Attempt(
        run="a", number=1, state=AttemptState.RUNNING, nonce="0" * 8, job_name="orch-a-1-00000000", job_id="7",
        nodes=nodes, generations=1,
    )  # fmt: skip


def job(state: str, *nodes: str) -> JobStatus:
    return JobStatus(job_id="7", name="orch-a-1-00000000", state=state, nodes=nodes)


@pytest.mark.parametrize(
    ("state", "nodes", "gone"),
    [
        ("RUNNING", ("n1", "n2", "n3"), ""),
        ("RUNNING", ("n1", "n3"), ""),  # a node that did not lead
        ("RUNNING", ("n2", "n3"), "n1"),
        ("RUNNING", (), ""),  # not told
        ("COMPLETING", ("n2", "n3"), ""),
        ("NODE_FAIL", ("n2", "n3"), ""),
    ],
)
def test_the_first_node_leads_until_slurm_takes_it_out_of_the_job(state: str, nodes: tuple[str, ...], gone: str):
    observed = ObservedSince(lambda: 0.0)
    assert removed_nodes(job("RUNNING", "n1", "n2", "n3"), observed, "a/1") == ()
    now = job(state, *nodes)
    assert leader_gone(attempt("n1", "n2", "n3"), now, removed_nodes(now, observed, "a/1")) == gone


def test_the_first_node_of_slurm_s_list_need_not_lead():
    observed = ObservedSince(lambda: 0.0)
    removed_nodes(job("RUNNING", "n1", "n2"), observed, "a/1")
    now = job("RUNNING", "n2")
    gone = removed_nodes(now, observed, "a/1")
    assert leader_gone(replace(attempt("n1", "n2"), generations=0), now, gone) == ""
    assert leader_gone(attempt("n2", "n1"), now, gone) == ""


def test_a_name_that_slurm_never_told_is_not_gone():
    observed = ObservedSince(lambda: 0.0)
    for _ in range(2):
        now = job("RUNNING", "n1", "n2")
        assert (
            leader_gone(attempt("n1.cluster.example", "n2.cluster.example"), now, removed_nodes(now, observed, "a/1"))
            == ""
        )


def test_a_node_that_was_taken_out_stays_so_when_its_job_has_ended():
    observed = ObservedSince(lambda: 0.0)
    for names in (("n1", "n2"), ("n1",)):
        removed_nodes(job("RUNNING", *names), observed, "a/1")
    assert removed_nodes(job("COMPLETED", "n1", "n2"), observed, "a/1") == ("n2",)
    assert removed_nodes(None, observed, "a/1") == ("n2",)
    assert removed_nodes(job("RUNNING", "n1"), observed, "a/2") == ()


@pytest.mark.parametrize(("spares", "gone"), [(0, ()), (1, ("n1",))])
def test_only_a_job_with_spares_goes_on_without_a_node(tmp_path: Path, spares: int, gone: tuple[str, ...]):
    data = config()
    world = World(tmp_path, data={**data, "cluster": {**data["cluster"], "spare_nodes": spares}})
    world.tick()
    view = replace(world.view, attempts=(attempt("n1"),))
    observed = ObservedSince(lambda: 0.0)
    for names in (("n1", "n2"), ("n2",)):
        found = collect_evidence(
            view, SchedulerSnapshot(answered=True, swept=True, polled={}, found=(job("RUNNING", *names),)), observed
        )
    assert (found.gone, found.leader_gone) == (gone, "".join(gone))


def test_without_a_job_or_a_record_of_its_nodes_nothing_is_said():
    assert leader_gone(attempt("n1"), None, ("n1",)) == ""
    assert leader_gone(attempt(), job("RUNNING", "n2"), ("n1",)) == ""


def ended(result: AttemptResult, after: float, kind: FailureKind | None = None) -> AttemptOutcome:
    failure = Failure(kind=kind, reason="?") if kind else None
    return AttemptOutcome(
        attempt=1, job_id="7", result=result, reason="an agent got SIGTERM", exit_code=76, step=30, generations=1,
        started_at=100.0, ended_at=100.0 + after, failure=failure,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("limit", "after", "near"),
    [
        ("30:00", 120.0, False),
        ("4:00", 130.0, True),  # shortened while it ran: Slurm's signal comes 120 s before
        ("2:00", 150.0, True),  # shortened to less than it had run
        ("1-00:00:00", 86400.0 - 170.0, True),
        ("UNLIMITED", 1e9, False),
        ("", 1e9, False),  # accounting does not tell
    ],
)
def test_a_stop_is_near_the_limit_that_the_job_has_in_the_end(limit: str, after: float, near: bool):
    settings = {"time limit": limit} if limit else {}
    over = replace(job("FAILED", "n1"), settings=settings)
    assert near_limit(over, ended(AttemptResult.STOPPED, after), 120.0, 60.0) is near


def test_slurm_s_words_are_read_where_the_job_cannot_know_who_stopped_it():
    assert is_unexplained(None)
    assert is_unexplained(ended(AttemptResult.STOPPED, 9.0))
    assert is_unexplained(ended(AttemptResult.FAILED, 9.0, FailureKind.PREEMPTED))
    assert not is_unexplained(ended(AttemptResult.FAILED, 9.0, FailureKind.USER_ERROR))
    assert not is_unexplained(ended(AttemptResult.FINISHED, 9.0, FailureKind.USER_ERROR))


def test_the_end_of_a_log_that_was_just_rotated_is_in_two_files(tmp_path: Path):
    place = RunDir(tmp_path).attempt(1)
    place.make()
    log = LogFile(place.agent_log(0), LogsConfig(max_mib=0.001, keep=2))
    log.write(b"slurmstepd: error: Detected 1 oom_kill event\n" + b"x" * 2000 + b"\n")
    log.close()
    ((source, text),) = read_tails(place).items()
    assert (source, text.endswith("x" * 2000 + "\n")) == ("agent-0000.log", True)


@pytest.mark.parametrize(
    ("python", "named", "gone"),
    [
        (sys.executable, "", False),
        ("/moved/bin/python", "", True),
        ("/moved/bin/python", "/in/the/image/python", False),
    ],
)
def test_an_interpreter_that_was_moved_since_the_submit_is_named(
    tmp_path: Path, python: str, named: str, gone: bool
) -> None:
    data = config()
    data["cluster"]["python"] = named
    world = World(tmp_path, data=data)
    world.tick()
    submitter = {"python": python, "package_root": "", "variables": {}}
    world.store.note_run(world.name, epoch=world.lease.epoch, now=world.clock.now, identity={"job": submitter})
    assert lost_interpreter(world.view) == (python if gone else "")
