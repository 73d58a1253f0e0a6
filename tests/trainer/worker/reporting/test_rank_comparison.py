"""Figures of all ranks beside each other."""

from collections.abc import Callable, Sequence

import pytest

from tests.trainer.conftest import Run
from trainer.worker.reporting.rank_comparison import EVERY, RankComparison


def test_the_mean_of_many_steps_is_compared_and_the_slowest_rank_is_named() -> None:
    def gather(row: Sequence[float]) -> list[list[float]]:
        return [list(row), [3 * value for value in row], [2 * value for value in row]]

    made = RankComparison(gather)
    told = [made.add(step, {"forward": float(step)}, {"resident": 7}) for step in range(1, EVERY + 1)]
    assert told[:-1] == [{}] * (EVERY - 1)
    mean = (EVERY + 1) / 2
    assert told[-1] == {
        "forward": {"least": mean, "median": 2 * mean, "most": 3 * mean, "rank": 1},
        "resident": {"least": 7.0, "median": 14.0, "most": 21.0, "rank": 1},
    }
    made.add(EVERY + 1, {"forward": 1.0}, {})
    assert made.add(2 * EVERY, {"forward": 3.0}, {})["forward"]["least"] == pytest.approx(2.0)


@pytest.mark.multi
def test_a_run_tells_of_all_its_ranks(undisturbed: Callable[..., Run]) -> None:
    """Of a workload that has them compared every three steps."""
    workload = {"target": "tests.trainer.worker.my_workload:Compared", "args": {"width": 8}}
    run = undisturbed(2, workload=workload, parallel={"dp_shard": 2}, train={"steps": 4}, checkpoint={"every": 0})
    lines = run.metrics()
    assert [step for step, line in lines.items() if "ranks" in line] == [3]
    told = lines[3]["ranks"]
    assert set(told) == {"data", "forward", "backward", "optimizer", "waiting", "reductions", "resident"}
    assert all(one["least"] <= one["median"] <= one["most"] and one["rank"] in (0, 1) for one in told.values())
