"""What people and programs see of an attempt that is smaller than its run."""

import time

import pytest

from orchestrator.recovery.elastic_policy import choose_smaller_world, on_nodes
from orchestrator.states import AttemptState
from tests.orchestrator.cli.conftest import Seeds, Type

WHY = "1 node was missing for 1h01m (recovery.patience=3600)"


@pytest.fixture
def run(seeds: Seeds) -> str:
    """A run whose second attempt trains on three of its four nodes."""
    name, now = seeds.run(), time.time()
    digest = seeds.store.put_config({"name": "tiny", "cluster": {"nodes": 3}, "train": {"steps": 200}})
    seeds.store.move_attempt(name, 1, AttemptState.ENDED, "n4 is down", epoch=seeds.epoch, now=now, ended_at=now)
    world = choose_smaller_world({"nodes": 3}, {"nodes": 4}, seeds.digest, WHY)
    seeds.store.add_attempt(
        name, nonce="4567cdef", excluded=(), epoch=seeds.epoch, now=now, config_digest=digest, smaller_world=world,
        reason=f"next attempt {on_nodes(world)}",
    )  # fmt: skip
    return name


def test_show_says_how_many_nodes_and_why(orch: Type, run: str) -> None:
    said = " ".join(orch("show", run).out.split())
    assert f"size attempt 2 runs on 3 of 4 nodes: {WHY}" in said
    assert "changed" not in said, "nobody has changed the run's configuration"


def test_events_have_the_decision(orch: Type, run: str) -> None:
    assert f"the attempt is INTENT: next attempt on 3 of 4 nodes: {WHY}" in orch("events", run).out


def test_programs_get_the_numbers(orch: Type, run: str, seeds: Seeds) -> None:
    data = orch("show", run, "--json").data
    assert [attempt["smaller_world"] for attempt in data["attempts"]] == [
        None,
        {"nodes": 3, "spare_nodes": 0, "of": 4, "of_spare_nodes": 0, "reason": WHY, "base": seeds.digest},
    ]
    assert data["config_changes"] == []
    assert data["config_digest"] == seeds.digest
