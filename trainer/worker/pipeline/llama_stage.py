"""A part of the built-in model: some of its layers, under their names in the whole model."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from trainer.contract.config import ModelConfig, TrainConfig
from trainer.contract.pipeline.stage_split import StagePart
from trainer.worker.llama import Llama
from trainer.worker.parallel.fsdp_units import CLASSES


class NumberedLayers(nn.ModuleList):
    """Layers in order, under their numbers in the whole model: `layers.5.attention.wq.weight` stays that."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)


class LlamaStage(Llama):
    """Tokens, or activations [batch, length, dim], to activations; the last stage gives the mean loss of `targets`.

    Made on the meta device, so that no stage ever has the whole model.
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
        x = self.through_layers(self.embed(x) if self.stage.is_first else x)
        return self.result(x, targets) if self.stage.is_last else x


class StagesOfRank(nn.Module):
    """All stages of one rank as one module: parameters under their names in the whole model, to optimize and to save.

    It shares the modules of its stages and computes nothing.
    """

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
