"""Accepted and refused values of `parallel.pipeline`."""

from dataclasses import replace

import pytest

from trainer.costs.stage_split import rank_of_stage, split_model, stages_of_rank
from trainer.parallel.parallel_config import ParallelConfig
from trainer.parallel.pipeline import PIPELINE
from trainer.protocol.config import JobConfig, WorkloadConfig
from trainer.protocol.config_sections.pipeline_config import PipelineConfig, Schedule
from trainer.protocol.config_sections.recipe_config import ClusterShape, ModelConfig, TrainConfig


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"schedule": "dualpipe"},
            "parallel.pipeline.schedule=dualpipe: must be gpipe, 1f1b, interleaved_1f1b, interleaved_zero_bubble or "
            "zbv: type parallel.pipeline.schedule=1f1b",
        ),
        ({"stages": 0}, "parallel.pipeline.stages=0: must be at least 1"),
        (
            {"stages": 4, "stages_per_rank": 2},
            "parallel.pipeline.stages_per_rank=2: schedule 1f1b needs 1 on each rank: "
            "type parallel.pipeline.stages_per_rank=1",
        ),
        (
            {"stages": 4, "schedule": "interleaved_1f1b", "stages_per_rank": 1},
            "parallel.pipeline.stages_per_rank=1: schedule interleaved_1f1b needs 2 or more on each rank: "
            "type parallel.pipeline.stages_per_rank=2",
        ),
        (
            {"stages": 6, "schedule": "zbv", "stages_per_rank": 3},
            "parallel.pipeline.stages_per_rank=3: schedule zbv needs 2 on each rank: "
            "type parallel.pipeline.stages_per_rank=2",
        ),
        (
            {"stages": 5, "schedule": "zbv"},
            "parallel.pipeline.stages=5: must be a multiple of the 2 stages of each rank: "
            "type parallel.pipeline.stages=6",
        ),
        (
            {"stages": 2, "schedule": "zbv"},
            "parallel.pipeline.stages=2 with 2 on each rank is a pipeline of one rank: "
            "type parallel.pipeline.stages=4",
        ),
        (
            {"layer_seconds": (1.0, -1.0)},
            "parallel.pipeline.layer_seconds: must be numbers of seconds, 0 or more: "
            "type ~parallel.pipeline.layer_seconds",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_to_type(keys: dict, said: str) -> None:
    with pytest.raises(ValueError, match=r"parallel\.pipeline") as error:
        PipelineConfig(**keys)
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks"),
    [
        ("gpipe", 4, 4), ("1f1b", 4, 4), ("interleaved_1f1b", 8, 4), ("interleaved_zero_bubble", 8, 4), ("zbv", 8, 4),
        ("1f1b", 1, 1),
    ],
)  # fmt: skip
def test_stages_on_each_rank_follow_from_the_schedule(schedule: str, stages: int, ranks: int) -> None:
    assert PipelineConfig(stages=stages, schedule=schedule).ranks == ranks


def test_one_stage_is_no_pipeline_and_nothing_is_refused() -> None:
    tied = JobConfig(
        model=ModelConfig(layers=1, tie_embeddings=True),
        parallel=ParallelConfig(tp=2, pipeline=PipelineConfig(schedule="zbv")),
    )
    assert list(PIPELINE.problems(tied)) == []


def test_stages_go_round_the_ranks() -> None:
    config = PipelineConfig(stages=8, schedule="interleaved_1f1b")
    assert [rank_of_stage(config, stage) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [stages_of_rank(config, rank) for rank in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_stages_of_a_v_go_there_and_back() -> None:
    config = PipelineConfig(stages=8, schedule="zbv")
    assert [rank_of_stage(config, stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("pipeline", "job", "said"),
    [
        (
            PipelineConfig(stages=2), JobConfig(model=ModelConfig(tie_embeddings=True)),
            "model.tie_embeddings=true with parallel.pipeline.stages=2: the embedding is in the first stage and the "
            "output in the last one",
        ),
        (
            PipelineConfig(stages=4, schedule="interleaved_zero_bubble"), JobConfig(train=TrainConfig(compile=True)),
            "parallel.pipeline.schedule=interleaved_zero_bubble with train.compile=true: torch 2.13 cannot split the "
            "backward pass of compiled layers",
        ),
        (
            PipelineConfig(stages=4, schedule="zbv"), JobConfig(train=TrainConfig(activation_checkpointing=True)),
            "parallel.pipeline.schedule=zbv with train.activation_checkpointing=true: torch 2.13 recomputes a "
            "layer for each weight",
        ),
        (
            PipelineConfig(stages=8), JobConfig(),
            "parallel.pipeline.stages=8: each needs a layer, but model.layers=4",
        ),
        (
            PipelineConfig(stages=2, layer_seconds=(1.0, 2.0)), JobConfig(),
            "parallel.pipeline.layer_seconds has 2 numbers: must have 6, for the embedding, each of model.layers=4, "
            "and the output with its loss",
        ),
        (
            PipelineConfig(stages=2, layer_seconds=(0.0,) * 6), JobConfig(),
            "parallel.pipeline.layer_seconds are all 0: at least one must be above 0",
        ),
        (
            PipelineConfig(stages=2), JobConfig(workload=WorkloadConfig(target="mine:Mine")),
            "parallel.pipeline.stages=2: only the built-in model can be split into stages",
        ),
    ],
)  # fmt: skip
def test_what_of_a_run_does_not_go_with_its_pipeline_is_refused(
    pipeline: PipelineConfig, job: JobConfig, said: str
) -> None:
    job = replace(job, cluster=ClusterShape(ranks_per_node=pipeline.ranks), parallel=ParallelConfig(pipeline=pipeline))
    assert list(PIPELINE.problems(job)) == [said]


def test_tensor_parallelism_goes_with_every_schedule() -> None:
    for schedule in Schedule:
        pipeline = PipelineConfig(stages=4, schedule=schedule)
        job = JobConfig(
            cluster=ClusterShape(ranks_per_node=2 * pipeline.ranks), parallel=ParallelConfig(tp=2, pipeline=pipeline)
        )
        assert list(PIPELINE.problems(job)) == []


def test_measured_seconds_decide_where_there_are_some() -> None:
    job = JobConfig(model=ModelConfig(layers=4, vocab_size=257))
    measured = PipelineConfig(stages=2, layer_seconds=(0.0, 3.0, 1.0, 1.0, 1.0, 0.0))
    assert [part.end for part in split_model(measured, job.model, job.train).parts] == [1, 4]
    assert [part.end for part in split_model(PipelineConfig(stages=2), job.model, job.train).parts] == [2, 4]
