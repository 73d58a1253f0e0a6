"""The stages of a rank as one model: parameters with their names in the whole model, and the pipeline that runs it."""

from collections.abc import Sequence

from torch import nn

from trainer.contract.config import JobConfig
from trainer.contract.pipeline.micro_batches import micro_batch_count, micro_batch_size
from trainer.contract.pipeline.stage_split import split_model, stages_of_rank
from trainer.worker.mixture_of_experts import ExpertBalance
from trainer.worker.parallel.gradient_buckets import mark_replica
from trainer.worker.parallel.mesh import Layout
from trainer.worker.pipeline.runtime import Pipeline
from trainer.worker.pipeline.stage import LlamaStage, StagesOfRank, stage, stage_module


class PipelinedLlama(StagesOfRank):
    """This rank's stages of the built-in model; `pipeline` computes with them and the other ranks."""

    def __init__(self, modules: Sequence[LlamaStage], pipeline: Pipeline) -> None:
        super().__init__(modules)
        self.pipeline = pipeline
        self._stages = tuple(modules)
        self.layer_numbers = [number for module in modules for number in module.stage.layers]
        """Layer numbers of this rank, in order."""
        self.depth = modules[0].config.layers
        """Number of layers in the whole model."""

    def set_initial_weights(self, seed: int) -> None:
        """Set the weights like `Llama.set_initial_weights`."""
        for module in self._stages:
            module.set_initial_weights(seed)


def pipelined_llama(config: JobConfig, layout: Layout) -> PipelinedLlama:
    """Build this rank's stages, sharded, without initial weights."""
    pipeline, train, place = config.parallel.pipeline, config.train, layout.place.pp
    parts = split_model(pipeline, config).parts
    modules = [stage_module(config, parts[number], layout) for number in stages_of_rank(pipeline, place)]
    sequences = micro_batch_size(pipeline, train, layout.dp_size)
    stages = [
        stage(module, train, layout.pp.get_group(), layout.device, sequences=sequences, tp=layout.sizes.tp)
        for module in modules
    ]
    model = PipelinedLlama(modules, Pipeline(pipeline, stages, micro_batch_count(pipeline, train, layout.dp_size)))
    if config.parallel.has_plain_replicas(train.dtype):
        mark_replica(model)  # its parameters belong to the stages, which are not modules of it
    return model


def build_expert_balance(model: nn.Module) -> ExpertBalance:
    """Return the balance of a whole model's experts, or of those in this rank's stages."""
    if not isinstance(model, PipelinedLlama):
        return ExpertBalance(model)
    return ExpertBalance(model, model.layer_numbers, model.depth)


def find_pipeline(model: nn.Module) -> Pipeline | None:
    """Return the pipeline that runs `model`; None: the model computes by itself."""
    return model.pipeline if isinstance(model, PipelinedLlama) else None
