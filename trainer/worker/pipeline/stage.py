"""Computes one stage of a pipeline, in whole backward passes or in those of activations and of weights."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight


class Stage:
    """What a micro-batch leaves for its backward pass is dropped with the last gradient that is computed from it."""

    def __init__(
        self, module: nn.Module, number: int, stages: int, *,
        inputs: torch.Tensor, output: torch.Tensor, group: dist.ProcessGroup, device: torch.device,
    ) -> None:  # fmt: skip
        """`inputs`, `output`: tensors on the meta device with the shapes and types of one micro-batch's.

        `group`: the ranks of the pipeline. A module that is sharded is so already.
        """
        self.submod, self.stage_index, self.group = module, number, group
        self.is_first, self.is_last = number == 0, number == stages - 1
        self._like_input, self._like_output, self._device = inputs, output, device
        self._units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        self._gathers: list[Any] = []
        self._keeps_gradients = False
        self.outputs: dict[int, torch.Tensor] = {}
        """By micro-batch, from its forward pass to its backward pass; the last stage's are replaced by losses."""
        self.gradients: dict[int, torch.Tensor] = {}
        """Of what the stage before has sent, by micro-batch: to be taken out when they are sent back."""
        self._inputs: dict[int, torch.Tensor] = {}
        self._half_done: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Any]] = {}

    def input_buffer(self) -> torch.Tensor:
        """For what the stage before sends."""
        return torch.empty(self._like_input.shape, dtype=self._like_input.dtype, device=self._device)

    def gradient_buffer(self) -> torch.Tensor:
        """For the gradient of the output, which the next stage sends."""
        return torch.empty(self._like_output.shape, dtype=self._like_output.dtype, device=self._device)

    @property
    def inputs_held(self) -> int:
        """Micro-batches whose backward pass is not over."""
        return len(self._inputs) + len(self._half_done)

    def forward(self, micro_batch: int, x: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        """`x`: tokens, or a tensor from the stage before; raises ValueError for an output of another kind."""
        self._wait_for_gathers()
        if torch.is_grad_enabled():
            if not self.is_first:
                x.requires_grad_()
            self._inputs[micro_batch] = x
        output: torch.Tensor = self.submod(x, **more)
        due = self._like_output
        if not self.is_last and (output.dtype, output.shape) != (due.dtype, due.shape):
            raise ValueError(
                f"stage {self.stage_index}: its output is {output.dtype} {list(output.shape)}, and the next stage "
                f"waits for {due.dtype} {list(due.shape)}"
            )
        self.outputs[micro_batch] = output
        return output

    def backward(self, micro_batch: int, gradient: torch.Tensor | None) -> None:
        """Of activations and weights; `gradient`: of the output, None on the last stage."""
        self._begin_backward()
        output, x = self.outputs.pop(micro_batch), self._inputs.pop(micro_batch)
        torch.autograd.backward((output,), (gradient,))
        self._keep_gradient(micro_batch, x.grad)

    def input_gradient(self, micro_batch: int, gradient: torch.Tensor | None) -> None:
        """As `backward`, without the gradients of weights."""
        self._begin_backward()
        output, x = self.outputs.pop(micro_batch), self._inputs.pop(micro_batch)
        groups = None
        if not self.is_first:  # its only gradients are those of weights
            gradients = None if gradient is None else [gradient]
            (found,), groups = stage_backward_input([output], gradients, [x], self.submod.parameters())
            self._keep_gradient(micro_batch, found)
        self._half_done[micro_batch] = output, x, gradient, groups

    def weight_gradient(self, micro_batch: int) -> None:
        """What `input_gradient` has left."""
        self._begin_backward()
        output, _, gradient, groups = self._half_done.pop(micro_batch)
        if self.is_first:
            torch.autograd.backward((output,), (gradient,))
        else:
            stage_backward_weight(self.submod.parameters(), groups)
        add_up_in_reduce_dtype(self.submod)

    def gather(self) -> None:
        """Begin to gather sharded parameters; the first pass waits for it."""
        self._gathers = [unit.unshard(async_op=True) for unit in self._units]

    def reshard(self) -> None:
        """Drop the gathered parameters."""
        for unit in self._units:
            unit.reshard()

    def reduce_gradients(self) -> None:
        """Over the data-parallel ranks, where parameters are sharded: once a step, as torch's own stages do it."""
        if self._units:
            PipelineStage.perform_reduce_grad(cast(Any, self), 1)
            self._keeps_gradients = False

    def clear(self) -> None:
        """Forget what an evaluation has left."""
        self.outputs.clear()
        self.gradients.clear()
        self._inputs.clear()
        self._half_done.clear()

    def _keep_gradient(self, micro_batch: int, gradient: torch.Tensor | None) -> None:
        if not self.is_first:
            assert gradient is not None, "a stage that does not use what it is given"
            self.gradients[micro_batch] = gradient

    def _wait_for_gathers(self) -> None:
        for gather in self._gathers:
            gather.wait()
        self._gathers.clear()

    def _begin_backward(self) -> None:
        """FSDP adds gradients up, and keeps parameters gathered, until they are reduced."""
        self._wait_for_gathers()
        if self._units and not self._keeps_gradients:
            sharded = cast(FSDPModule, self.submod)
            sharded.set_is_last_backward(False)
            sharded.set_reshard_after_backward(False)
            sharded.set_requires_gradient_sync(False)
            self._keeps_gradients = True


def add_up_in_reduce_dtype(module: nn.Module) -> None:
    """Move gradients of half-precision weights into the sums that FSDP keeps in the type of its reduction.

    FSDP does so after a backward pass of the module. One that computes gradients of weights alone does not run its
    hooks, and they would be added up in half precision.
    """
    if not isinstance(module, FSDPModule):
        return
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    if hasattr(parameter, "_unsharded_param"):
                        parameter.accumulate_unsharded_grad_if_needed()
                        parameter.to_accumulated_grad_if_needed()
