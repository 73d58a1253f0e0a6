"""The passes of a step in a bare loop with torch's own pipelining: `PipelineStage` and `Schedule1F1B`."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from trainer.costs.micro_batches import micro_batch_count, micro_batch_size
from trainer.costs.stage_split import split_model
from trainer.models.pipelined_llama import LlamaStage
from trainer.protocol.config import JobConfig

_CPU = torch.device("cpu")


class BareStagedPasses:
    """Passes with one stage on each rank of the mesh and orch's layers there; shapes are known beforehand."""

    def __init__(self, config: JobConfig, mesh: DeviceMesh) -> None:
        part = split_model(config.parallel.pipeline, config).parts[mesh.get_rank()]
        with torch.device("meta"):
            self.model = LlamaStage(config.model, config.train, part)
        self.model.materialize(_CPU, config.train.seed)
        self._part, self._count = part, micro_batch_count(config.parallel.pipeline, config.train, 1)
        shape = (micro_batch_size(config.parallel.pipeline, config.train, 1), config.train.seq_len)
        with torch.device("meta"):
            activation = torch.empty(*shape, config.model.dim, requires_grad=True)
            first, last = torch.empty(shape, dtype=torch.long), torch.empty((), requires_grad=True)
        stage = PipelineStage(
            self.model, part.stage, part.stages, _CPU, group=mesh.get_group(),
            input_args=(first if part.is_first else activation,),
            output_args=(last if part.is_last else activation,),
        )  # fmt: skip
        self._schedule = Schedule1F1B(stage, self._count, loss_fn=lambda loss, _: loss)

    def gradients(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute gradients; return the mean loss of the step, zero except on the last rank."""
        tokens = torch.cat(list(batches))
        losses: list[torch.Tensor] = []
        args = (tokens[:, :-1],) if self._part.is_first else ()
        if self._part.is_last:
            self._schedule.step(*args, target=tokens[:, 1:], targets=tokens[:, 1:], losses=losses, return_outputs=False)
        else:
            self._schedule.step(*args, return_outputs=False)
        return torch.stack(losses).sum().detach() / self._count if losses else torch.zeros(())

    def end_step(self, total: torch.Tensor, most: float) -> torch.Tensor:
        """Clip by the norm over all stages, whose squares travel with the loss; return the loss of the step."""
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        sums = torch.stack([nn.utils.get_total_norm(gradients).square(), total])
        dist.all_reduce(sums)
        nn.utils.clip_grads_with_norm_(self.model.parameters(), most, sums[0].sqrt())
        return sums[1]
