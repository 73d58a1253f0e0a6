"""Counts in an optimizer's groups survive a warm restart from memory and a rollback, with real agents and ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.job import LocalJob
from tests.trainer.agent.test_torch_ranks import data, training  # noqa: F401  # fixtures
from trainer.contract import skipped_batches
from trainer.contract.events import EventKind
from trainer.contract.skipped_batches import Skip

pytestmark = pytest.mark.multi

WORKERS = Path(__file__).parent.parent / "worker"
OVER = {
    "workload": {
        "target": "any_optimizer:Stateful",
        "path": [str(WORKERS)],
        "args": {"optimizer": "schedulefree:AdamWScheduleFree", "rows": 2, "width": 6},
    },
    "train": {"steps": 12, "dtype": "float32"},
    "optimizer": {"lr": 0.05},
}


def ended(work: LocalJob, generations: int) -> dict[str, Any]:
    work.start()
    work.go()
    assert work.wait(90) == [0, 0], work.story()
    assert work.outcome().generations == generations, work.story()
    return json.loads(work.attempt.final.read_text())


def test_restarts_from_memory_end_with_the_bits_of_a_run_that_was_told_to_leave_the_batch_out(
    training: Callable[..., LocalJob],  # noqa: F811
) -> None:
    """A rollback, and then a rank is killed."""
    bad, fatal = [{"kind": kind, "rank": 1, "step": step} for kind, step in (("nan", 7), ("kill-rank", 10))]
    hurt = training(**OVER, drill={"events": [{**bad, "generation": 1}, {**fatal, "generation": 2}]})
    first = ended(hurt, 3)
    restored = hurt.events(EventKind.CHECKPOINT_RESTORED)
    assert [event.data["tier"] for event in restored] == ["memory", "memory"]
    assert hurt.events(EventKind.CHECKPOINT_INCOMPLETE) == []

    (left_out,) = skipped_batches.read(hurt.attempt)
    told = training(**OVER, folder="told")
    skipped_batches.add(told.attempt, [Skip(step=left_out.step, position=left_out.position, reason="told")])
    assert ended(told, 1)["weights_digest"] == first["weights_digest"]
