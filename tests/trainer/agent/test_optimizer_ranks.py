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
    "train": {"steps": 12, "dtype": "float32", "lr": 0.05},
}


def ended(work: LocalJob, generations: int) -> dict[str, Any]:
    work.start()
    work.go()
    assert work.wait(90) == [0, 0], work.story()
    assert work.outcome().generations == generations, work.story()
    return json.loads(work.attempt.final.read_text())


@pytest.mark.parametrize("kind", ["kill-rank", "nan"])
def test_a_restart_from_memory_ends_with_the_bits_of_an_undisturbed_run(
    training: Callable[..., LocalJob],  # noqa: F811
    tmp_path: Path,
    kind: str,
) -> None:
    hurt = training(**OVER, drill={"events": [{"kind": kind, "rank": 1, "step": 7}]})
    first = ended(hurt, 2)
    (restored,) = hurt.events(EventKind.CHECKPOINT_RESTORED)
    assert restored.data["tier"] == "memory"
    assert hurt.events(EventKind.CHECKPOINT_INCOMPLETE) == []

    left_out = skipped_batches.read(hurt.attempt)
    hurt.run.path.rename(tmp_path / "hurt")
    calm = training(**OVER)
    skipped_batches.add(calm.attempt, [Skip(step=one.step, position=one.position, reason="told") for one in left_out])
    assert ended(calm, 1)["weights_digest"] == first["weights_digest"]
