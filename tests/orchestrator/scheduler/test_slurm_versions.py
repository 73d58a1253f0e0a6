"""Recorded answers of three Slurm versions: orch reads the same facts in each."""

from pathlib import Path

import pytest

from orchestrator.controller.submission_limits import read_sizes
from orchestrator.scheduler.interface import ENDED_STATES, QUEUED_STATES, RUNNING_STATES, Resources
from orchestrator.scheduler.scheduler_instance import read_instance
from orchestrator.scheduler.slurm.command_output import ended_jobs, read_accounting, read_node_states, read_queue
from orchestrator.scheduler.slurm.node_capacity import count_usable
from orchestrator.scheduler.slurm.slurm_scheduler import SlurmScheduler
from tests.fakes.recorded_slurm import VERSIONS, RecordedSlurm
from tests.orchestrator.scheduler.conftest import Program, printing
from tests.orchestrator.scheduler.test_slurm_text import accounting


@pytest.fixture(params=VERSIONS)
def recorded(request: pytest.FixtureRequest) -> RecordedSlurm:
    return RecordedSlurm(request.param)


ENDS = {
    "succeeds": ("COMPLETED", 0, None),
    "exits-3": ("FAILED", 3, None),
    "is-killed": ("FAILED", None, 9),
    "is-terminated": ("FAILED", None, 15),
    "loses-its-node": ("NODE_FAIL", None, None),
}
"""State, exit code and signal."""


def test_how_a_job_ended_is_the_same_in_every_version(recorded: RecordedSlurm) -> None:
    queue = {job.name: job for job in read_queue(recorded.queue()).jobs}
    rows = {job.name: job for job in ended_jobs(read_accounting(recorded.accounting()).jobs)}
    for jobs in (queue, rows):
        seen = {name: (jobs[name].state, jobs[name].exit_code, jobs[name].signal) for name in ENDS}
        assert seen == ENDS
    assert [queue[name].exit_code for name in ("exits-128", "exits-137")] == [128, 137]
    # Before 25.11 sacct takes 128 off: what is left of 128 is unknown, and no success.
    assert rows["exits-128"].exit_code in (None, 128)


STATES = {
    "runs": ("RUNNING", False, 0),
    "is-held": ("PENDING", True, 0),
    "waits": ("PENDING", False, 0),
    "is-requeued-plain": ("PENDING", False, 1),
    "is-requeued-held": ("PENDING", True, 1),
    "is-requeued-special": ("SPECIAL_EXIT", False, 1),
    "is-cancelled": ("CANCELLED", False, 0),
    "is-cancelled-while-it-waits": ("CANCELLED", False, 0),
    "is-preempted": ("PREEMPTED", False, 0),
}
"""State, whether it is held, restarts."""


def test_states_of_the_queue_are_the_same_in_every_version(recorded: RecordedSlurm) -> None:
    jobs, whole = read_queue(recorded.queue())
    found = {job.name: job for job in jobs}  # the last one of a name
    assert whole
    assert {name: (found[name].state, found[name].held, found[name].restarts) for name in STATES} == STATES
    assert found["reaches-its-limit"].state == "TIMEOUT"
    assert {job.state for job in jobs} <= QUEUED_STATES | RUNNING_STATES | ENDED_STATES
    assert found["runs"].nodes == ("n1",)
    assert found["runs"].settings["time limit"] == "10:00"


def test_a_requeued_job_is_one_job_and_its_old_row_in_accounting_is_none(
    recorded: RecordedSlurm, program: Program, tmp_path: Path
) -> None:
    job_id = recorded.job_id("is-requeued-plain")
    rows = recorded.accounting(lambda row: row["JobIDRaw"] == job_id)
    assert "REQUEUED" in rows
    program("squeue", printing(tmp_path, "queue", recorded.queue(lambda row: row["JobID"] == job_id)))
    program("sacct", printing(tmp_path, "rows", rows))
    (job,) = SlurmScheduler().find("is-requeued")
    assert (job.state, job.restarts) == ("PENDING", 1)
    assert SlurmScheduler().poll([job_id]) == {job_id: job}
    # Cancelled before it began again, it leaves no other row; the queue forgets it in the end.
    program("squeue", "true")
    assert SlurmScheduler().find("is-requeued", {job_id}) == []
    assert SlurmScheduler().poll([job_id]) == {}


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "CANCELLED", "REQUEUED", "RESIZING"])
def test_a_row_that_no_slurm_will_ever_change_is_no_job(program: Program, tmp_path: Path, state: str) -> None:
    """PENDING and RUNNING stay behind where slurmctld loses its newest jobs, CANCELLED where it loses its state."""
    program("squeue", "true")
    program("sacct", printing(tmp_path, "rows", accounting(JobIDRaw="7", State=state, ExitCode="0:0", End="Unknown")))
    assert SlurmScheduler().poll(["7"]) == {}


def test_of_a_requeued_job_that_has_ended_the_newest_row_counts(program: Program, tmp_path: Path) -> None:
    rows = (
        accounting(JobIDRaw="7", State="NODE_FAIL", Submit="2026-11-21T01:00:00")
        + accounting(JobIDRaw="7", State="REQUEUED", Submit="2026-11-21T02:00:00")
        + accounting(JobIDRaw="7", State="FAILED", ExitCode="78:0", Submit="2026-11-21T03:00:00")
    )
    program("squeue", "true")
    program("sinfo", "true")
    program("sacct", printing(tmp_path, "rows", rows))
    job = SlurmScheduler().poll(["7"])["7"]
    assert (job.state, job.exit_code, job.submit_time) == ("FAILED", 78, "2026-11-21T03:00:00")


def test_nodes_are_read_the_same_in_every_version(recorded: RecordedSlurm) -> None:
    nodes = frozenset({"n1", "n2", "n3", "n4"})
    shown = recorded.asked["sinfo states"]["stdout"]
    assert read_node_states(shown, nodes, frozenset({"DRAINED", "DRAINING"})) == {"n3"}
    assert count_usable(Resources(nodes=4), (), recorded.asked["sinfo usable"]["stdout"]) == 4
    assert read_sizes(recorded.asked["sinfo sizes"]["stdout"], "high") == 4
    assert read_sizes(recorded.asked["sinfo sizes"]["stdout"], "") == 4


def test_which_slurm_answers_is_read_the_same_in_every_version(recorded: RecordedSlurm) -> None:
    assert read_instance(recorded.asked["config"]).startswith("lab@")


def test_a_job_that_left_while_its_script_was_asked_for_is_not_taken_for_a_strangers(
    recorded: RecordedSlurm, program: Program, tmp_path: Path
) -> None:
    """`scontrol write batch_script` succeeds without a word on stdout for a job that Slurm no longer has."""
    answer = recorded.asked["script of an unknown job"]
    assert (answer["exit"], answer["stdout"]) == (0, "")
    job_id = recorded.job_id("is-held")
    program(
        "squeue", printing(tmp_path, "queue", recorded.queue(lambda row: row["JobID"] == job_id).replace("orch:", ""))
    )
    program("scontrol", "true")
    assert [job.script_tag for job in SlurmScheduler().find("orch-", {job_id})] == [None]
