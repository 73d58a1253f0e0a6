"""Pipeline parallelism: ranks have different layers, and micro-batches travel from stage to stage."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainer.costs.micro_batches import MicroBatchError, micro_batch_size
from trainer.costs.stage_split import split_model
from trainer.parallel.dimension import Dimension, Fix, Recipe, Section, Splits
from trainer.protocol.config_sections.pipeline_config import PipelineConfig
from trainer.protocol.config_sections.recipe_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class PipelineSection(Section):
    """Config keys for pipeline parallelism."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)


def micro_batch_problem(pipeline: PipelineConfig, train: TrainConfig, ranks: int) -> str:
    """Return why the batch of `ranks` data-parallel ranks cannot be divided into micro-batches; empty if it can."""
    try:
        micro_batch_size(pipeline, train, ranks)
    except MicroBatchError as error:
        return str(error).partition(": type ")[0]
    return ""


class PipelineParallelism(Dimension):
    """Ranks hold different stages, built by `trainer/models/pipelined_llama.py`."""

    name, key, splits = "pp", "pipeline.stages", Splits.LAYERS
    sends_messages = True

    def size(self, parallel: Any) -> int:
        ranks: int = parallel.pipeline.ranks
        return ranks

    def describe(self, name: str, size: int) -> str:
        return f"{size} ranks of a pipeline" if size > 1 else ""

    def resize(self, parallel: Any, size: int) -> Fix:
        return {f"parallel.{self.key}": 1 if size == 1 else size * parallel.pipeline.per_rank}

    def relaxations(self, job: Recipe) -> Fix:
        pipeline, train = job.parallel.pipeline, job.train
        if pipeline.stages == 1:
            return {}
        fix: Fix = {"model.tie_embeddings": False} if job.model.tie_embeddings else {}
        if pipeline.splits_backward and train.activation_checkpointing:
            fix["train.activation_checkpointing"] = False
        if pipeline.layer_seconds:
            fix["parallel.pipeline.layer_seconds"] = ()
        return fix

    def problems(self, job: Recipe) -> Iterator[str]:
        pipeline, stages = job.parallel.pipeline, job.parallel.pipeline.stages
        if stages == 1:
            return
        if not job.trains_built_in_workload:
            yield f"parallel.pipeline.stages={stages}: only the built-in model can be split into stages"
            return
        found = list(self._model_problems(job))
        yield from found
        ranks = job.parallel.data_parallel_size(job.cluster.world_size)
        is_known = found or job.train.batch_size % ranks
        if not is_known and (problem := micro_batch_problem(pipeline, job.train, ranks)):
            yield problem

    def _model_problems(self, job: Recipe) -> Iterator[str]:
        pipeline, model = job.parallel.pipeline, job.model
        if model.tie_embeddings:
            yield (
                f"model.tie_embeddings=true with parallel.pipeline.stages={pipeline.stages}: the embedding is in the "
                "first stage and the output in the last one"
            )
        if pipeline.splits_backward:
            key = f"parallel.pipeline.schedule={pipeline.schedule}"
            if job.train.activation_checkpointing:
                # The built-in model's layers are recomputed 11 times. With `keep: products`, torch raises an error.
                yield f"{key} with train.activation_checkpointing=true: torch 2.13 recomputes a layer for each weight"
            if job.train.compile:
                yield f"{key} with train.compile=true: torch 2.13 cannot split the backward pass of compiled layers"
        try:
            split_model(pipeline, model, job.train)
        except ValueError as error:
            yield str(error).partition(": type ")[0]


PIPELINE = PipelineParallelism()
