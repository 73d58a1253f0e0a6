"""A stage of a pipeline that becomes slow is named: beside its peers where it has some, else beside its own past."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.agent.job import LocalJob, until
from trainer.protocol.events import EventKind
from trainer.protocol.requests import Request, RequestKind

pytestmark = [pytest.mark.multi, pytest.mark.proof, pytest.mark.timeout(600)]

LAYOUTS: dict[str, dict[str, Any]] = {
    "4 stages": {"pipeline": {"stages": 4}},
    "2 stages x fsdp 2": {"pipeline": {"stages": 2}},
}
MODEL = {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 4, "ffn_dim": 64}
KNOWN = 160, 40.0
"""Steps and seconds after which a rank's past is known: of pairs, too, a rank has to be slower than it was."""


def steps_of(work: LocalJob) -> int:
    return work.attempt.metrics.read_text().count("\n") if work.attempt.metrics.exists() else 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stage_that_becomes_slow_is_named(layout: str, seed: int, make: Callable[..., LocalJob]) -> None:
    rank = random.Random(f"{layout} {seed}").randrange(4)
    train = {"dtype": "float32", "batch_size": 16, "steps": 1_000_000}
    work = make(parallel=LAYOUTS[layout], model=MODEL, checkpoint={"every": 0}, train=train).start()
    work.go()
    until(lambda: work.events(EventKind.GENERATION_FIRST_STEP), 120, work.story)
    steps, seconds = KNOWN
    known = time.monotonic() + seconds
    until(lambda: time.monotonic() > known and steps_of(work) > steps, 400, work.story)
    assert work.events(EventKind.STRAGGLER) == [], work.story()
    Request(kind=RequestKind.DRILL, attempt=1, reason="a test", detail="slow-rank", value=rank).write(work.run.requests)
    until(lambda: work.events(EventKind.STRAGGLER), 240, work.story)
    work.close()
    said = [one.data for one in work.events(EventKind.STRAGGLER)]
    place = f"pp {rank}" if layout == "4 stages" else f"pp {rank // 2}, dp_shard {rank % 2}"
    assert [(one["rank"], one["section"]) for one in said] == [(rank, "forward")], said
    assert said[0]["reason"].endswith(f"rank {rank} is {place}"), said
    assert ("beside its neighbours" in said[0]["reason"]) == (layout == "4 stages")
