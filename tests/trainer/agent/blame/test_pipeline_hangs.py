"""A rank that holds up its pipeline is named: others wait for it in receives, of which gloo keeps no records."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.agent.blame.incidents import Told, play
from tests.trainer.agent.blame.test_blame_in_jobs import make  # noqa: F401  # a fixture
from tests.trainer.agent.job import LocalJob
from tests.trainer.agent.test_torch_ranks import data  # noqa: F401  # a fixture

pytestmark = [pytest.mark.multi, pytest.mark.proof, pytest.mark.timeout(600)]

LAYOUTS: dict[str, dict[str, Any]] = {
    "4 stages": {"pipeline": {"stages": 4}},
    "2 stages x fsdp 2": {"pipeline": {"stages": 2}},
    "2 stages x ddp 2": {"pipeline": {"stages": 2}, "strategy": "ddp"},
    "2 stages x tp 2": {"pipeline": {"stages": 2}, "tp": 2},
    "interleaved, 2 ranks x fsdp 2": {"pipeline": {"stages": 4, "schedule": "interleaved_1f1b"}},
}
MODEL = {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 4, "ffn_dim": 64}


def told_of(layout: str, kind: str, seed: int, make: Callable[..., LocalJob]) -> Told:  # noqa: F811
    def staged(**over: Any) -> LocalJob:
        train = {"dtype": "float32", "batch_size": 16}
        return make(**over, parallel=LAYOUTS[layout], model=MODEL, train=train)

    return play(kind, seed, staged)


def assert_named(told: Told, layout: str) -> None:
    rank = int(told.culprit.removeprefix("rank "))
    assert told.culprit_right, told
    assert told.kind_right, told
    stage = rank if layout == "4 stages" else rank // 2
    assert f"rank {rank} is pp {stage}" in told.reason, told


CASES = [
    *((kind, seed) for kind in ("stop-rank", "hang-in-send", "skip-send") for seed in range(4)),
    ("hang-in-forward", 0),
    ("hang-in-collective", 0),
]
"""Twenty stages that are stopped, and forty that never send something, over all layouts."""


@pytest.mark.parametrize(("kind", "seed"), CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_holds_up_a_pipeline_is_named(
    layout: str, kind: str, seed: int, make: Callable[..., LocalJob]  # noqa: F811
) -> None:  # fmt: skip
    assert_named(told_of(layout, kind, seed, make), layout)
