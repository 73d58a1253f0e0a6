"""What a rank holds of the model's states, to the byte; `test_expert_strategies.py` has samples for the fast tests."""

from collections.abc import Callable

import pytest

from tests.trainer.conftest import Run
from tests.trainer.parallel.apply.layout_table import DENSE
from tests.trainer.parallel.apply.state_bytes import expected_states
from trainer.protocol.events import EventKind

UNEVEN = {"dim": 40, "heads": 4, "kv_heads": 4, "ffn_dim": 68}
"""Rows of 40 and 68 leave shards of different sizes on four ranks; those of norms, too."""


@pytest.mark.multi
@pytest.mark.proof
@pytest.mark.parametrize("name", DENSE)
def test_every_rank_holds_its_share(undisturbed: Callable[..., Run], name: str) -> None:
    layout = DENSE[name]
    over = {"model": UNEVEN, "train": {"steps": 1}}
    run = undisturbed(layout.world, parallel=dict(layout.parallel), **over)
    (event,) = [one for one in run.events() if one.kind == EventKind.GENERATION_FIRST_STEP]
    assert event.data["held"] == expected_states(layout.config(**over))
