"""Expert parallelism: divides each layer's experts among ranks, and sends tokens to them and back."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from trainer.parallel.apply.data_parallel import fsdp_options, layer_precision
from trainer.parallel.apply.mesh import Layout
from trainer.parallel.apply.pipeline_runtime import PipelinedModel
from trainer.protocol.config import JobConfig
from trainer.worker.reporting.phase_tracker import current_tracker, waiting_for_peers


def permute_rows(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return `rows[order]`, where `order` contains each row once."""
    moved: torch.Tensor = _Permuted.apply(rows, order, inverse(order))  # type: ignore[no-untyped-call]
    return moved


def inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the inverse permutation of `order`."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


class _Permuted(torch.autograd.Function):
    """Gathers in both directions, because torch's backward pass would add gradients, on GPUs in a random order."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient[back], None, None


def own_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight as used for this rank's own tokens; a replicated weight's gradient is a sum over ranks."""
    if not isinstance(weight, DTensor):
        return weight
    placements = [Partial() if placement.is_replicate() else placement for placement in weight.placements]
    return weight.to_local(grad_placements=placements)


class ExpertStacks(nn.Module):
    """Base class of modules with the weights of several experts, [experts, inner width, width].

    `module(rows, counts)` computes `rows` [rows, width], which are sorted by expert; `counts`: rows per expert.
    """


class BalancedRouter(nn.Module):
    """Base class of routers that adjust an expert's bias after each step in which its load differed from the mean."""

    same_on_all_ranks = ("moves",)
    """Buffers stored once per checkpoint: a pipeline stage restores them from any rank that saved."""
    moves: torch.Tensor
    """Net adjustment of each expert's bias, as an integer multiple of the rate, so that sums are exact in any order."""
    load: torch.Tensor
    """Tokens per expert since the last optimizer step, counted in this rank's backward passes."""

    def reset(self, device: torch.device) -> None:
        """Reset to the state of step 0."""
        self.moves = torch.zeros_like(self.moves, device=device)
        self.load = torch.zeros_like(self.load, device=device)

    @torch.no_grad()
    def balance(self, load: torch.Tensor) -> None:
        """Update the bias after a step in which the experts had `load` tokens [experts] over all ranks."""
        self.moves += (load.sum() - load * len(load)).sign().to(self.moves.dtype)


class ExpertBalance:
    """Load balancing for the routers in this rank's layers, if the model has experts.

    Loads have a row for each layer of the whole model; a pipeline rank fills in the rows of its own layers.
    """

    def __init__(self, model: nn.Module, rows: Iterable[int] | None = None, layers: int | None = None) -> None:
        """`rows`: indices of this rank's layers among all `layers`, in the order of `model`; None means all layers."""
        found = [module for module in model.modules() if isinstance(module, BalancedRouter)]
        numbers = range(len(found)) if rows is None or not found else rows
        self._routers = dict(zip(numbers, found, strict=True))
        self.layers = 0 if not found else len(found) if layers is None else layers
        """Number of layers with experts in the whole model."""

    def loads(self) -> torch.Tensor | None:
        """Return this rank's tokens per expert since the last step, row by row, float64; to be summed over ranks."""
        if not self._routers:
            return None
        of_others = torch.zeros_like(next(iter(self._routers.values())).load)
        rows = [self._routers[row].load if row in self._routers else of_others for row in range(self.layers)]
        return torch.cat(rows).double()

    def step_ended(self, loads: torch.Tensor | None, *, moves: bool) -> None:
        """Reset the counts; `loads`: sums over all ranks. `moves`: whether the optimizer has stepped."""
        if loads is None:
            return
        rows = loads.view(self.layers, -1)
        for row, router in self._routers.items():
            router.load.zero_()
            if moves:
                router.balance(rows[row])


