"""What a line of steps.jsonl says of a step's cost."""

import pytest
import torch

from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.recipe_config import TrainConfig
from trainer.worker.reporting.metrics import StepFigures, section_seconds
from trainer.worker.reporting.rank_comparison import RankComparison
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
    # What was measured in a step is told in the line of the next one, which may be much shorter.
    found = made.build_figures(2, 1.0, 0.1, WORK, {"receives": 0.3, "sends": 0.05, "reductions": 0.5})
    assert found["exposed"] == {"receives": 0.3, "sends": 0.05, "reductions": 0.5}
    assert found["bubble"] == 0.15
    assert "bubble" not in figures().build_figures(1, 2.0, 0.1, WORK, {"reductions": 0.5})


def test_work_that_overlaps_leaves_no_negative_wait():
    assert figures().build_figures(1, 0.5, 0.0, WORK)["waiting"] == 0.0


def test_model_flops_are_shared_by_the_ranks_and_mfu_is_their_share_of_the_peak():
    assert figures(8e12).build_figures(1, 2.0, 0.0, WORK)["tflops_per_rank"] == pytest.approx(1.0)
    assert figures(8e12, peak_tflops=4.0).build_figures(1, 2.0, 0.0, WORK)["mfu"] == pytest.approx(0.25)
    assert "mfu" not in figures(8e12).build_figures(1, 2.0, 0.0, WORK)  # nobody knows what this CPU can do
