"""A stage of a pipeline that becomes slow is named: beside its peers where it has some, else beside its own past."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.agent.job import LocalJob, until
from tests.trainer.agent.test_blame_in_jobs import make  # noqa: F401  # a fixture
from tests.trainer.agent.test_torch_ranks import data  # noqa: F401  # a fixture
from trainer.contract.events import EventKind

pytestmark = [pytest.mark.multi, pytest.mark.proof, pytest.mark.timeout(600)]

LAYOUTS: dict[str, dict[str, Any]] = {
    "4 stages": {"pipeline": {"stages": 4}},
    "2 stages x fsdp 2": {"pipeline": {"stages": 2}},
}
MODEL = {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 4, "ffn_dim": 64}
MORE_STEPS = 200
"""In which it has to be named."""


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stage_that_becomes_slow_is_named(layout: str, seed: int, make: Callable[..., LocalJob]) -> None:  # noqa: F811
    """After so many steps that its past is known: of pairs, too, a rank has to be slower than it was."""
    dice = random.Random(f"{layout} {seed}")
    rank, step = dice.randrange(4), dice.randrange(108, 130)
    event = {"kind": "slow-rank", "rank": rank, "step": step, "value": 0.1}
    work = make(
        parallel=LAYOUTS[layout], model=MODEL, drill={"events": [event]}, checkpoint={"every": 0},
        train={"dtype": "float32", "batch_size": 16, "steps": step + MORE_STEPS},
    ).start()  # fmt: skip
    work.go()

    def told() -> list[dict[str, Any]]:
        over = [one for one in work.events(EventKind.GENERATION_ENDED) if not work.events(EventKind.STRAGGLER)]
        assert not over, work.story()
        return [one.data for one in work.events(EventKind.STRAGGLER)]

    said = until(told, 500, work.story)
    work.close()
    place = f"pp {rank}" if layout == "4 stages" else f"pp {rank // 2}, dp_shard {rank % 2}"
    assert [(one["rank"], one["section"]) for one in said] == [(rank, "forward")], said
    assert said[0]["reason"].endswith(f"rank {rank} is {place}"), said
    assert ("beside its neighbours" in said[0]["reason"]) == (layout == "4 stages")
