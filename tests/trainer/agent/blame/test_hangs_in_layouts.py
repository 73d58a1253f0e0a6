"""The rank that holds up the others is named in every layout: pipelines, rings, shared experts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.blame.incidents import BETWEEN_STAGES, HANGS, PATIENCE, play
from tests.trainer.agent.job import LocalJob, until
from trainer.protocol.events import EventKind

pytestmark = [pytest.mark.multi, pytest.mark.proof, pytest.mark.timeout(600)]

MODEL = {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 4, "ffn_dim": 64}
EXPERTS = {"experts": {"count": 4, "per_token": 2, "ffn_dim": 48}}


@dataclass(frozen=True)
class Layout:
    """`place` describes a rank's position in the mesh, as reasons do."""

    parallel: dict[str, Any]
    place: Callable[[int], str]
    stuck: str = ""  # workload in which a rank never begins an exchange
    model: dict[str, Any] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        train = {"dtype": "float32", **({"batch_size": 16} if "pipeline" in self.parallel else {})}
        return {"parallel": self.parallel, "model": {**MODEL, **(self.model or {})}, "train": train}


def pair(rank: int) -> str:
    return f"pp {rank // 2}"


LAYOUTS = {
    "4 stages": Layout({"pipeline": {"stages": 4}}, lambda rank: f"pp {rank}"),
    "2 stages x fsdp 2": Layout({"pipeline": {"stages": 2}}, pair),
    "2 stages x ddp 2": Layout({"pipeline": {"stages": 2}, "strategy": "ddp"}, pair),
    "2 stages x tp 2": Layout({"pipeline": {"stages": 2}, "tp": 2}, pair),
    "interleaved, 2 ranks x fsdp 2": Layout({"pipeline": {"stages": 4, "schedule": "interleaved_1f1b"}}, pair),
    "2 stages x ep 2": Layout(
        {"ep": 2, "pipeline": {"stages": 2}}, lambda rank: f"pp {rank // 2}, dp_shard {rank % 2}, ep {rank % 2}",
        model=EXPERTS,
    ),
    "ep 4": Layout({"ep": 4}, lambda rank: f"dp_shard {rank}, ep {rank}", "StuckInExperts", EXPERTS),
    "ep 2 x fsdp 2": Layout({"ep": 2}, lambda rank: f"dp_shard {rank}, ep {rank % 2}", "StuckInExperts", EXPERTS),
    "ring 4": Layout({"cp": 4, "cp_method": "ring"}, lambda rank: f"cp {rank}", "StuckInRing"),
    "ring 4 in ddp": Layout(  # only messages in a forward pass
        {"cp": 4, "cp_method": "ring", "strategy": "ddp"}, lambda rank: f"cp {rank}", "StuckInRing"
    ),
    "ring 2 in ddp 2": Layout(
        {"cp": 2, "cp_method": "ring", "strategy": "ddp"}, lambda rank: f"dp_replicate {rank // 2}, cp {rank % 2}",
        "StuckInRing",
    ),
    "ulysses 4": Layout({"cp": 4, "cp_method": "ulysses"}, lambda rank: f"cp {rank}", "StuckInRing"),
}  # fmt: skip
STAGES, WITH_EXPERTS, RINGS = list(LAYOUTS)[:5], list(LAYOUTS)[6:8], list(LAYOUTS)[8:]
IN_RINGS = [kind for kind in HANGS if kind not in ("hang-in-save", *BETWEEN_STAGES)]
CASES = [
    *((layout, kind, seed) for layout in STAGES for kind in ("stop-rank", *BETWEEN_STAGES) for seed in range(4)),
    *((layout, kind, 0) for layout in STAGES for kind in ("hang-in-forward", "hang-in-collective")),
    *(("2 stages x ep 2", kind, 1) for kind in ("kill-rank", "stop-rank", "hang-in-send")),
    *((layout, "kill-rank", seed) for layout in WITH_EXPERTS for seed in range(10)),
    *((layout, kind, 1) for layout in WITH_EXPERTS for kind in ("stop-rank", "hang-in-collective")),
    *((layout, kind, 1) for layout in RINGS for kind in IN_RINGS),
]


@pytest.mark.parametrize(("layout", "kind", "seed"), CASES)
def test_the_rank_with_the_fault_is_named(layout: str, kind: str, seed: int, make: Callable[..., LocalJob]) -> None:
    told = play(kind, seed, lambda **over: make(**over, **LAYOUTS[layout].settings))
    assert told.culprit_right, told
    assert told.kind_right, told
    assert told.culprit in told.reason
    assert LAYOUTS[layout].place(int(told.culprit.removeprefix("rank "))) in told.reason, told


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("layout", [*WITH_EXPERTS, *RINGS])
def test_a_rank_that_stops_before_an_exchange_is_named(layout: str, seed: int, make: Callable[..., LocalJob]) -> None:
    rank, call = (2 + seed) % 4, 9 + seed
    target = {"target": f"stuck_workloads:{LAYOUTS[layout].stuck}", "path": [str(Path(__file__).parent)]}
    work = make(workload=target, **LAYOUTS[layout].settings).start(environ={"STUCK": f"{rank} {call}"})
    work.go()
    (incident,) = until(lambda: work.events(EventKind.INCIDENT)[:1], PATIENCE, work.story)
    work.close()
    assert (incident.data["rank"], incident.data["kind"]) == (rank, "stuck_in_compute"), incident.data
    assert f"rank {rank} is {LAYOUTS[layout].place(rank)}" in incident.data["reason"]
