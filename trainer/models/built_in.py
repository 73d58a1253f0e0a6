"""The built-in workload: the Llama-style decoder on token shards."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.costs.model_flops import flops_per_token
from trainer.models import parallelize
from trainer.models.llama import Llama
from trainer.models.pipelined_llama import PipelinedLlama, pipelined_llama
from trainer.parallel.apply.data_parallel import offloads_all
from trainer.parallel.apply.mesh import Layout
from trainer.protocol.config import JobConfig
from trainer.protocol.token_shards import TokenIndex
from trainer.worker.data import Data, MaskedTokens, StatefulData
from trainer.worker.workload import BaseWorkload, WorkloadError


class LlamaWorkload(BaseWorkload):
    """Next-token prediction over token shards; bitwise reproducible, also on GPUs."""

    strictly_deterministic = True

    def __init__(self, config: JobConfig, **args: Any) -> None:
        super().__init__(config, **args)
        if args:
            raise WorkloadError(f"workload.args: the built-in model accepts none, but got {', '.join(sorted(args))}")
        parallelize.check(config)
        train = config.train
        self.flops_per_step = flops_per_token(config.model, train.seq_len) * train.batch_size * train.seq_len

    def build_model(self) -> Llama:
        config = self.config
        # torch warns in every rank's log about in-place changes of the logits; `loss` makes none.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        with torch.device("meta"):
            return Llama(config.model, config.train)

    def parallelize(self, model: nn.Module, layout: Layout) -> Llama:
        assert isinstance(model, Llama)
        self._shard(model, layout)
        model.set_initial_weights(self.config.train.seed)
        return model

    def build_sharded(self, layout: Layout) -> Llama | PipelinedLlama:
        """Return this rank's model, or its pipeline stages, without initial weights."""
        if layout.sizes["pp"] > 1:
            return pipelined_llama(self.config, layout)
        return self._shard(self.build_model(), layout)

    def _shard(self, model: Llama, layout: Layout) -> Llama:
        parallelize.shard(model, layout, self.config)
        model.allocate(layout.device, offload=offloads_all(self.config))
        return model

    def build_data(self, layout: Layout) -> Data | StatefulData:
        data = super().build_data(layout)
        found, known = TokenIndex.read(Path(self.config.data.path)).vocab_size, self.config.model.vocab_size
        if found > known:
            raise WorkloadError(f"model.vocab_size={known}, but {self.config.data.path} has {found} distinct tokens")
        if layout.sizes["pp"] > 1 and TokenIndex.read(Path(self.config.data.path)).is_masked:
            why = f"{self.config.data.path} is trained in part, which pipelines do not support"
            raise WorkloadError(
                f"parallel.pipeline.stages={layout.sizes['pp']}: {why}: type parallel.pipeline.stages=1"
            )
        return data

    def loss(self, model: nn.Module, batch: torch.Tensor | MaskedTokens) -> torch.Tensor:
        """Return the cross-entropy in float32 of tokens 1.. given tokens 0.., for `batch` [micro, seq_len + 1]."""
        if isinstance(batch, MaskedTokens):
            mean: torch.Tensor = model(batch.inputs, batch.targets)
            return mean * (batch.targets.numel() / batch.trained)
        loss: torch.Tensor = model(batch[:, :-1], batch[:, 1:])
        return loss
