"""The resolved configuration as the job reads it."""

import json
from dataclasses import asdict

import pytest

from trainer.parallel.data import FsdpConfig
from trainer.parallel.dimension import mesh_coordinates
from trainer.parallel.parallel_config import ParallelConfig
from trainer.protocol import config as configs
from trainer.protocol.config import JobConfig, OptimizerConfig
from trainer.protocol.config_sections.fault_detection_config import DrillEvent
from trainer.protocol.config_sections.pipeline_config import PipelineConfig
from trainer.protocol.config_sections.recipe_config import ClusterShape, ModelConfig, TrainConfig
from trainer.protocol.run_dir import RunDir


def test_what_is_written_reads_back(tmp_path):
    config = JobConfig(
        cluster=ClusterShape(nodes=2, ranks_per_node=2),
        parallel=ParallelConfig(dp_shard=2, tp=2),
        drill=configs.DrillConfig(events=(DrillEvent(rank=1, step=5),)),
        data=configs.DataConfig(text=("python-stdlib",)),
        env={"A": "b"},
        optimizer=OptimizerConfig(lr=1e-3),
    )
    (tmp_path / "config.json").write_text(json.dumps(asdict(config)))
    assert configs.load(RunDir(tmp_path), 0) == config


def test_keys_of_the_login_node_are_ignored_and_missing_ones_take_defaults(tmp_path):
    (tmp_path / "config.json").write_text('{"cluster":{"partition":"gpu","nodes":3},"notify":{"to":"me"}}')
    config = configs.load(RunDir(tmp_path), 0)
    assert config.cluster.nodes == 3
    assert config.train == TrainConfig()


def test_an_integer_serves_as_a_float(tmp_path):
    (tmp_path / "config.json").write_text('{"optimizer":{"lr":1}}')
    assert isinstance(configs.load(RunDir(tmp_path), 0).optimizer.lr, float)


@pytest.mark.parametrize(
    ("world", "parallel", "shard"), [(8, {"tp": 2}, 4), (8, {"dp_replicate": 2, "tp": 2}, 2), (1, {}, 1)]
)
def test_zero_shards_over_what_is_left(world, parallel, shard):
    assert ParallelConfig(**parallel).mesh_sizes(world)["dp_shard"] == shard


@pytest.mark.parametrize(
    ("parallel", "sizes", "reshards"),
    [
        ({"strategy": "ddp"}, (8, 1, 1), False),
        ({"strategy": "ddp", "tp": 2}, (4, 1, 2), False),
        ({"strategy": "ddp", "dp_replicate": 8}, (8, 1, 1), False),
        ({"strategy": "zero1"}, (1, 8, 1), False),
        ({"strategy": "zero2", "tp": 2}, (1, 4, 2), False),
        ({"strategy": "zero3"}, (1, 8, 1), None),
        ({"strategy": "fsdp", "fsdp": FsdpConfig(reshard_after_forward="never")}, (1, 8, 1), False),
        ({"strategy": "hsdp", "dp_replicate": 2}, (2, 4, 1), None),
        ({"dp_replicate": 4}, (4, 2, 1), None),
        ({"strategy": "zero2", "fsdp": FsdpConfig(reshard_after_forward="always")}, (1, 8, 1), True),
    ],
)
def test_every_strategy_is_a_mesh_and_a_time_to_free_parameters(parallel, sizes, reshards):
    config = ParallelConfig(**parallel)
    assert tuple(config.parameter_sizes(8).values()) == (1, *sizes)
    assert config.reshard_after_forward is reshards
    assert config.data_parallel_size(8) * config.tp == 8


