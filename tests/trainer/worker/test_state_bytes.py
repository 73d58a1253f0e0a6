"""What a rank holds of the model's states is what the formula says, to the byte."""

from collections.abc import Callable

import pytest

from tests.trainer.worker.conftest import TINY, Run, merged
from tests.trainer.worker.test_strategies import STRATEGIES
from trainer.contract.config import JobConfig, build
from trainer.contract.events import EventKind
from trainer.contract.model_shapes import parameters
from trainer.contract.state_bytes import state_bytes

pytestmark = pytest.mark.multi

UNEVEN = {"dim": 40, "heads": 4, "kv_heads": 4, "ffn_dim": 68}
"""Rows of 40 and 68 leave shards of different sizes on four ranks; those of norms, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "zero1 2 x tp 2" else pytest.mark.proof) for name in STRATEGIES]
)
def test_states_are_what_the_formula_says(
    undisturbed: Callable[..., Run], name: str, record_property: Callable[[str, object], None]
) -> None:
    world, parallel = STRATEGIES[name]
    over = {"parallel": parallel, "model": UNEVEN, "train": {"steps": 1}}
    run = undisturbed(world, **over)
    (event,) = [one for one in run.events() if one.kind == EventKind.GENERATION_FIRST_STEP]
    config = build(JobConfig, merged(TINY, over))
    due = state_bytes(parameters(config.model), config.parallel, world)
    assert event.data["held"] == {
        "parameters": due.parameters, "gradients": due.gradients, "optimizer": due.optimizer,
        "on_host": list(due.on_host),
    }  # fmt: skip
    record_property(f"bytes of states on rank 0, {name}", due.total)