class TokenExchange:
    """Exchange of tokens among the ranks of `group`, which hold the same number of experts each, in rank order.

    The experts' work is excluded from this rank's timing, because a rank with popular experts is not a straggler.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, rows: torch.Tensor, load: torch.Tensor, experts: ExpertStacks) -> torch.Tensor:
        """Compute `rows` [rows, width] of this rank's tokens, sorted by expert; `load` [experts]: rows per expert."""
        sent = load.view(self._group.size(), -1)
        received = self._exchange_counts(sent)
        to, of = sent.sum(dim=1).tolist(), received.sum(dim=1).tolist()
        order = _expert_order(received)
        # Reordered copies of the rows are never named, so each is freed as soon as the next copy exists.
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
        with waiting_for_peers(sent.device):
            dist.all_to_all_single(received, sent.contiguous(), group=self._group)
        return received


def _expert_order(received: torch.Tensor) -> torch.Tensor:
    """Return the order that sorts rows by expert, then rank; they arrive sorted by rank, then expert."""
    ranks, experts = received.shape
    numbers = torch.arange(experts, device=received.device).repeat(ranks)
    return numbers.repeat_interleave(received.flatten()).argsort(stable=True)


class _RowExchange(torch.autograd.Function):
    """Exchanges rows with every rank; gradients take the reverse path. The work in between is not measured."""

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
    """Exchange rows; `opens`: whether the experts compute after this exchange instead of before it."""
    tracker = current_tracker()
    if tracker is not None and not opens:
        tracker.resume()
    received = rows.new_empty((sum(of), *rows.shape[1:]))
    with waiting_for_peers(rows.device):
        dist.all_to_all_single(received, rows.contiguous(), list(of), list(to), group=group)
    if tracker is not None and opens:
        tracker.pause()
    return received


def apply(model: Any, layout: Layout, config: JobConfig) -> None:
    """Divide the experts of `model` (a Llama on the meta device) among the ranks of `layout.ep`."""
    exchange = TokenExchange(layout.ep.get_group())
    for layer in model.layers:
        mixture = layer.feed_forward
        mixture.dispatch = exchange
        _split(mixture.experts, layout.ep)
        _shard(mixture.experts, layout, config, layer_precision(config))


def share_tokens(model: Any, layout: Layout) -> None:
    """Give each tensor-parallel rank a part of every sequence in the mixtures of `model`; replicate their weights."""
    for layer in model.layers:
        mixture = layer.feed_forward
        _replicate(mixture.router, layout.tp)
        if layout.expert_mesh is None:
            _replicate(mixture.experts, layout.tp)


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate weights on the meta device and without communication."""
    for name, weight in list(module.named_parameters()):
        whole = DTensor.from_local(weight.detach(), mesh, [Replicate()], run_check=False)
        module.register_parameter(name, nn.Parameter(whole))


def _split(experts: ExpertStacks, mesh: DeviceMesh) -> None:
    """Replace stacks with this rank's part, on the meta device and without communication."""
    for name, weight in list(experts.named_parameters()):
        part = weight.new_empty((weight.shape[0] // mesh.size(), *weight.shape[1:]))
        experts.register_parameter(name, nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False)))


def _shard(experts: ExpertStacks, layout: Layout, config: JobConfig, policy: MixedPrecisionPolicy) -> None:
    """Apply FSDP along the inner width, so that no dimension is split twice.

    A rank holds the gradient that its experts computed for all ranks of `ep`. Each of these has its own mean loss,
    or with tensor parallelism a part of a mean. The mean of all means is the sum over the ranks with the same experts,
    divided by the number of means.
    """
    mesh = layout.fsdp_of_experts
    fully_shard(experts, mesh=mesh, shard_placement_fn=lambda _: Shard(1), **fsdp_options(layout, config, policy))
    assert isinstance(experts, FSDPModule)
    experts.set_gradient_divide_factor(mesh.size() * layout.ep.size() / layout.sizes["tp"])
    # gloo cannot divide while summing; for a single shard, torch 2.13 would then divide twice.
    shards = mesh.size(mesh.ndim - 1)
    experts.set_force_sum_reduction_for_comms(layout.device.type == "cpu" and shards > 1)


def build_expert_balance(model: nn.Module) -> ExpertBalance:
    """Return the expert balance of a whole model, or of this rank's stages."""
    if not isinstance(model, PipelinedModel):
        return ExpertBalance(model)
    return ExpertBalance(model, model.layer_numbers, model.depth)
