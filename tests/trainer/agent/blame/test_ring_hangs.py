"""A rank that holds up those with which it shares sequences is named: they wait for it in messages and collectives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.blame.incidents import BETWEEN_STAGES, HANGS, PATIENCE, play
from tests.trainer.agent.blame.test_blame_in_jobs import make  # noqa: F401  # a fixture
from tests.trainer.agent.job import LocalJob, until
from tests.trainer.agent.test_torch_ranks import data  # noqa: F401  # a fixture
from trainer.protocol.events import EventKind

pytestmark = [pytest.mark.multi, pytest.mark.proof, pytest.mark.timeout(600)]

LAYOUTS: dict[str, dict[str, Any]] = {
    "ring 4": {"cp": 4, "cp_method": "ring"},
    "ring 4 in ddp": {"cp": 4, "cp_method": "ring", "strategy": "ddp"},  # nothing but messages in a forward pass
    "ring 2 in ddp 2": {"cp": 2, "cp_method": "ring", "strategy": "ddp"},
    "ulysses 4": {"cp": 4, "cp_method": "ulysses"},
}


@pytest.mark.parametrize("kind", [kind for kind in HANGS if kind not in ("hang-in-save", *BETWEEN_STAGES)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drills_are_told_as_in_any_other_layout(layout: str, kind: str, make: Callable[..., LocalJob]) -> None:  # noqa: F811
    def shared(**over: Any) -> LocalJob:
        model = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 4, "ffn_dim": 64}
        return make(**over, parallel=LAYOUTS[layout], model=model, train={"dtype": "float32"})

    told = play(kind, 1, shared)
    assert told.culprit_right, told
    assert told.kind_right, told
    if LAYOUTS[layout]["cp"] == 2:
        rank = int(told.culprit.removeprefix("rank "))
        # Its own error may come before the verdict of its peers: the words differ.
        assert told.culprit in told.reason
        assert f"dp_replicate {rank // 2}, cp {rank % 2}" in told.reason


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_stops_within_attention_is_named(
    layout: str, seed: int, make: Callable[..., LocalJob]  # noqa: F811
) -> None:  # fmt: skip
    """Its neighbours wait for a message, or for a collective that it has not begun; nothing else tells them apart."""
    rank, call = (2 + seed) % 4, 9 + seed
    target = {"target": "stuck_in_ring:StuckInRing", "path": [str(Path(__file__).parent)]}
    work = make(workload=target, parallel=LAYOUTS[layout], train={"dtype": "float32"})
    work.start(environ={"STUCK": f"{rank} {call}"})
    work.go()
    (incident,) = until(lambda: work.events(EventKind.INCIDENT)[:1], PATIENCE, work.story)
    work.close()
    assert (incident.data["rank"], incident.data["kind"]) == (rank, "stuck_in_compute"), incident.data
    place = f"cp {rank}" if LAYOUTS[layout]["cp"] == 4 else f"dp_replicate {rank // 2}, cp {rank % 2}"
    assert f"rank {rank} is {place}" in incident.data["reason"]
