"""Node benchmark of real ranks: its figures, its duration, and no side effects."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.warm_programs import WarmPrograms

PROGRAM = "tests.trainer.worker.startup.node_benchmark_ranks"
Measured = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def measured(programs: WarmPrograms, tmp_path: Path) -> Measured:
    def of(**wanted: object) -> list[dict[str, Any]]:
        (found,) = programs.results(PROGRAM, [[json.dumps({"folder": str(tmp_path), **wanted})]])
        return found

    return of


@pytest.mark.multi
def test_every_rank_tells_what_it_has_measured(measured):
    ranks = measured(world=4, local=2)
    for rank in ranks:
        assert rank["said"]["matmul"] > 1e8
        assert rank["said"]["memory"] > 1e7
        assert all(seconds > 0 for _, seconds in rank["said"]["pairs"])
    # Two nodes of two ranks: their first ranks meet twice, and every rank meets its neighbour.
    assert [[peer for peer, _ in rank["said"]["pairs"]] for rank in ranks] == [[2, 2, 1], [0], [0, 0, 3], [2]]


@pytest.mark.multi
@pytest.mark.parametrize(("seconds", "rounds"), [(0.001, 0), (600.0, 1)])
def test_all_ranks_stop_measuring_together_when_the_time_is_over(measured, seconds, rounds):
    ranks = measured(world=4, local=1, seconds=seconds)
    assert [len(rank["said"]["pairs"]) for rank in ranks] == [rounds] * 4
    assert all(rank["said"]["matmul"] > 1e8 for rank in ranks)
    assert len({rank["collectives"][1] for rank in ranks}) == 1


@pytest.mark.multi
def test_measuring_leaves_no_trace_in_what_is_trained(measured):
    ranks = measured(world=3, local=1)
    assert [[peer for peer, _ in rank["said"]["pairs"]] for rank in ranks] == [[1, 2], [0, 2], [1, 0]]
    for rank in ranks:
        assert rank["random"][0] == rank["random"][1], "the generators are where they were"
    assert len({rank["collectives"][1] for rank in ranks}) == 1, "no rank counts a collective that others do not"


@pytest.mark.multi
@pytest.mark.parametrize("wanted", [{"on": False}, {"fit": False}])
def test_nothing_is_measured_when_it_is_off_or_the_nodes_were_fit_before(measured, wanted):
    (rank,) = measured(world=1, local=1, **wanted)
    assert rank["said"] is None


@pytest.mark.multi
def test_a_rank_that_is_alone_measures_itself(measured):
    (rank,) = measured(world=1, local=1)
    assert rank["said"]["pairs"] == []
