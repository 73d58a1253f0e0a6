"""Random layouts with realistic sizes, and the words that repair them."""

import re
from collections import defaultdict
from dataclasses import replace
from random import Random
from typing import Any

from trainer.parallel.context import CpMethod
from trainer.parallel.data import FsdpConfig, Strategy
from trainer.parallel.parallel_config import ParallelConfig
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.pipeline_config import PipelineConfig, Schedule
from trainer.protocol.config_sections.recipe_config import ClusterShape, ExpertsConfig, ModelConfig, TrainConfig

MOST_RANKS = 64
USUAL: dict[str, tuple[Any, ...]] = {
    "cluster.nodes": (1, 1, 2, 2, 4, 8),
    "cluster.ranks_per_node": (1, 2, 4, 8),
    "parallel.strategy": tuple(map(str, Strategy)),
    "parallel.dp_replicate": (1, 1, 1, 2),
    "parallel.dp_shard": (0, 0, 0, 0, 2, 4),
    "parallel.tp": (1, 1, 2, 4),
    "parallel.tp_across_nodes": (False, False, True),
    "parallel.cp": (1, 1, 1, 2),
    "parallel.cp_method": tuple(map(str, CpMethod)),
    "parallel.ep": (1, 1, 1, 1, 1, 2),
    "model.experts.count": (0, 0, 0, 8),
    "model.experts.ffn_dim": (96, 128),
    "parallel.fsdp.reshard_after_forward": ("auto", "always", "never"),
    "parallel.fsdp.prefetch": (0, 1, 2, 9),
    "parallel.fsdp.reduce": ("auto", "each", "last"),
    "parallel.fsdp.offload": ("none", "none", "all"),
    "model.heads": (4, 8, 16, 32),
    "model.kv_heads": (4, 4, 2, 8),
    "model.dim": (128, 256, 512, 4096),
    "model.ffn_dim": (192, 384, 14336),
    "model.vocab_size": (257, 32000, 128256),
    "train.batch_size": (16, 32, 64, 256),
    "train.micro_batch_size": (0, 0, 0, 1, 2),
    "train.seq_len": (128, 2048, 8192),
    "train.loss_chunks": (1, 1, 1, 2, 4),
}
"""Sizes, most of which fit each other."""
SPLIT = ("model.heads", "model.kv_heads", "model.dim", "model.ffn_dim", "train.seq_len")
"""Sizes that tensor parallelism splits."""
ODD: dict[str, tuple[Any, ...]] = {
    "cluster.nodes": (3, 5, 6, 7, 16),
    "cluster.ranks_per_node": (3, 5, 6, 7),
    "parallel.dp_replicate": (3, 4, 5, 8, 64),
    "parallel.dp_shard": (1, 3, 5, 6, 8, 64),
    "parallel.tp": (3, 5, 6, 7, 8),
    "parallel.cp": (3, 4, 6, 8),
    "parallel.ep": (3, 4, 8),
    "model.experts.count": (2, 6, 12),
    "model.experts.ffn_dim": (1, 63, 100),
    "model.heads": (1, 3, 5, 6, 12, 40),
    "model.kv_heads": (1, 3, 5, 6, 16),
    "model.dim": (7, 30, 48, 100, 130, 5120),
    "model.ffn_dim": (1, 63, 191, 11008),
    "model.vocab_size": (1, 100, 6720, 26880, 50257),
    "train.batch_size": (1, 7, 15, 100, 1000),
    "train.micro_batch_size": (3, 5, 16, 1000),
    "train.seq_len": (1, 33, 127, 1000, 4095),
    "train.loss_chunks": (3, 5, 7, 16, 1000),
}


def drawn(rng: Random, most_odd: int = 6) -> dict[str, Any]:
    """Return a layout of at most `MOST_RANKS` ranks; every other one has up to `most_odd` odd sizes."""
    while True:
        values = {key: rng.choice(choices) for key, choices in USUAL.items()}
        for key in rng.sample(sorted(ODD), max(0, rng.randint(-most_odd, most_odd))):
            values[key] = rng.choice(ODD[key])
        if rng.random() < 0.25:
            tp = values["parallel.tp"]
            values |= {key: tp * values[key] for key in SPLIT} | {"cluster.ranks_per_node": tp}
        if values["cluster.nodes"] * values["cluster.ranks_per_node"] <= MOST_RANKS:
            return values


STAGES: dict[str, tuple[Any, ...]] = {
    "model.layers": (2, 3, 4, 4, 8, 8, 12, 16),
    "model.tie_embeddings": (False, False, False, False, False, True),
    "train.activation_checkpointing": (False, False, False, False, True),
    "parallel.pipeline.micro_batches": (0, 0, 0, 2, 3, 4, 8, 16, 1000),
}
"""Further sizes for layouts with stages."""
_STAGES_PER_RANK = {"gpipe": (0, 1), "1f1b": (0, 1), "interleaved_1f1b": (0, 2, 3), "zbv": (0, 2)}


def staged(rng: Random, values: dict[str, Any]) -> dict[str, Any]:
    schedule = rng.choice(list(Schedule))
    each = rng.choice(_STAGES_PER_RANK.get(schedule, (0, 1, 2, 3)))
    known = each or (1 if schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B) else 2)
    values = {**values, **{key: rng.choice(choices) for key, choices in STAGES.items()}}
    if rng.random() < 1 / 2:
        values |= {"model.experts.count": 0, "parallel.ep": 1}
    return {
        **values,
        "parallel.pipeline.schedule": str(schedule),
        "parallel.pipeline.stages_per_rank": each,
        "parallel.pipeline.stages": known * rng.choice((2, 2, 2, 4, 4, 3, 5)),
    }


def job(values: dict[str, Any]) -> JobConfig:
    sections: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        sections[section][name] = value
    return JobConfig(
        cluster=ClusterShape(**sections["cluster"]),
        parallel=ParallelConfig(
            fsdp=FsdpConfig(**sections["parallel.fsdp"]),
            pipeline=PipelineConfig(**sections["parallel.pipeline"]),
            **sections["parallel"],
        ),
        model=ModelConfig(experts=ExpertsConfig(**sections["model.experts"]), **sections["model"]),
        train=TrainConfig(**sections["train"]),
    )


def words(values: dict[str, Any]) -> list[str]:
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]


def words_of_hint(hint: str) -> list[str]:
    """Return the words that a hint suggests to type."""
    assert hint.startswith(("type ", "set ")), hint
    words = hint.partition(" ")[2].split()
    assert all(re.fullmatch(r"[a-z_.]+=(\w+|\[\])", word) for word in words), hint
    return words


def typed(config: JobConfig, way: list[str]) -> JobConfig:
    for word in way:
        key, _, text = word.partition("=")
        value = int(text) if text.isdigit() else {"true": True, "false": False, "[]": ()}.get(text, text)
        config = _replaced(config, key.split("."), value)
    return config


def _replaced(section: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    return replace(section, **{name: _replaced(getattr(section, name), rest, value) if rest else value})
