"""PURE: what of a run does not go with its pipeline."""

from collections.abc import Iterator

from trainer.contract.config import JobConfig
from trainer.contract.config_sections.pipeline_config import PipelineConfig
from trainer.contract.pipeline.layer_costs import measured, modelled
from trainer.contract.pipeline.stage_split import Split, split


def problems(pipeline: PipelineConfig, config: JobConfig) -> Iterator[str]:
    """Everything that is refused, with what to type; nothing for a model in one stage."""
    if pipeline.stages == 1:
        return
    if not config.trains_built_in_workload:
        yield (
            f"parallel.pipeline.stages={pipeline.stages}: only the built-in model can be split into stages: "
            "type parallel.pipeline.stages=1"
        )
        return
    if config.model.tie_embeddings:
        yield (
            f"model.tie_embeddings=true with parallel.pipeline.stages={pipeline.stages}: the embedding is in the first "
            "stage and the output in the last one: type model.tie_embeddings=false"
        )
    if pipeline.splits_backward:
        yield from _of_split_backward(pipeline, config)
    try:
        split_of(pipeline, config)
    except ValueError as error:
        yield str(error)


def _of_split_backward(pipeline: PipelineConfig, config: JobConfig) -> Iterator[str]:
    """What torch 2.13 cannot do, or not well, where gradients of weights are computed apart."""
    other = "type parallel.pipeline.schedule=1f1b parallel.pipeline.stages_per_rank=1"
    key = f"parallel.pipeline.schedule={pipeline.schedule}"
    if config.train.activation_checkpointing:
        # 11 times for a layer of the built-in model, and with `keep: products` it raises.
        yield (
            f"{key} with train.activation_checkpointing=true: torch 2.13 computes a layer again for each of its "
            f"weights: {other}, or train.activation_checkpointing=false"
        )
    if config.train.compile:
        yield f"{key} with train.compile=true: torch 2.13 cannot split the backward pass of compiled layers: {other}"


def split_of(pipeline: PipelineConfig, config: JobConfig) -> Split:
    """The stages by measured seconds where there are some, else by modelled FLOPs; raises ValueError."""
    seconds = pipeline.layer_seconds
    costs = measured(seconds, config.model) if seconds else modelled(config.model, config.train)
    return split(costs, pipeline.stages)
