"""Whom orch blames, and for what: faults in real jobs, each of a seeded rank and step."""

import os
from collections.abc import Callable

import pytest

from tests.trainer.agent.blame.incidents import KINDS, matrix, play
from tests.trainer.agent.job import LocalJob

pytestmark = pytest.mark.multi


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["desync-order"])
def test_the_right_rank_is_blamed_for_the_right_thing(kind: str, make: Callable[..., LocalJob]) -> None:
    told = play(kind, 0, make)
    assert told.culprit_right, told
    assert told.kind_right, told
    assert told.culprit in told.reason


@pytest.mark.proof
@pytest.mark.timeout(7200)
def test_forty_incidents(make: Callable[..., LocalJob], record_property: Callable[[str, object], None]) -> None:
    kinds = [kind for kind in KINDS if kind != "network-cut" or os.geteuid() == 0]
    told = [play(kind, seed, make) for kind in kinds for seed in range(4)]
    record_property("confusion matrix", matrix(told))
    record_property("incidents", len(told))
    record_property("culprit right", sum(one.culprit_right for one in told))
    record_property("kind right", sum(one.kind_right for one in told))
    wrong = [one for one in told if not (one.culprit_right and one.kind_right)]
    assert sum(one.culprit_right for one in told) >= 0.95 * len(told), wrong
    assert sum(one.kind_right for one in told) >= 0.90 * len(told), wrong
