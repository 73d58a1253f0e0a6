"""Faults that no restart mends, with real agents and ranks: the attempt ends for good."""

from collections.abc import Callable

import pytest

from tests.trainer.agent.job import LocalJob
from tests.trainer.agent.test_torch_ranks import training  # noqa: F401  # fixtures

pytestmark = pytest.mark.multi


def test_a_step_that_stays_bad_holds_the_run(training: Callable[..., LocalJob]) -> None:  # noqa: F811
    work = training(drill={"events": [{"kind": "nan", "rank": 1, "step": 3, "generation": 0}]}).ends(78, 78, seconds=90)
    outcome = work.outcome()
    assert (outcome.generations, outcome.failure.kind, outcome.failure.node) == (2, "numeric", None)
    assert "step 3 was bad before, and its batch at that time was skipped" in outcome.reason


def test_different_collectives_end_the_attempt_for_good(training: Callable[..., LocalJob]) -> None:  # noqa: F811
    work = training(drill={"events": [{"kind": "desync-shape", "rank": 1, "step": 4, "generation": 0}]}).ends(
        78, 78, seconds=90
    )
    outcome = work.outcome()
    assert (outcome.generations, outcome.failure.kind, outcome.failure.rank) == (1, "desync", 1)
