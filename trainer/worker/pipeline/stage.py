"""A stage of torch's pipelining that says what it does, and keeps buffers of micro-batches in flight alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _make_tensor_from_meta
from torch.distributed.pipelining.schedules import _batch_p2p

from trainer.worker.pipeline.activities import Activity, Moment, Watched, Watcher

_AWAITED = {
    Activity.SEND_ACTIVATION: Activity.WAIT_FOR_SENT_ACTIVATION,
    Activity.SEND_GRADIENT: Activity.WAIT_FOR_SENT_GRADIENT,
}


class Stage(PipelineStage):
    """`PipelineStage` with static shapes: no rank sends another one pickled metadata.

    torch allocates a buffer for each micro-batch of a step and keeps them all. Here a buffer is allocated when its
    receive is posted, and dropped with the last gradient that is computed from it.
    """

    def __init__(
        self, module: nn.Module, number: int, stages: int, *,
        inputs: torch.Tensor, output: torch.Tensor, group: dist.ProcessGroup, device: torch.device,
        watchers: Sequence[Watcher] = (),
    ) -> None:  # fmt: skip
        """`inputs`, `output`: tensors on the meta device with the shapes and types of one micro-batch's."""
        super().__init__(
            module, number, stages, device, input_args=(inputs,), output_args=(output,), group=group
        )  # fmt: skip
        self.watchers = watchers
        self.sends: list[tuple[Moment, list[dist.Work]]] = []
        """What was sent in this step and may not have been taken, oldest first."""
        self.sent_bytes = 0  # since the beginning
        self.may_send: Callable[[], bool] = lambda: True
        """Asked before everything that is sent."""

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        with self._on_meta_device():
            super()._setup_forward_recv_info(num_microbatches, has_backward)
        for infos in self.args_recv_info.values():
            self._drop(infos)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        with self._on_meta_device():
            super()._setup_backward_recv_info(num_microbatches)
        for infos in self.grad_recv_info.values():
            self._drop(infos)

    @contextmanager
    def _on_meta_device(self) -> Iterator[None]:
        """Buffers that torch makes of all micro-batches, which are dropped at once, take no memory."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._send(Activity.SEND_ACTIVATION, fwd_chunk_id, super().get_fwd_send_ops)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._send(Activity.SEND_GRADIENT, bwd_chunk_id, super().get_bwd_send_ops)
        return []

    def _send(self, activity: Activity, micro_batch: int, prepare: Callable[[int], list[dist.P2POp]]) -> None:
        """Send, and keep what was begun: torch would wait for it without saying so."""
        with Watched(self.watchers, moment := Moment(activity, self.stage_index, micro_batch)):
            sends = self.may_send()
            ops = prepare(micro_batch)
            if ops and sends:
                self.sent_bytes += sum(op.tensor.nbytes for op in ops)
                self.sends.append((moment, _batch_p2p(ops)))

    def wait_for_sends(self) -> None:
        """Until all that was sent has been taken."""
        for moment, works in self.sends:
            with Watched(self.watchers, moment._replace(activity=_AWAITED[moment.activity])):
                for work in works:
                    work.wait()
        self.sends.clear()

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._doing(Activity.FORWARD, fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward:
            self._drop(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        activity = Activity.BACKWARD if full_backward else Activity.INPUT_GRADIENT
        with self._doing(activity, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self._forget(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        with self._doing(Activity.WEIGHT_GRADIENT, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            add_up_in_reduce_dtype(self.submod)
        self._forget(bwd_chunk_id)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if not self.has_backward:
            return
        with self._doing(Activity.REDUCE, -1):
            super().perform_reduce_grad(grad_scale_factor)

    def _doing(self, activity: Activity, micro_batch: int) -> "_Computed":
        return _Computed(self.watchers, Moment(activity, self.stage_index, micro_batch))

    def _forget(self, micro_batch: int) -> None:
        self._drop(self.args_recv_info[micro_batch])
        self._drop(self.grad_recv_info[micro_batch])

    def _allocate(self, infos: Sequence[Any]) -> None:
        for info in infos:
            if info.buffer is None and info.tensor_meta is not None and not info.is_root_arg:
                info.buffer = _make_tensor_from_meta(info.tensor_meta, self.device)

    @staticmethod
    def _drop(infos: Sequence[Any]) -> None:
        for info in infos:
            info.buffer = None


class _Computed(Watched):
    """What the model does: raises what it has raised, such as being out of memory, and not torch's words around it."""

    __slots__ = ()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and error.__cause__ is not None:
            raise error.__cause__ from None


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
