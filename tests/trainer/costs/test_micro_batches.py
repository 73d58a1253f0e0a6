"""Number of micro-batches per step, and messages for impossible numbers."""

from dataclasses import replace

import pytest

from trainer.costs.micro_batches import MicroBatchError, micro_batch_count, too_few
from trainer.protocol.config_sections.pipeline_config import PipelineConfig
from trainer.protocol.config_sections.recipe_config import TrainConfig

INTERLEAVED = {"stages": 8, "schedule": "interleaved_1f1b"}


def counted(keys: dict, **train: int) -> int:
    return micro_batch_count(PipelineConfig(**keys), TrainConfig(**train), dp_size=2)


@pytest.mark.parametrize(
    ("keys", "train", "count"),
    [
        ({"stages": 4}, {"batch_size": 64, "micro_batch_size": 4}, 8),
        ({"stages": 4, "micro_batches": 4}, {"batch_size": 64}, 4),
        ({"stages": 4, "micro_batches": 8}, {"batch_size": 64, "micro_batch_size": 4}, 8),
        # Four for each rank of the pipeline, where the share can be divided so; else as many as it can.
        ({"stages": 4}, {"batch_size": 64}, 16),
        ({"stages": 4}, {"batch_size": 16}, 8),
        ({"stages": 4}, {"batch_size": 96}, 16),
        (INTERLEAVED, {"batch_size": 20}, 10),
        ({"stages": 4, "schedule": "gpipe"}, {"batch_size": 2}, 1),
    ],
)
def test_micro_batches_of_a_step(keys: dict, train: dict, count: int) -> None:
    assert counted(keys, **train) == count


@pytest.mark.parametrize(
    ("keys", "train", "said"),
    [
        (
            {"stages": 4, "micro_batches": 3},
            {"batch_size": 64},
            "parallel.pipeline.micro_batches=3: each data-parallel rank has 32 sequences per step, which must be "
            "divided into equal micro-batches: type parallel.pipeline.micro_batches=4 or "
            "parallel.pipeline.micro_batches=8 or parallel.pipeline.micro_batches=16",
        ),
        (
            {"stages": 4, "micro_batches": 2},
            {"batch_size": 16},
            "parallel.pipeline.micro_batches=2: 2 micro-batches, but schedule 1f1b needs one or more for each of 4 "
            "stages: type parallel.pipeline.micro_batches=4 or parallel.pipeline.micro_batches=8",
        ),
        (
            {**INTERLEAVED, "micro_batches": 9},
            {"batch_size": 36},
            "parallel.pipeline.micro_batches=9: 9 micro-batches, but schedule interleaved_1f1b needs 2 rounds "
            "of equal size: type parallel.pipeline.micro_batches=2 or parallel.pipeline.micro_batches=3 or "
            "parallel.pipeline.micro_batches=6",
        ),
        (
            {"stages": 4},
            {"batch_size": 64, "micro_batch_size": 5},
            "train.micro_batch_size=5: each data-parallel rank has 32 sequences per step, which must be divided into "
            "equal micro-batches: type train.micro_batch_size=0 parallel.pipeline.micro_batches=4 or "
            "parallel.pipeline.micro_batches=8 or parallel.pipeline.micro_batches=16",
        ),
        (
            {"stages": 4, "micro_batches": 8},
            {"batch_size": 64, "micro_batch_size": 8},
            "parallel.pipeline.micro_batches=8 x train.micro_batch_size=8 = 64, but each data-parallel rank has 32 "
            "sequences per step: type train.micro_batch_size=0",
        ),
        (
            {"stages": 4},
            {"batch_size": 4},
            "train.batch_size=4: each data-parallel rank has 2 sequences per step, but schedule 1f1b needs one "
            "micro-batch or more for each of 4 stages: type train.batch_size=8",
        ),
    ],
)
def test_a_refusal_names_counts_that_work(keys: dict, train: dict, said: str) -> None:
    with pytest.raises(MicroBatchError) as error:
        counted(keys, **train)
    assert str(error.value) == said


def test_the_counts_that_a_refusal_names_are_taken() -> None:
    with pytest.raises(MicroBatchError) as error:
        counted({**INTERLEAVED, "micro_batches": 9}, batch_size=36)
    offered = [int(word.split("=")[1]) for word in str(error.value).split("type ")[1].split(" or ")]
    assert [counted({**INTERLEAVED, "micro_batches": count}, batch_size=36) for count in offered] == offered


@pytest.mark.parametrize(
    ("keys", "train", "said"),
    [
        (
            {"micro_batches": 8}, {"batch_size": 64},
            "8 micro-batches for a pipeline of 4 ranks: ranks wait for 27% of each step; efficient from 16 on: "
            "type parallel.pipeline.micro_batches=16",
        ),
        (
            {}, {"batch_size": 72, "micro_batch_size": 9},
            "4 micro-batches for a pipeline of 4 ranks: ranks wait for 43% of each step; efficient from 16 on: "
            "type parallel.pipeline.micro_batches=18 train.micro_batch_size=0",
        ),
        (
            {}, {"batch_size": 16},
            "8 micro-batches for a pipeline of 4 ranks: ranks wait for 27% of each step; efficient from 16 on: "
            "type parallel.pipeline.micro_batches=16 train.batch_size=32",
        ),
    ],
)  # fmt: skip
def test_ranks_that_would_wait_for_a_fifth_of_each_step_are_warned_of(keys: dict, train: dict, said: str) -> None:
    pipeline, config = PipelineConfig(stages=4, **keys), TrainConfig(**train)
    assert too_few(pipeline, config, dp_size=2) == said
    typed = dict(word.split("=") for word in said.split("type ")[1].split())
    better = replace(pipeline, micro_batches=int(typed.pop("parallel.pipeline.micro_batches")))
    config = replace(config, **{key.removeprefix("train."): int(value) for key, value in typed.items()})
    assert too_few(better, config, dp_size=2) is None


def test_enough_micro_batches_and_one_stage_are_not_warned_of() -> None:
    assert too_few(PipelineConfig(stages=4), TrainConfig(batch_size=32), dp_size=2) is None
    assert too_few(PipelineConfig(), TrainConfig(batch_size=2), dp_size=2) is None


def test_of_a_zero_bubble_no_formula_is_told() -> None:
    said = too_few(PipelineConfig(stages=8, schedule="zbv"), TrainConfig(batch_size=16), dp_size=2)
    assert said is not None
    assert "%" not in said
