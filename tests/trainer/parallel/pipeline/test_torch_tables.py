"""Schedule tables: accepted ones can be run, in the order of the loop without a pipeline."""

from collections import Counter
from itertools import accumulate

import pytest

from tests.trainer.parallel.pipeline.gradient_program import COMPUTES
from trainer.costs.micro_batches import takes
from trainer.costs.stage_split import stages_of_rank
from trainer.parallel.apply.pipeline_stage import Kind, with_communication
from trainer.protocol.config_sections.pipeline_config import PipelineConfig, Schedule

PER_RANK = {
    "gpipe": (1,), "1f1b": (1,), "interleaved_1f1b": (2, 3), "interleaved_zero_bubble": (1, 2, 3), "zbv": (2,),
}  # fmt: skip
SIZES = [
    (schedule, ranks, size) for schedule, sizes in PER_RANK.items() for ranks in (2, 3, 4) for size in sizes
]  # fmt: skip


def config(schedule: str, ranks: int, per_rank: int = 0) -> PipelineConfig:
    default = PipelineConfig(stages=2 * ranks, schedule=schedule).per_rank
    return PipelineConfig(stages=ranks * (per_rank or default), schedule=schedule, stages_per_rank=per_rank)


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
        table = with_communication(pipeline, micro_batches)
        work = Counter((action.stage, action.kind) for actions in table for action in actions)
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
    """So that sums have the bits of a loop that computes one micro-batch after the other."""
    last = {"gpipe": Kind.BACKWARD, "1f1b": Kind.BACKWARD, "interleaved_1f1b": Kind.BACKWARD}
    for actions in with_communication(config(schedule, 4), 8):
        for stage in {action.stage for action in actions}:
            kinds = (last.get(schedule, Kind.WEIGHT_GRADIENT), Kind.BACKWARD)
            order = [one.micro_batch for one in actions if one.stage == stage and one.kind in kinds]
            assert order == sorted(order)
            assert len(order) == 8


def most_held(schedule: str) -> list[int]:
    """Each rank's largest number of (stage, micro-batch) pairs with activations."""
    steps = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT_GRADIENT: -1}
    table = with_communication(config(schedule, 4), 16)
    return [max(accumulate(steps.get(action.kind, 0) for action in actions)) for actions in table]


def test_1f1b_keeps_fewer_activations_than_gpipe_and_interleaving_more() -> None:
    assert most_held("gpipe") == [16, 16, 16, 16]
    assert most_held("1f1b") == [4, 3, 2, 1]
    assert most_held("interleaved_1f1b") == [11, 9, 7, 5]  # of half as many layers each
    assert most_held("zbv") == [8, 8, 8, 8]
