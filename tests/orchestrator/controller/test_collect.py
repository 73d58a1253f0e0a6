"""What one look at an attempt tells, before anybody judges it."""

from pathlib import Path

import pytest

from orchestrator.controller.collect import collect, leader_gone, taken_out
from orchestrator.controller.sight import Sight
from orchestrator.controller.view import RunView
from orchestrator.controller.watch import Watch
from orchestrator.registry.records import Attempt
from orchestrator.scheduler.base import JobStatus
from orchestrator.states import AttemptState
from tests.scenarios.world import World, config


def attempt(*nodes: str) -> Attempt:
    name = "orch-a-1-00000000"
    return Attempt(run="a", number=1, state=AttemptState.RUNNING, nonce="0" * 8, job_name=name, job_id="7", nodes=nodes)


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
    watch = Watch(lambda: 0.0)
    assert taken_out(job("RUNNING", "n1", "n2", "n3"), watch, "a/1") == ()
    now = job(state, *nodes)
    assert leader_gone(attempt("n1", "n2", "n3"), now, taken_out(now, watch, "a/1")) == gone


def test_a_name_that_slurm_never_told_is_not_gone():
    watch = Watch(lambda: 0.0)
    for _ in range(2):
        now = job("RUNNING", "n1", "n2")
        assert leader_gone(attempt("n1.cluster.example", "n2.cluster.example"), now, taken_out(now, watch, "a/1")) == ""


def test_a_node_that_was_taken_out_stays_so_when_its_job_has_ended():
    watch = Watch(lambda: 0.0)
    for names in (("n1", "n2"), ("n1",)):
        taken_out(job("RUNNING", *names), watch, "a/1")
    assert taken_out(job("COMPLETED", "n1", "n2"), watch, "a/1") == ("n2",)
    assert taken_out(None, watch, "a/1") == ("n2",)
    assert taken_out(job("RUNNING", "n1"), watch, "a/2") == ()


@pytest.mark.parametrize(("spares", "gone"), [(0, ()), (1, ("n1",))])
def test_only_a_job_with_spares_goes_on_without_a_node(tmp_path: Path, spares: int, gone: tuple[str, ...]):
    data = config()
    world = World(tmp_path, data={**data, "cluster": {**data["cluster"], "spare_nodes": spares}})
    world.tick()
    view = RunView(run=world.run, attempts=(attempt("n1"),), config=next(iter(world.controller._configs.values())))
    watch = Watch(lambda: 0.0)
    for names in (("n1", "n2"), ("n2",)):
        found = collect(view, Sight(answered=True, swept=True, polled={}, found=(job("RUNNING", *names),)), watch)
    assert (found.gone, found.leader_gone) == (gone, "".join(gone))


def test_without_a_job_or_a_record_of_its_nodes_nothing_is_said():
    assert leader_gone(attempt("n1"), None, ("n1",)) == ""
    assert leader_gone(attempt(), job("RUNNING", "n2"), ("n1",)) == ""
