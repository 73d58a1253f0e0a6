"""What one look at an attempt tells, before anybody judges it."""

import pytest

from orchestrator.controller.collect import leader_gone
from orchestrator.registry.records import Attempt
from orchestrator.scheduler.base import JobStatus
from orchestrator.states import AttemptState


def attempt(*nodes: str) -> Attempt:
    name = "orch-a-1-00000000"
    return Attempt(run="a", number=1, state=AttemptState.RUNNING, nonce="0" * 8, job_name=name, nodes=nodes)


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
    job = JobStatus(job_id="7", name="orch-a-1-00000000", state=state, nodes=nodes)
    assert leader_gone(attempt("n1", "n2", "n3"), job) == gone


def test_without_a_job_or_a_record_of_its_nodes_nothing_is_said():
    assert leader_gone(attempt("n1"), None) == ""
    assert leader_gone(attempt(), JobStatus(job_id="7", name="x", state="RUNNING", nodes=("n2",))) == ""
