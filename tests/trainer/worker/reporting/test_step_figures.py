"""Figures of a step's cost in steps.jsonl."""

from collections.abc import Callable, Sequence

import pytest
import torch

from tests.trainer.conftest import Run
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.recipe_config import TrainConfig
from trainer.worker.reporting.metrics import EVERY, RankComparison, StepFigures, expert_loads, section_seconds
from trainer.worker.reporting.traffic import TrafficMeter

WORK = section_seconds([100_000_000, 200_000_000, 300_000_000, 50_000_000])


def figures(flops: float | None = None, **train: float) -> StepFigures:
    return StepFigures(
        JobConfig(train=TrainConfig(**train)),
        torch.device("cpu"),
        4,
        flops,
        TrafficMeter({}, []),
        RankComparison(lambda row: [list(row)]),
    )


def test_what_is_neither_work_nor_a_save_is_waiting():
    found = figures().build_figures(1, 1.0, 0.1, WORK)
    assert found["work"] == {"data": 0.1, "forward": 0.2, "backward": 0.3, "optimizer": 0.05}
    assert found["waiting"] == pytest.approx(0.25)
    assert found["memory"]["resident"] > 1 << 20
    assert not {"mfu", "tflops_per_rank"} & set(found)


def test_communication_that_nothing_hides_is_told_by_its_kind():
    made = figures()
    assert made.build_figures(1, 2.0, 0.1, WORK, {"receives": 0.0, "sends": 0.0, "reductions": 0.0})["bubble"] == 0.0
    # A step's measurements are in the line of the next step, which may be much shorter.
    found = made.build_figures(2, 1.0, 0.1, WORK, {"receives": 0.3, "sends": 0.05, "reductions": 0.5})
    assert found["exposed"] == {"receives": 0.3, "sends": 0.05, "reductions": 0.5}
    assert found["bubble"] == 0.15
    assert "bubble" not in figures().build_figures(1, 2.0, 0.1, WORK, {"reductions": 0.5})


def test_work_that_overlaps_leaves_no_negative_wait():
    assert figures().build_figures(1, 0.5, 0.0, WORK)["waiting"] == 0.0


def test_model_flops_are_shared_by_the_ranks_and_mfu_is_their_share_of_the_peak():
    assert figures(8e12).build_figures(1, 2.0, 0.0, WORK)["tflops_per_rank"] == pytest.approx(1.0)
    assert figures(8e12, peak_tflops=4.0).build_figures(1, 2.0, 0.0, WORK)["mfu"] == pytest.approx(0.25)
    assert "mfu" not in figures(8e12).build_figures(1, 2.0, 0.0, WORK)  # the peak of this CPU is unknown


def test_the_least_the_median_and_the_most_of_all_layers() -> None:
    loads = [10.0, 10.0, 20.0, 0.0, 7.0, 13.0, 10.0, 10.0]
    due = {"least": 0.0, "median": 1.0, "most": 2.0, "layer": 0, "expert": 2}
    assert expert_loads(EVERY, loads, layers=2) == {"experts": due}


def test_not_in_every_step_and_not_without_experts_or_tokens() -> None:
    assert expert_loads(EVERY + 1, [1.0, 1.0], layers=1) == {}
    assert expert_loads(EVERY, [], layers=0) == {}
    assert expert_loads(EVERY, [0.0, 0.0], layers=1) == {}


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
    workload = {"target": "tests.trainer.worker.my_workload:Compared", "args": {"width": 8}}
    run = undisturbed(2, workload=workload, parallel={"dp_shard": 2}, train={"steps": 4}, checkpoint={"every": 0})
    lines = run.metrics()
    assert [step for step, line in lines.items() if "ranks" in line] == [3]
    told = lines[3]["ranks"]
    assert set(told) == {"data", "forward", "backward", "optimizer", "waiting", "reductions", "resident"}
    assert all(one["least"] <= one["median"] <= one["most"] and one["rank"] in (0, 1) for one in told.values())
