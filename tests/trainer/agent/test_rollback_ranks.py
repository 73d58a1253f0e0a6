"""Rung 1 with real agents and ranks: a bad step is rolled back, its batch left out, and the run finishes."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.agent.job import LocalJob
from tests.trainer.agent.test_torch_ranks import TINY, data, training  # noqa: F401  # fixtures
from trainer.contract import skipped_batches
from trainer.contract.events import EventKind
from trainer.contract.failures.outcome import AttemptResult

pytestmark = pytest.mark.multi

BATCH = TINY["train"]["batch_size"]


def nan(step: int, **fields: int) -> dict[str, Any]:
    return {"kind": "nan", "rank": 1, "step": step, **fields}


def test_a_step_that_is_no_number_is_rolled_back_and_the_run_finishes(
    training: Callable[..., LocalJob],  # noqa: F811
) -> None:
    work = training(drill={"events": [nan(6)]}).start()
    work.go()
    assert work.wait(90) == [0, 0], work.story()
    assert (work.outcome().result, work.outcome().generations) == (AttemptResult.FINISHED, 2)
    decision, _ = work.events(EventKind.DECISION)
    assert decision.data["action"] == "roll_back"
    assert "rollback 1 of 3, skipping that batch" in decision.data["reason"]
    (left_out,) = work.events(EventKind.BATCH_SKIPPED)
    assert (left_out.data["step"], left_out.data["position"]) == (6, 5 * BATCH)
    assert [(one.step, one.position) for one in skipped_batches.read(work.attempt)] == [(6, 5 * BATCH)]


def test_a_step_that_stays_bad_holds_the_run(training: Callable[..., LocalJob]) -> None:  # noqa: F811
    work = training(drill={"events": [nan(3, generation=0)]}).start()
    work.go()
    assert work.wait(90) == [78, 78], work.story()
    outcome = work.outcome()
    assert outcome.failure is not None
    assert (outcome.generations, outcome.failure.kind, outcome.failure.node) == (2, "numeric", None)
    assert "step 3 was bad before, and the batch it had then was skipped" in outcome.reason


def test_different_collectives_end_the_attempt_for_good(training: Callable[..., LocalJob]) -> None:  # noqa: F811
    work = training(drill={"events": [{"kind": "desync-shape", "rank": 1, "step": 4, "generation": 0}]}).start()
    work.go()
    assert work.wait(90) == [78, 78], work.story()
    outcome = work.outcome()
    assert outcome.failure is not None
    assert (outcome.generations, outcome.failure.kind, outcome.failure.rank) == (1, "desync", 1)