@pytest.mark.parametrize(
    ("parallel", "sizes", "of_parameters"),
    [
        ({"cp": 2}, (1, 4, 2, 1), (1, 8, 1)),
        ({"cp": 2, "tp": 2}, (1, 2, 2, 2), (1, 4, 2)),
        ({"cp": 8}, (1, 1, 8, 1), (1, 8, 1)),
        ({"cp": 2, "dp_replicate": 2, "strategy": "hsdp"}, (2, 2, 2, 1), (2, 4, 1)),
        ({"cp": 2, "tp": 2, "strategy": "ddp"}, (2, 1, 2, 2), (4, 1, 2)),
    ],
)
def test_ranks_that_share_sequences_are_shards_or_replicas_of_parameters(parallel, sizes, of_parameters):
    config = ParallelConfig(**parallel)
    assert tuple(config.mesh_sizes(8).values()) == (1, *sizes)
    assert tuple(config.parameter_sizes(8).values()) == (1, *of_parameters)
    assert config.data_parallel_size(8) * config.ranks_per_share == 8


def test_a_rank_has_its_place_in_every_dimension_and_in_the_inner_ones():
    assert [mesh_coordinates((2, 2, 2), rank) for rank in (0, 1, 2, 5, 7)] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 1), (1, 1, 1)
    ]  # fmt: skip
    assert mesh_coordinates((2, 2), 5) == (0, 1)


def test_the_place_of_a_rank_is_told_where_its_number_alone_does_not():
    assert ParallelConfig(cp=2, tp=2).place_words(8, 5) == "dp_shard 1, cp 0, tp 1"
    assert ParallelConfig(cp=4).place_words(8, 6) == "dp_shard 1, cp 2"
    assert ParallelConfig().place_words(8, 6) == ""
    assert ParallelConfig(pipeline=PipelineConfig(stages=4)).place_words(4, 2) == "pp 2"
    assert ParallelConfig(ep=2).place_words(8, 5) == "dp_shard 5, ep 1"
    assert ParallelConfig(ep=2, cp=2, dp_replicate=2).place_words(8, 5) == "dp_replicate 1, dp_shard 0, cp 1, ep 1"


@pytest.mark.parametrize(
    ("world", "parallel"), [(4, {"tp": 3}), (4, {"dp_shard": 3}), (2, {"tp": 4}), (6, {"dp_replicate": 4})]
)
def test_sizes_that_do_not_multiply_to_the_world_are_named(world, parallel):
    with pytest.raises(ValueError, match=rf"but cluster.nodes x cluster.ranks_per_node = {world}"):
        ParallelConfig(**parallel).mesh_sizes(world)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (ClusterShape, {"kind": "pbs"}, "cluster.kind=pbs"),
        (ClusterShape, {"nodes": 0}, "cluster.nodes=0"),
        (ClusterShape, {"gpus_per_node": 3, "ranks_per_node": 2}, "one GPU for each rank"),
        (ParallelConfig, {"tp": 0}, "at least 1"),
        (ParallelConfig, {"strategy": "zero4"}, "must be auto, ddp, zero1, zero2, zero3, fsdp or hsdp"),
        (
            ParallelConfig,
            {"dp_replicate": 0},
            "parallel.dp_replicate=0: must be at least 1: type parallel.dp_replicate=1",
        ),
        (FsdpConfig, {"reshard_after_forward": "True"}, "must be auto, always or never"),
        (FsdpConfig, {"prefetch": -1}, "must be 0 or a number of layers"),
        (ModelConfig, {"kv_heads": 0}, "model.kv_heads=0: must be at least 1"),
        (TrainConfig, {"micro_batch_size": -1}, "train.micro_batch_size=-1"),
        (TrainConfig, {"steps": 0}, "train.steps=0"),
        (TrainConfig, {"loss_chunks": 0}, "train.loss_chunks=0: must be at least 1"),
        (TrainConfig, {"dtype": "fp8"}, "bfloat16, float16 or float32"),
        (DrillEvent, {"kind": "explode"}, "kind=explode"),
    ],
)
def test_values_that_cannot_work_say_what_to_do(kind, values, message):
    with pytest.raises(ValueError, match=message):
        kind(**values)
