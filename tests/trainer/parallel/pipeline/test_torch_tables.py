"""Schedule tables: accepted ones can be run, and their simulated costs agree with the formulas."""

from collections import Counter

import pytest

from trainer.costs.micro_batches import takes
from trainer.costs.simulation import (
    COMPUTES,
    Kind,
    PipelineTimeline,
    StageSeconds,
    activations_held,
    bubbles,
    formula,
    simulate,
)
from trainer.costs.stage_split import stages_of_rank
from trainer.parallel.apply.pipeline_stage import with_communication
from trainer.protocol.config_sections.pipeline_config import PipelineConfig, Schedule

EVEN = StageSeconds(forward=1.0, input_gradient=1.0, weight_gradient=1.0)
PER_RANK = {
    "gpipe": (1,), "1f1b": (1,), "interleaved_1f1b": (2, 3), "interleaved_zero_bubble": (1, 2, 3), "zbv": (2,),
}  # fmt: skip
SIZES = [
    (schedule, ranks, size) for schedule, sizes in PER_RANK.items() for ranks in (2, 3, 4) for size in sizes
]  # fmt: skip


def config(schedule: str, ranks: int, per_rank: int = 0) -> PipelineConfig:
    default = PipelineConfig(stages=2 * ranks, schedule=schedule).per_rank
    return PipelineConfig(stages=ranks * (per_rank or default), schedule=schedule, stages_per_rank=per_rank)


def run(pipeline: PipelineConfig, micro_batches: int, seconds: StageSeconds = EVEN) -> PipelineTimeline:
    return simulate(with_communication(pipeline, micro_batches), [seconds] * pipeline.stages)


@pytest.mark.parametrize(("schedule", "ranks", "per_rank"), SIZES)
def test_what_is_accepted_can_be_run_and_what_torch_cannot_run_is_not_accepted(
    schedule: str, ranks: int, per_rank: int
) -> None:
    pipeline = config(schedule, ranks, per_rank)
    for micro_batches in range(1, 3 * ranks + 2):
        if not takes(pipeline, micro_batches):
            # Of 1f1b the table is ours: fewer micro-batches than stages are refused as torch refuses them.
            if schedule != Schedule.ONE_F_ONE_B:
                with pytest.raises(ValueError, match="number of microbatches"):
                    with_communication(pipeline, micro_batches)
            continue
        computed = [span for spans in run(pipeline, micro_batches).spans for span in spans]
        work = Counter((span.action.stage, span.action.kind) for span in computed)
        for stage in range(pipeline.stages):
            assert work[stage, Kind.FORWARD] == micro_batches
            assert work[stage, Kind.BACKWARD] + work[stage, Kind.INPUT_GRADIENT] == micro_batches
            assert work[stage, Kind.INPUT_GRADIENT] == work[stage, Kind.WEIGHT_GRADIENT]


@pytest.mark.parametrize("schedule", list(Schedule))
def test_every_stage_is_computed_by_its_rank(schedule: str) -> None:
    pipeline = config(schedule, 4)
    for rank, actions in enumerate(with_communication(pipeline, 8)):
        assert sorted({action.stage for action in actions if action.kind in COMPUTES}) == stages_of_rank(pipeline, rank)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_gradients_are_computed_in_the_order_of_the_micro_batches(schedule: str) -> None:
    last = {"gpipe": Kind.BACKWARD, "1f1b": Kind.BACKWARD, "interleaved_1f1b": Kind.BACKWARD}
    for actions in with_communication(config(schedule, 4), 8):
        for stage in {action.stage for action in actions}:
            kinds = (last.get(schedule, Kind.WEIGHT_GRADIENT), Kind.BACKWARD)
            order = [one.micro_batch for one in actions if one.stage == stage and one.kind in kinds]
            assert order == sorted(order)
            assert len(order) == 8


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("seconds", [EVEN, StageSeconds(forward=1.0, input_gradient=0.75, weight_gradient=1.5)])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(schedule: str, ranks: int, seconds: StageSeconds) -> None:
    for micro_batches in (ranks, 2 * ranks, 4 * ranks + 1):
        found = bubbles(run(config(schedule, ranks), micro_batches, seconds).ranks())
        assert found == pytest.approx([formula(ranks, micro_batches)] * ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_interleaving_divides_the_bubble_and_a_zero_bubble_is_smaller_still(ranks: int) -> None:
    micro_batches = 4 * ranks
    most = {name: max(bubbles(run(config(name, ranks), micro_batches).ranks())) for name in Schedule}
    assert most["interleaved_1f1b"] == pytest.approx(formula(ranks, micro_batches, stages_per_rank=2))
    assert most["interleaved_zero_bubble"] < most["interleaved_1f1b"] < most["1f1b"]
    assert most["zbv"] < most["interleaved_1f1b"]


def test_1f1b_keeps_fewer_activations_than_gpipe_and_interleaving_more() -> None:
    held = {schedule: activations_held(with_communication(config(schedule, 4), 16)) for schedule in Schedule}
    assert held["gpipe"] == [16, 16, 16, 16]
    assert held["1f1b"] == [4, 3, 2, 1]
    assert held["interleaved_1f1b"] == [11, 9, 7, 5]  # of half as many layers each
    assert held["zbv"] == [8, 8, 8, 8]


def test_a_slow_stage_makes_the_others_wait() -> None:
    slow = StageSeconds(forward=2.0, input_gradient=2.0, weight_gradient=2.0)
    table = with_communication(config("1f1b", 4), 16)
    found = bubbles(simulate(table, [EVEN, EVEN, slow, EVEN]).ranks())
    assert found[2] < 0.15
    assert min(found[0], found[1], found[3]) > 0.5
