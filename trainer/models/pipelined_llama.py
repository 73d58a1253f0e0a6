"""A rank's stages as one model: parameters named as in the whole model, and the pipeline that runs the stages."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from trainer.costs.micro_batches import micro_batch_count, micro_batch_size
from trainer.costs.stage_split import StagePart, split_model, stages_of_rank
from trainer.models import parallelize
from trainer.models.llama import Llama
from trainer.parallel.apply.data_parallel import offloads_all
from trainer.parallel.apply.fsdp_units import CLASSES
from trainer.parallel.apply.gradient_buckets import mark_replica
from trainer.parallel.apply.mesh import Layout
from trainer.parallel.apply.pipeline_runtime import Pipeline, PipelinedModel
from trainer.parallel.apply.pipeline_stage import LocalStage
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.recipe_config import ModelConfig, TrainConfig


class NumberedLayers(nn.ModuleList):
    """Layers in order, numbered as in the whole model, so that `layers.5.attention.wq.weight` keeps its name."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)


class LlamaStage(Llama):
    """Stage that maps tokens or activations [batch, length, dim] to activations, or to the mean loss if it is the last.

    Created on the meta device, so that no stage ever holds the whole model.
    """

    def __init__(self, config: ModelConfig, train: TrainConfig, part: StagePart) -> None:
        super().__init__(config, train)
        self.stage = part
        vars(self)[CLASSES] = frozenset(type(module).__name__ for module in self.modules())
        self.layers = NumberedLayers({number: self.layers[number] for number in part.layers})
        if not part.is_first:
            del self.embedding
        if not part.is_last:
            del self.norm, self.output

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.through_layers(self.embed_tokens(x) if self.stage.is_first else x)
        return self.result(x, targets) if self.stage.is_last else x


class StagesOfRank(nn.Module):
    """All stages of one rank as one module with the whole model's parameter names; computes nothing."""

    def __init__(self, stages: Sequence[LlamaStage]) -> None:
        super().__init__()
        self.layers = NumberedLayers(
            {
                number: layer
                for stage in stages
                for number, layer in zip(stage.stage.layers, stage.layers, strict=True)
            }
        )  # fmt: skip
        for stage in stages:
            for name, child in stage.named_children():
                if name != "layers":
                    self.add_module(name, child)


class PipelinedLlama(StagesOfRank, PipelinedModel):
    """This rank's stages of the built-in model; `pipeline` runs them together with the other ranks."""

    def __init__(self, modules: Sequence[LlamaStage], pipeline: Pipeline) -> None:
        super().__init__(modules)
        self.pipeline, self.depth = pipeline, modules[0].config.layers
        self.layer_numbers = [number for module in modules for number in module.stage.layers]
        self._stages = tuple(modules)

    def set_initial_weights(self, seed: int) -> None:
        """Set the initial weights, as `Llama.set_initial_weights` does."""
        for module in self._stages:
            module.set_initial_weights(seed)


def pipelined_llama(config: JobConfig, layout: Layout) -> PipelinedLlama:
    """Build this rank's stages, sharded, without initial weights."""
    pipeline, train, place = config.parallel.pipeline, config.train, layout.place["pp"]
    parts = split_model(pipeline, config.model, train).parts
    modules = [stage_module(config, parts[number], layout) for number in stages_of_rank(pipeline, place)]
    sequences = micro_batch_size(pipeline, train, layout.dp_size)
    stages = [
        stage(module, train, layout.pp.get_group(), layout.device, sequences=sequences, tp=layout.sizes["tp"])
        for module in modules
    ]
    model = PipelinedLlama(modules, Pipeline(pipeline, stages, micro_batch_count(pipeline, train, layout.dp_size)))
    if config.parallel.has_plain_replicas(train.dtype):
        mark_replica(model)  # its parameters belong to the stages, which are not its submodules
    return model


def stage_module(config: JobConfig, part: StagePart, layout: Layout) -> LlamaStage:
    """Build the stage's module, sharded over the ranks with the same stage, without initial weights.

    The pipeline gathers parameters once per step, regardless of `parallel.fsdp.reshard_after_forward`.
    """
    # torch warns in every rank's log about in-place changes of activations.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # It also warns for each part of the tensor-parallel plan that belongs to another stage.
    warnings.filterwarnings("ignore", message="Parallelize plan key .* could not be resolved")
    fsdp = replace(config.parallel.fsdp, reshard_after_forward="never")
    config = replace(config, parallel=replace(config.parallel, fsdp=fsdp))
    with torch.device("meta"):
        module = LlamaStage(config.model, config.train, part)
    parallelize.shard(module, layout, config)
    module.allocate(layout.device, offload=offloads_all(config))
    return module


def stage(
    module: LlamaStage, train: TrainConfig, group: dist.ProcessGroup, device: torch.device, *,
    sequences: int, tp: int = 1,
) -> LocalStage:  # fmt: skip
    """Return `module` as a stage in the pipeline of `group`; `sequences`: their number per micro-batch."""
    part, own = module.stage, module.part
    length = (train.seq_len if own is None else own.chunk * len(own.chunks)) // tp
    tokens, activation, loss = _examples(train, (sequences, length, module.config.dim))
    return LocalStage(
        module,
        part.stage,
        part.stages,
        inputs=tokens if part.is_first else activation,
        output=loss if part.is_last else activation,
        group=group,
        device=device,
    )


def _examples(train: TrainConfig, shape: tuple[int, int, int]) -> Sequence[torch.Tensor]:
    dtype = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[train.dtype]
    return (
        torch.empty(shape[0], train.seq_len, dtype=torch.long, device="meta"),
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=True),
        torch.empty((), dtype=torch.float32, device="meta", requires_grad=True),
    )
