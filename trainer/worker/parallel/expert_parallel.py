"""Expert parallelism: divides the experts of each layer among ranks, and carries tokens to them and back."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer.contract.config import JobConfig
from trainer.worker.mixture_of_experts import Experts, inverse, permute_rows
from trainer.worker.parallel.context_parallel import waiting
from trainer.worker.parallel.data_parallel import fsdp_options
from trainer.worker.parallel.mesh import Layout
from trainer.worker.reporting.phase_tracker import current_tracker


class TokenExchange:
    """Exchanges tokens with the ranks of `group`, which have equally many experts, in rank order.

    A rank with popular experts computes more than its peers. That work belongs to all of them and is excluded from the
    rank's timing, so that only other slowness makes a rank a straggler.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, rows: torch.Tensor, load: torch.Tensor, experts: Experts) -> torch.Tensor:
        """Compute `rows` [rows, width] of this rank's tokens, sorted by expert; `load` [experts]: rows per expert."""
        sent = load.view(self._group.size(), -1)
        received = self._exchange_counts(sent)
        to, of = sent.sum(dim=1).tolist(), received.sum(dim=1).tolist()
        order = _expert_order(received)
        # Reordered copies of the rows have no name, so that each is freed as soon as the next one exists.
        computed = permute_rows(
            experts(permute_rows(self._exchange(rows, to, of, is_way_there=True), order), received.sum(dim=0).tolist()),
            inverse(order),
        )
        return self._exchange(computed, of, to, is_way_there=False)

    def _exchange(
        self, rows: torch.Tensor, to: Sequence[int], of: Sequence[int], *, is_way_there: bool
    ) -> torch.Tensor:
        received: torch.Tensor = _RowExchange.apply(rows, to, of, self._group, is_way_there)  # type: ignore[no-untyped-call]
        return received

    def _exchange_counts(self, sent: torch.Tensor) -> torch.Tensor:
        """Return the rows from each rank for each of this rank's experts [ranks, experts of a rank]."""
        received = torch.empty_like(sent)
        with waiting(sent.device):
            dist.all_to_all_single(received, sent.contiguous(), group=self._group)
        return received


def _expert_order(received: torch.Tensor) -> torch.Tensor:
    """Return the order that sorts rows by expert, then rank; they arrive sorted by rank, then expert."""
    ranks, experts = received.shape
    numbers = torch.arange(experts, device=received.device).repeat(ranks)
    return numbers.repeat_interleave(received.flatten()).argsort(stable=True)


class _RowExchange(torch.autograd.Function):
    """Sends rows to each rank and receives rows from it; gradients take the reverse path.

    The time between the exchange and its return is not measured, in the forward and in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, to: Sequence[int], of: Sequence[int], group: dist.ProcessGroup, is_way_there: bool
    ) -> torch.Tensor:
        ctx.to, ctx.of, ctx.group, ctx.is_way_there = to, of, group, is_way_there
        return _exchange_rows(rows, to, of, group, opens=is_way_there)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange_rows(gradient, ctx.of, ctx.to, ctx.group, opens=not ctx.is_way_there), None, None, None, None


def _exchange_rows(
    rows: torch.Tensor, to: Sequence[int], of: Sequence[int], group: dist.ProcessGroup, *, opens: bool
) -> torch.Tensor:
    """Exchange rows; `opens`: the experts compute afterwards, else they have computed."""
    tracker = current_tracker()
    if tracker is not None and not opens:
        tracker.resume()
    received = rows.new_empty((sum(of), *rows.shape[1:]))
    with waiting(rows.device):
        dist.all_to_all_single(received, rows.contiguous(), list(of), list(to), group=group)
    if tracker is not None and opens:
        tracker.pause()
    return received


def expert_parallel(model: Any, layout: Layout, config: JobConfig, policy: MixedPrecisionPolicy) -> None:
    """Divide the experts of `model` (a Llama on the meta device) among the ranks of `layout.ep`."""
    exchange = TokenExchange(layout.ep.get_group())
    for layer in model.layers:
        mixture = layer.feed_forward
        mixture.dispatch = exchange
        _split(mixture.experts, layout.ep)
        _shard(mixture.experts, layout, config, policy)


def share_tokens(model: Any, layout: Layout) -> None:
    """Give tensor-parallel ranks parts of each sequence in the mixtures of `model`, and replicated weights.

    Gradients of these weights are sums over the ranks, like those of norms. For shared experts (`layout.ep`) `tp` ranks
    count like any others, and each has its own experts.
    """
    for layer in model.layers:
        mixture = layer.feed_forward
        _replicate(mixture.router, layout.tp)
        if layout.expert_mesh is None:
            _replicate(mixture.experts, layout.tp)


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate weights on the meta device, without communication."""
    for name, weight in list(module.named_parameters()):
        whole = DTensor.from_local(weight.detach(), mesh, [Replicate()], run_check=False)
        module.register_parameter(name, nn.Parameter(whole))


def _split(experts: Experts, mesh: DeviceMesh) -> None:
    """Replace stacks by this rank's part, on the meta device, without communication."""
    for name, weight in list(experts.named_parameters()):
        part = weight.new_empty((weight.shape[0] // mesh.size(), *weight.shape[1:]))
        experts.register_parameter(name, nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False)))


def _shard(experts: Experts, layout: Layout, config: JobConfig, policy: MixedPrecisionPolicy) -> None:
    """Apply FSDP along the inner width, so that no dimension is split twice.

    A rank holds the gradient that its experts computed for all ranks of `ep`, each of which has its own mean loss, or
    with tensor parallelism a part of one. The mean over all means is the sum over the ranks with the same experts,
    divided by the number of means.
    """
    mesh = layout.fsdp_of_experts
    fully_shard(experts, mesh=mesh, shard_placement_fn=lambda _: Shard(1), **fsdp_options(layout, config, policy))
    assert isinstance(experts, FSDPModule)
    experts.set_gradient_divide_factor(mesh.size() * layout.ep.size() / layout.sizes.tp)
    # gloo cannot divide while summing; for a single shard torch 2.13 would then divide twice.
    shards = mesh.size(mesh.ndim - 1)
    experts.set_force_sum_reduction_for_comms(layout.device.type == "cpu" and shards > 1)
