"""A rank that holds up those with which it shares experts is named; ranks with popular experts are not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.blame.incidents import PATIENCE, play
from tests.trainer.agent.blame.test_blame_in_jobs import make  # noqa: F401  # a fixture
from tests.trainer.agent.job import LocalJob, until
from tests.trainer.agent.test_torch_ranks import data  # noqa: F401  # a fixture
from trainer.protocol.events import EventKind

pytestmark = [pytest.mark.multi, pytest.mark.proof, pytest.mark.timeout(600)]

MODEL = {
    "dim": 32, "layers": 2, "heads": 4, "kv_heads": 4, "ffn_dim": 64,
    "experts": {"count": 4, "per_token": 2, "ffn_dim": 48},
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {"ep 4": {"ep": 4}, "ep 2 x fsdp 2": {"ep": 2}}
IN_STAGES: dict[str, Any] = {"ep": 2, "pipeline": {"stages": 2}}
"""Peers of a stage wait in an exchange, and other stages for what this one sends."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_stops_before_an_exchange_is_named(layout: str, make: Callable[..., LocalJob]) -> None:  # noqa: F811
    """Its peers wait in a collective that it has not begun."""
    target = {"target": "stuck_in_experts:StuckInExperts", "path": [str(Path(__file__).parent)]}
    work = make(workload=target, parallel=LAYOUTS[layout], model=MODEL, train={"dtype": "float32"}).start()
    work.go()
    (incident,) = until(lambda: work.events(EventKind.INCIDENT)[:1], PATIENCE, work.story)
    work.close()
    assert (incident.data["rank"], incident.data["kind"]) == (2, "stuck_in_compute"), incident.data


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_dies_is_named_with_its_experts(layout: str, seed: int, make: Callable[..., LocalJob]) -> None:  # noqa: F811
    def shared(**over: Any) -> LocalJob:
        return make(**over, parallel=LAYOUTS[layout], model=MODEL, train={"dtype": "float32"})

    told = play("kill-rank", seed, shared)
    rank = int(told.culprit.removeprefix("rank "))
    assert told.culprit_right, told
    assert told.kind_right, told
    assert f"dp_shard {rank}, ep {rank % LAYOUTS[layout]['ep']}) was killed by SIGKILL" in told.reason


@pytest.mark.parametrize("kind", ["stop-rank", "hang-in-collective"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drills_are_told_as_in_any_other_layout(layout: str, kind: str, make: Callable[..., LocalJob]) -> None:  # noqa: F811
    def shared(**over: Any) -> LocalJob:
        return make(**over, parallel=LAYOUTS[layout], model=MODEL, train={"dtype": "float32"})

    told = play(kind, 1, shared)
    assert told.culprit_right, told
    assert told.kind_right, told


@pytest.mark.parametrize("kind", ["kill-rank", "stop-rank", "hang-in-send"])
def test_a_rank_of_a_stage_is_named_with_its_experts(kind: str, make: Callable[..., LocalJob]) -> None:  # noqa: F811
    def shared(**over: Any) -> LocalJob:
        return make(**over, parallel=IN_STAGES, model=MODEL, train={"dtype": "float32"})

    told = play(kind, 1, shared)
    rank = int(told.culprit.removeprefix("rank "))
    assert told.culprit_right, told
    assert told.kind_right, told
    assert f"pp {rank // 2}, dp_shard {rank % 2}, ep {rank % 2}" in told.reason, told
