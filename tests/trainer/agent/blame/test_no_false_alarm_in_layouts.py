"""Real jobs whose ranks do different work: a pipeline, a ring, uneven experts. Nobody hangs, nobody is slow."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.agent.blame.test_no_false_alarm import EVERY, SLOW, assert_nothing_happened, busy, started, stop
from tests.trainer.agent.job import LocalJob
from tests.trainer.agent.test_torch_ranks import TINY, data  # noqa: F401  # a fixture
from trainer.protocol.events import EventKind

pytestmark = [pytest.mark.multi, pytest.mark.proof, pytest.mark.timeout(1200)]

SECONDS = 600.0
MODEL = {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 4, "ffn_dim": 64}
EXPERTS = {"experts": {"count": 8, "per_token": 1, "ffn_dim": 48, "balance_rate": 0.0}}
TRAIN = {**TINY["train"], "steps": 1_000_000, "batch_size": 16, "dtype": "float32"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "4 stages": {"parallel": {"pipeline": {"stages": 4}}, "model": MODEL},
    "ring 4": {"parallel": {"cp": 4, "cp_method": "ring"}, "model": MODEL},
    "ep 4, never balanced": {"parallel": {"ep": 4}, "model": {**MODEL, **EXPERTS}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_minutes_without_a_false_alarm(
    layout: str,
    warm_job: Callable[..., LocalJob],
    data: Any,  # noqa: F811
    record_property: Callable[[str, object], None],
) -> None:
    """Now on a busy machine and now on a quiet one, with a rank now and then that is slow for a good reason."""
    kinds = ("hang-in-data", "hang-in-forward")
    slow = [
        {"kind": kinds[place % 2], "rank": place % 4, "step": step, "value": SLOW["hang-in-data"]}
        for place, step in enumerate(range(40, 5000, EVERY))
    ]
    work = started(warm_job, data, slow, train=TRAIN, **LAYOUTS[layout])
    over = time.monotonic() + SECONDS
    while time.monotonic() < over:
        with busy(4):
            time.sleep(min(20.0, max(0.0, over - time.monotonic())))
        time.sleep(min(10.0, max(0.0, over - time.monotonic())))
    stop(work)
    assert assert_nothing_happened(work) > 1
    assert work.events(EventKind.STRAGGLER) == [], work.story()
    record_property(f"real seconds without a false alarm ({layout})", SECONDS)
