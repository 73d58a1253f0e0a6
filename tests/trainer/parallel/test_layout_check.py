"""Exactly the layouts that do not fit are refused, with sizes that fit."""

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.trainer.parallel.grid import drawn, job, staged, typed
from tests.trainer.parallel.grid import words_of_hint as words
from trainer.parallel.layout import model_problems, refusal
from trainer.parallel.parallel_config import ParallelConfig
from trainer.protocol.config import JobConfig, WorkloadConfig
from trainer.protocol.config_sections.pipeline_config import PipelineConfig
from trainer.protocol.config_sections.recipe_config import (
    AttentionConfig,
    ClusterShape,
    ExpertsConfig,
    ModelConfig,
    TrainConfig,
)

CONFIGS = 10_000


def can_train(config: JobConfig) -> bool:
    """Independent check of the shapes that ranks would have."""
    layout, model, train, cluster = config.parallel, config.model, config.train, config.cluster
    pipeline = layout.pipeline
    if pipeline.stages > 1 and not can_be_split(config):
        return False
    ranks = pipeline.ranks if pipeline.stages > 1 else 1
    world, rest = divmod(cluster.nodes * cluster.ranks_per_node, ranks)
    replicas, tp = layout.dp_replicate, layout.tp
    if rest or world % (layout.cp * tp):
        return False
    groups, shards = world // (layout.cp * tp), layout.dp_shard
    meshes = {
        "ddp": replicas in (1, groups) and shards in (0, 1),
        "hsdp": replicas > 1 and replicas * (shards or groups // replicas) == groups,
        "auto": replicas * (shards or groups // replicas) == groups,
    }
    if not meshes.get(layout.strategy, replicas == 1 and (shards or groups) == groups):
        return False
    share, rest = divmod(train.batch_size, groups)
    rows = math.ceil(model.vocab_size / 64) * 64
    return (
        rest == 0
        and share % (train.micro_batch_size or share) == 0
        and (pipeline.stages == 1 or can_be_divided(config, share))
        and (layout.tp_across_nodes or cluster.ranks_per_node % tp == 0)
        and model.dim % (2 * model.heads) == 0
        and model.heads % model.kv_heads == 0
        and train.seq_len % train.loss_chunks == 0
        and all(size % tp == 0 for size in (model.kv_heads, train.seq_len, rows))
        and (model.experts.count > 0 or model.ffn_dim % tp == 0)
        and (layout.cp_method != "ulysses" or model.heads // tp % layout.cp == 0)
        and can_share_experts(config, 0 if layout.strategy == "ddp" else groups // replicas * layout.cp * tp)
    )


def can_be_split(config: JobConfig) -> bool:
    apart = config.parallel.pipeline.schedule in ("interleaved_zero_bubble", "zbv")
    return (
        config.parallel.pipeline.stages <= config.model.layers
        and not config.model.tie_embeddings
        and not (apart and (config.train.activation_checkpointing or config.train.compile))
    )


def can_be_divided(config: JobConfig, share: int) -> bool:
    pipeline, size = config.parallel.pipeline, config.train.micro_batch_size
    rounds = pipeline.schedule.startswith("interleaved")

    def fits(count: int) -> bool:
        enough = pipeline.schedule != "1f1b" or count >= pipeline.stages
        return share % count == 0 and enough and (not rounds or count % max(1, count // pipeline.ranks) == 0)

    if pipeline.micro_batches:
        return fits(pipeline.micro_batches) and size * pipeline.micro_batches in (0, share)
    return fits(share // size) if size else any(fits(count) for count in range(1, share + 1))


def can_share_experts(config: JobConfig, sharding: int) -> bool:
    ep, experts = config.parallel.ep, config.model.experts
    return ep == 1 or (
        experts.count > 0
        and sharding > 0
        and experts.count % ep == 0
        and sharding % ep == 0
        and experts.ffn_dim % (sharding // ep) == 0
    )


def layout(rng: Random, *, stages: bool) -> dict[str, Any]:
    return staged(rng, drawn(rng, most_odd=2)) if stages else drawn(rng)


# Each sample goes through all lines that a thousand layouts of it reach.
@pytest.mark.parametrize(
    ("stages", "count", "seed"),
    [(False, 400, 7), (True, 1_000, 16),
     *(pytest.param(stages, CONFIGS, 16, marks=pytest.mark.proof) for stages in (False, True))],
)  # fmt: skip
def test_every_refusal_names_sizes_that_fit(stages: bool, count: int, seed: int) -> None:
    rng = Random(seed)
    accepted = 0
    for _ in range(count):
        config = job(layout(rng, stages=stages))
        refused = refusal(config)
        assert (refused is None) is can_train(config), config
        if refused is None:
            accepted += 1
            config.parallel.mesh_sizes(config.cluster.world_size)  # raises unless their product is the world size
            continue
        assert "\n" not in str(refused)
        is_model = not list(model_problems(config.model))
        assert bool(refused.hint) is is_model, config
        if is_model:
            fixed = typed(config, words(refused.hint))
            assert can_train(fixed), (refused.hint, config)
            assert refusal(fixed) is None
    assert (0.03 if stages else 0.1) * count < accepted < 0.7 * count  # the grid holds both


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.proof)])
def test_a_run_that_has_trained_is_offered_no_other_model_and_batch(count: int) -> None:
    rng = Random(17)
    free = ("parallel.", "cluster.", "train.micro_batch_size", "train.loss_chunks")
    offers = 0
    for number in range(count):
        values = drawn(rng, most_odd=2)
        config = job(staged(rng, values) if number % 4 == 3 else values)
        refused = refusal(config, lambda key: key.startswith(free))
        if refused is not None and refused.fix:
            assert all(key.startswith(free) for key in refused.fix)
            assert can_train(typed(config, words(refused.hint))), (refused.hint, config)
            offers += 1
    assert offers > count // 10


def of(cluster: dict[str, int], parallel: dict[str, object], **sections: object) -> JobConfig:
    return JobConfig(cluster=ClusterShape(**cluster), parallel=ParallelConfig(**parallel), **sections)  # type: ignore[arg-type]


SMALL = {"nodes": 2, "ranks_per_node": 2}


@pytest.mark.parametrize(
    ("config", "what", "hint"),
    [
        (of(SMALL, {"strategy": "zero1", "dp_replicate": 2}), "zero1 has one replica", "type parallel.dp_replicate=1"),
        (of(SMALL, {"strategy": "hsdp"}), "hsdp needs 2 replicas or more", "type parallel.dp_replicate=2"),
        (of(SMALL, {"strategy": "ddp", "dp_shard": 2}), "ddp shards nothing", "type parallel.dp_shard=0"),
        (
            of(SMALL, {"dp_shard": 3}),
            "parallel.dp_replicate=1 x dp_shard=3 x tp=1 = 3, but cluster.nodes x cluster.ranks_per_node = 4",
            "type parallel.dp_shard=0",
        ),
        (
            of(SMALL, {"tp": 4}, model=ModelConfig(kv_heads=4)),
            "parallel.tp=4 spans nodes of cluster.ranks_per_node=2",
            "type parallel.tp=2",
        ),
        (
            of({"ranks_per_node": 2}, {"tp": 2, "dp_shard": 1}, model=ModelConfig(kv_heads=1)),
            "model.kv_heads=1: must be a multiple of parallel.tp=2",
            "type parallel.tp=1 parallel.dp_shard=0",
        ),
        (
            of({"ranks_per_node": 3}, {"tp": 3}, model=ModelConfig(heads=6, kv_heads=3, dim=96)),
            "train.seq_len=128: must be a multiple of parallel.tp=3; "
            "model.vocab_size=257: its 320 rows must be a multiple of parallel.tp=3",
            "",
        ),
        (
            of(SMALL, {"tp": 3}, train=TrainConfig(batch_size=7), model=ModelConfig(kv_heads=3)),
            "parallel.dp_replicate=1 x dp_shard=1 x tp=3 = 3, but cluster.nodes x cluster.ranks_per_node = 4; "
            "model.kv_heads=3: must divide model.heads=4",
            "",
        ),
        (
            of({}, {}, model=ModelConfig(heads=3), train=TrainConfig(loss_chunks=3)),
            "train.loss_chunks=3: must divide train.seq_len=128; model.kv_heads=2: must divide model.heads=3; "
            "model.heads=3: must divide model.dim=128",
            "",
        ),
        (
            of(SMALL, {"cp": 4, "cp_method": "ulysses"}, model=ModelConfig(heads=2)),
            "model.heads=2: must be a multiple of parallel.cp=4 for parallel.cp_method=ulysses",
            "type parallel.cp_method=auto",
        ),
        (
            of(SMALL, {"cp": 2, "tp": 2, "cp_method": "ulysses"}, model=ModelConfig(heads=2)),
            "model.heads=2: must be a multiple of parallel.cp x tp=4 for parallel.cp_method=ulysses",
            "type parallel.cp_method=auto",
        ),
        (
            of(SMALL, {"cp": 2, "cp_method": "ring"}, model=ModelConfig(attention=AttentionConfig(window=16))),
            "model.attention.window=16: must be 0 with ring attention (parallel.cp_method)",
            "type parallel.cp_method=auto",
        ),
        (
            of(SMALL, {"cp": 3}),
            "parallel.dp_replicate=1 x dp_shard=1 x cp=3 x tp=1 = 3, but cluster.nodes x cluster.ranks_per_node = 4",
            "type parallel.cp=4",
        ),
        (
            of(SMALL, {"cp": 2}, train=TrainConfig(compile=True)),
            "train.compile=true with parallel.cp=2: compiled layers cannot share a sequence",
            "type train.compile=false",
        ),
        (
            of(SMALL, {"cp": 2, "dp_shard": 4}),
            "parallel.dp_replicate=1 x dp_shard=4 x cp=2 x tp=1 = 8, but cluster.nodes x cluster.ranks_per_node = 4",
            "type parallel.dp_shard=0",
        ),
        (
            of({"ranks_per_node": 4}, {"pipeline": PipelineConfig(stages=3)}),
            "parallel.dp_replicate=1 x dp_shard=1 x tp=1 x 3 ranks of a pipeline = 3, but cluster.nodes x "
            "cluster.ranks_per_node = 4",
            "type parallel.pipeline.stages=4",
        ),
        (
            of(SMALL, {"pipeline": PipelineConfig(stages=2, layer_seconds=(1.0, 1.0))}),
            "parallel.pipeline.layer_seconds has 2 numbers: must have 6, for the embedding, each of model.layers=4, "
            "and the output with its loss",
            "type parallel.pipeline.layer_seconds=[]",
        ),
        (
            of(SMALL, {"pipeline": PipelineConfig(stages=2)}, model=ModelConfig(tie_embeddings=True, heads=3)),
            "parallel.pipeline.stages=2: the embedding is in the first stage and the output in the last one; "
            "model.kv_heads=2: must divide model.heads=3",
            "",
        ),
        (
            of(SMALL, {"pipeline": PipelineConfig(stages=2, micro_batches=3)}, train=TrainConfig(batch_size=16)),
            "parallel.pipeline.micro_batches=3: each data-parallel rank has 8 sequences per step, which must be "
            "divided into equal micro-batches",
            "type parallel.pipeline.micro_batches=0",
        ),
        (
            of(
                SMALL,
                {"pipeline": PipelineConfig(stages=2), "ep": 4},
                model=ModelConfig(experts=ExpertsConfig(count=8)),
                train=TrainConfig(batch_size=16),
            ),
            "parallel.ep=4: must divide the 2 ranks that share layers (parallel.dp_shard x cp)",
            "type parallel.ep=2",
        ),
    ],
)
def test_a_refusal_says_what_does_not_fit_and_what_to_type(config: JobConfig, what: str, hint: str) -> None:
    refused = refusal(config)
    assert refused is not None
    assert what in refused.what
    if hint:
        assert set(refused.hint.split()) == set(hint.split())


def test_orch_does_not_judge_what_it_does_not_split() -> None:
    odd = of(SMALL, {"tp": 4, "dp_shard": 1}, model=ModelConfig(heads=1, kv_heads=1), train=TrainConfig(batch_size=7))
    assert refusal(odd) is not None
    assert refusal(replace(odd, command=("python", "train.py"))) is None
    own = replace(odd, workload=WorkloadConfig(target="my_module:Mine"))
    refused = refusal(own)
    assert refused is not None
    assert "model.kv_heads" not in str(refused)
    assert "parallel.tp=4 spans nodes" in str(refused)
