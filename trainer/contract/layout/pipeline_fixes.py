"""PURE: which other stages, and which other micro-batches of them, would fit."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from trainer.contract.config import JobConfig, TrainConfig
from trainer.contract.config_sections.pipeline_config import PipelineConfig
from trainer.contract.pipeline.layer_costs import measured
from trainer.contract.pipeline.micro_batches import MicroBatchError, micro_batch_count, takes
from trainer.contract.pipeline.stage_fit import problems

Fix = dict[str, Any]
"""Keys and their values, to be typed together."""
PIPELINE = "parallel.pipeline."


def other_stages(config: JobConfig) -> Iterator[Fix]:
    """Keys with which the ranks divide into pipelines and the model into stages; empty where these fit as they are.

    One stage is always among them. Micro-batches depend on the other sizes: `fitting_batch`.
    """
    pipeline, world = config.parallel.pipeline, config.cluster.world_size
    if pipeline.stages == 1:
        yield {}
        return
    for ranks in (ranks for ranks in range(2, world + 1) if world % ranks == 0):
        stages = ranks * pipeline.per_rank
        fix: Fix = {} if stages == pipeline.stages else {f"{PIPELINE}stages": stages}
        if not config.command:
            fix |= _of_model(config, pipeline)
        changed = with_fix(config, fix)
        if config.command or not list(problems(changed.parallel.pipeline, changed)):
            yield fix
    yield {f"{PIPELINE}stages": 1}


def _of_model(config: JobConfig, pipeline: PipelineConfig) -> Fix:
    """What does not go with several stages, with gradients of weights that are computed apart, or with the layers."""
    fix: Fix = {"model.tie_embeddings": False} if config.model.tie_embeddings else {}
    if pipeline.splits_backward:
        keys = ("activation_checkpointing", "compile")
        fix |= {f"train.{key}": False for key in keys if getattr(config.train, key)}
    if pipeline.layer_seconds and not _are_of(pipeline.layer_seconds, config):
        fix[f"{PIPELINE}layer_seconds"] = ()
    return fix


def _are_of(seconds: tuple[float, ...], config: JobConfig) -> bool:
    """Whether they can be those of the layers of the model."""
    try:
        measured(seconds, config.model)
    except ValueError:
        return False
    return True


def with_fix(config: JobConfig, fix: Fix) -> JobConfig:
    """The config with what `other_stages` has found."""
    of = {
        section: {key.removeprefix(section): value for key, value in fix.items() if key.startswith(section)}
        for section in (PIPELINE, "model.", "train.")
    }
    pipeline = replace(config.parallel.pipeline, **of[PIPELINE])
    return replace(
        config,
        parallel=replace(config.parallel, pipeline=pipeline),
        model=replace(config.model, **of["model."]),
        train=replace(config.train, **of["train."]),
    )


def fitting_batch(pipeline: PipelineConfig, train: TrainConfig, ranks: int, batch: int) -> Fix:
    """Keys with which `ranks` data-parallel ranks divide each batch into micro-batches; `batch` sequences if it can be.

    The fewest keys, and of these the nearest batch.
    """
    options = []
    for size in _batches(pipeline, train, ranks, batch):
        share = size // ranks
        counts = {pipeline.micro_batches, 0, *_nearest(pipeline, share)}
        for count, micro in product(counts, {train.micro_batch_size, 0}):
            changed = replace(train, batch_size=size, micro_batch_size=micro)
            if _can_count(replace(pipeline, micro_batches=count), changed, ranks):
                fix = {"train.batch_size": size, "train.micro_batch_size": micro, f"{PIPELINE}micro_batches": count}
                before = (train.batch_size, train.micro_batch_size, pipeline.micro_batches)
                options.append({key: fix[key] for key, old in zip(fix, before, strict=True) if fix[key] != old})
    return min(options, key=lambda fix: _rank(fix, pipeline, train))


def _batches(pipeline: PipelineConfig, train: TrainConfig, ranks: int, batch: int) -> set[int]:
    """Multiples of the data-parallel ranks: `batch`, and those nearest to it of which each stage has a micro-batch."""
    units = (ranks * pipeline.stages, ranks * max(1, pipeline.micro_batches) * max(1, train.micro_batch_size))
    return {batch, *(max(unit, round(batch / unit) * unit) for unit in units)}


def _nearest(pipeline: PipelineConfig, share: int) -> list[int]:
    fitting = [count for count in range(1, share + 1) if share % count == 0 and takes(pipeline, count)]
    return sorted(fitting, key=lambda count: (abs(count - pipeline.micro_batches), -count))[:1]  # less waiting


def _can_count(pipeline: PipelineConfig, train: TrainConfig, ranks: int) -> bool:
    try:
        micro_batch_count(pipeline, train, ranks)
    except MicroBatchError:
        return False
    return train.batch_size % ranks == 0


def _rank(fix: Fix, pipeline: PipelineConfig, train: TrainConfig) -> tuple[int, int, int, int]:
    batch = abs(fix.get("train.batch_size", train.batch_size) - train.batch_size)
    count = abs(fix.get(f"{PIPELINE}micro_batches", pipeline.micro_batches) - pipeline.micro_batches)
    return len(fix), "train.batch_size" in fix, batch, count
