"""Without the launch token that names this job, no agent trains."""

import json

import pytest

from tests.trainer.agent.job import until
from trainer.protocol.config import config_digest
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import AttemptOutcome
from trainer.protocol.launch_token import LaunchToken, revoke


@pytest.mark.parametrize(
    ("token", "why"),
    [({"job_id": "4242-1"}, "is for job 4242-1"), ({"attempt": 2}, "is for attempt 2, this is attempt 1")],
)
def test_a_token_of_another_job_or_attempt_is_refused(job, token, why):
    work = job()
    work.go(**token)
    work.start()
    assert work.wait(10) == [78, 78], work.story()
    assert {event.data["action"] for event in work.events(EventKind.DECISION)} == {"refuse"}
    assert why in work.attempt.agent_log(0).read_text()
    assert why in (work.attempt.submission / "1.err").read_text()
    assert not work.attempt.outcome.exists()
    assert work.notes() == []


def test_a_job_that_slurm_restarted_is_refused(job):
    work = job(nodes=1)
    work.go(job_id="77")
    environ = {"SLURM_JOB_ID": "77", "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_RESTART_COUNT": "1"}
    work.start(environ=environ, local=False)
    assert work.wait(10) == [78], work.story()
    assert "Slurm has restarted job 77" in work.attempt.agent_log(0).read_text()


def test_an_expedited_job_waits_for_the_go_of_the_attempt_that_continues_in_it(job):
    work = job(nodes=1)
    environ = {
        "SLURM_JOB_ID": "77", "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_RESTART_COUNT": "1",
        "ORCH_REQUEUE": "expedite",
    }  # fmt: skip
    work.go(job_id="77")
    revoke(work.attempt.go)
    stale, later = work.run.attempt(2), work.run.attempt(3)
    for place in (stale, later):
        place.make()
    LaunchToken(attempt=2, epoch=1, job_id="77", nonce="00000002").write(stale.go)
    work.start(environ=environ, local=False)
    with pytest.raises(AssertionError):
        work.wait(1.5)
    assert not stale.agent_log(0).exists()
    LaunchToken(attempt=3, epoch=1, job_id="77", nonce="00000003", restarts=1).write(later.go)
    assert work.wait() == [0], work.story()
    assert AttemptOutcome.read(later.outcome).attempt == 3
    assert not work.attempt.outcome.exists()


def test_agents_that_are_held_wait_for_go(job):
    work = job().start()
    with pytest.raises(AssertionError):
        work.wait(1.5)
    assert work.notes() == []
    work.go()
    assert work.wait() == [0, 0], work.story()


def test_a_job_of_another_size_than_configured_is_refused(job):
    work = job(nodes=2)
    work.nodes = 1
    work.go()
    work.start()
    assert work.wait(10) == [78], work.story()
    assert "configured for 2" in work.attempt.agent_log(0).read_text()


def test_a_config_that_was_edited_is_refused(job):
    work = job(nodes=1)
    work.go(config_digest=config_digest(work.run.config))
    edited = json.loads(work.run.config.read_text())
    edited["optimizer"] = {**edited.get("optimizer", {}), "lr": 1.0}
    work.run.config.write_text(json.dumps(edited))
    work.start()
    assert work.wait(10) == [78], work.story()
    assert "was edited" in work.attempt.agent_log(0).read_text()


def test_an_attempt_with_a_config_of_its_own_has_that(job):
    work = job(nodes=1)
    own = json.loads(work.run.config.read_text())
    own["cluster"] = {**own["cluster"], "ranks_per_node": 1}
    work.attempt.config.write_text(json.dumps(own))
    work.go(config_digest=config_digest(work.attempt.config))
    work.start()
    assert work.wait(20) == [0], work.story()
    assert {event.data["world"] for event in work.events(EventKind.GENERATION_STARTED)} == {1}


def test_an_attempt_that_is_fenced_off_ends_soon(job):
    work = job("hang@*@*").start()
    work.go()
    until(lambda: len(work.notes()) == 4, 20, work.story)
    revoke(work.attempt.go)
    assert work.wait(15) == [75, 75], work.story()
    assert "fenced this attempt off" in work.outcome().reason


def test_a_token_that_somebody_deleted_is_not_called_revoked(job):
    work = job("hang@*@*").start()
    work.go()
    until(lambda: len(work.notes()) == 4, 20, work.story)
    work.attempt.go.unlink()
    assert work.wait(15) == [75, 75], work.story()
    assert f"{work.attempt.go} is missing: it was deleted, but not by orch" in work.outcome().reason


def test_a_leader_without_the_named_interface_says_so_and_is_not_retried(job):
    work = job(nodes=1, cluster={"interface": "nowhere0"})
    work.go()
    work.start()
    assert work.wait(15) == [78], work.story()
    (event,) = work.events(EventKind.DECISION)
    assert "cluster.interface=nowhere0" in event.data["reason"]
