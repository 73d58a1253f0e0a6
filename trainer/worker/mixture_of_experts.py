"""The mixture of experts: router, balance, exchange of tokens, and experts.

As in DeepSeek-V3 (DeepSeek-AI 2024, section 2.1.2) and Wang et al. 2024 (arXiv 2408.15664): a bias for each expert is
added to its scores when experts are chosen, and not when their outputs are weighed. After each step it moves up or down
by one rate for an expert that had fewer or more tokens than the mean.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from trainer.contract.config import JobConfig, ModelConfig
from trainer.contract.config_sections.parallel_config import ExpertsConfig
from trainer.worker.parallel.context_parallel import waiting
from trainer.worker.parallel.data_parallel import fsdp_options
from trainer.worker.parallel.mesh import Layout
from trainer.worker.reporting.phase_tracker import current_tracker


def permuted(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """`rows[order]`, where `order` names each row once."""
    moved: torch.Tensor = _Permuted.apply(rows, order, inverse(order))  # type: ignore[no-untyped-call]
    return moved


def inverse(order: torch.Tensor) -> torch.Tensor:
    """The order that undoes `order`."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


class _Permuted(torch.autograd.Function):
    """Gathers in both directions: torch would add the gradients up, on GPUs in any order."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient[back], None, None


class Experts(nn.Module):
    """SwiGLU (Shazeer 2020) for each expert; all matrices are [experts, inner width, width]."""

    def __init__(self, dim: int, config: ExpertsConfig) -> None:
        super().__init__()
        shape = (config.count, config.ffn_dim, dim)
        self.w1, self.w2, self.w3 = (nn.Parameter(torch.empty(shape)) for _ in range(3))

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """`rows` [rows, width] in the order of the experts that this rank has, so many for each of them."""
        # Of `unbind` the gradient is one stack; of an index for each expert it would be a sum of whole stacks.
        matrices = (own_weight(weight).unbind() for weight in (self.w1, self.w2, self.w3))
        parts = zip(rows.split(list(counts)), *matrices, strict=True)
        return torch.cat(
            [functional.linear(functional.silu(part @ w1.T) * (part @ w3.T), w2.T) for part, w1, w2, w3 in parts]
        )


def own_weight(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part, to compute its own tokens with: the gradient of what several ranks have is a sum over them."""
    if not isinstance(weight, DTensor):
        return weight
    placements = [Partial() if placement.is_replicate() else placement for placement in weight.placements]
    return weight.to_local(grad_placements=placements)


class Choice(NamedTuple):
    """What tokens are given to: the experts' numbers and weights, both [tokens, experts of a token]."""

    experts: torch.Tensor
    weights: torch.Tensor
    load: torch.Tensor
    """Tokens of each expert, int64 [experts]."""


class Router(nn.Module):
    """A linear layer whose scores are sigmoids in float32."""

    same_on_all_ranks = ("moves",)
    """Buffers of which a checkpoint keeps one: a stage of a pipeline restores them from whichever ranks saved."""
    moves: torch.Tensor
    """By how many times the rate each expert's bias has moved. A whole number: its sums are exact in any order."""
    load: torch.Tensor
    """Tokens of each expert since the last optimizer step, of those whose backward pass this rank has computed."""

    def __init__(self, dim: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.per_token, self.rate = config.per_token, config.balance_rate
        self.weight = nn.Parameter(torch.empty(config.count, dim))
        self.register_buffer("moves", torch.empty(config.count, dtype=torch.int64))
        self.register_buffer("load", torch.empty(config.count, dtype=torch.int64), persistent=False)

    def reset(self, device: torch.device) -> None:
        """The state of step 0."""
        self.moves = torch.zeros_like(self.moves, device=device)
        self.load = torch.zeros_like(self.load, device=device)

    def forward(self, tokens: torch.Tensor) -> Choice:
        """Choose for `tokens` [tokens, dim]."""
        scores = functional.linear(tokens.float(), own_weight(self.weight).float()).sigmoid()
        chosen = (scores.detach() + self.rate * self.moves).topk(self.per_token, dim=-1).indices
        own = scores.gather(1, chosen)
        load = chosen.flatten().bincount(minlength=len(self.load))
        weights: torch.Tensor = _Counted.apply(  # type: ignore[no-untyped-call]
            own / own.sum(dim=-1, keepdim=True), load, self.load
        )
        return Choice(chosen, weights, load)

    @torch.no_grad()
    def balance(self, load: torch.Tensor) -> None:
        """Move the bias after a step in which the experts had `load` tokens [experts] over all ranks."""
        self.moves += (load.sum() - load * len(load)).sign().to(self.moves.dtype)


class _Counted(torch.autograd.Function):
    """Adds a load to a total when the gradient comes: once for each micro-batch, however often a forward pass runs.

    One that is computed again for activation checkpointing has no backward pass of its own, nor has validation.
    """

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, load: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        ctx.load, ctx.total = load, total
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.total += ctx.load
        return gradient, None, None


class ExpertBalance:
    """The routers of this rank's layers; a dense model has none.

    Loads have a row for each layer of the whole model. A rank of a pipeline fills in those of its own layers, so that
    the sum over all ranks has all of them.
    """

    def __init__(self, model: nn.Module, rows: Iterable[int] | None = None, layers: int | None = None) -> None:
        """`rows`: of this rank's layers, in the order of `model`, among all `layers`; None: it has all of them."""
        found = [module for module in model.modules() if isinstance(module, Router)]
        numbers = range(len(found)) if rows is None or not found else rows
        self._routers = dict(zip(numbers, found, strict=True))
        self.layers = 0 if not found else len(found) if layers is None else layers
        """How many of the whole model have experts."""

    def loads(self) -> torch.Tensor | None:
        """Tokens of every expert on this rank since the last step, row by row, float64; to be summed over ranks."""
        if not self._routers:
            return None
        of_others = torch.zeros_like(next(iter(self._routers.values())).load)
        rows = [self._routers[row].load if row in self._routers else of_others for row in range(self.layers)]
        return torch.cat(rows).double()

    def step_ended(self, loads: torch.Tensor | None, *, moves: bool) -> None:
        """Begin to count anew; `loads`: those of all ranks. `moves`: whether the optimizer has stepped."""
        if loads is None:
            return
        rows = loads.view(self.layers, -1)
        for row, router in self._routers.items():
            router.load.zero_()
            if moves:
                router.balance(rows[row])


class TokenExchange:
    """Each rank of `group` has as many experts as any other one, in the order of ranks.

    A rank with popular experts computes more than its peers. That is the work of all of them, so that it is left out of
    what a rank is timed by: a slow rank is one that is slow at all else.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, rows: torch.Tensor, load: torch.Tensor, experts: Experts) -> torch.Tensor:
        """`rows` [rows, width] of this rank's tokens, sorted by expert; `load` [experts]: how many are of each."""
        sent = load.view(self._group.size(), -1)
        received = self._exchange_counts(sent)
        to, of = sent.sum(dim=1).tolist(), received.sum(dim=1).tolist()
        order = _by_expert(received)
        # Each copy of the rows in another order has no name, so that it is freed as soon as the next one is made.
        computed = permuted(
            experts(permuted(self._exchange(rows, to, of, is_way_there=True), order), received.sum(dim=0).tolist()),
            inverse(order),
        )
        return self._exchange(computed, of, to, is_way_there=False)

    def _exchange(
        self, rows: torch.Tensor, to: Sequence[int], of: Sequence[int], *, is_way_there: bool
    ) -> torch.Tensor:
        received: torch.Tensor = _Exchange.apply(rows, to, of, self._group, is_way_there)  # type: ignore[no-untyped-call]
        return received

    def _exchange_counts(self, sent: torch.Tensor) -> torch.Tensor:
        """How many rows come from each rank for each of this rank's experts [ranks, experts of a rank]."""
        received = torch.empty_like(sent)
        with waiting(sent.device):
            dist.all_to_all_single(received, sent.contiguous(), group=self._group)
        return received


def _by_expert(received: torch.Tensor) -> torch.Tensor:
    """The order that sorts rows by expert, which come sorted by rank and then by expert; within one, by rank."""
    ranks, experts = received.shape
    numbers = torch.arange(experts, device=received.device).repeat(ranks)
    return numbers.repeat_interleave(received.flatten()).argsort(stable=True)


class _Exchange(torch.autograd.Function):
    """So many rows go to each rank and come from it; gradients take the same way back.

    What lies between the way there and the way back is not timed, in the forward and in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, to: Sequence[int], of: Sequence[int], group: dist.ProcessGroup, is_way_there: bool
    ) -> torch.Tensor:
        ctx.to, ctx.of, ctx.group, ctx.is_way_there = to, of, group, is_way_there
        return _exchanged(rows, to, of, group, opens=is_way_there)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchanged(gradient, ctx.of, ctx.to, ctx.group, opens=not ctx.is_way_there), None, None, None, None


def _exchanged(
    rows: torch.Tensor, to: Sequence[int], of: Sequence[int], group: dist.ProcessGroup, *, opens: bool
) -> torch.Tensor:
    """`opens`: the experts compute afterwards; else they have computed."""
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
    """Share the experts of `model` (a Llama on the meta device) among the ranks of `layout.ep`."""
    exchange = TokenExchange(layout.ep.get_group())
    for layer in model.layers:
        mixture = layer.feed_forward
        mixture.dispatch = exchange
        _split(mixture.experts, layout.ep)
        _shard(mixture.experts, layout, config, policy)


def share_tokens(model: Any, layout: Layout) -> None:
    """Tensor-parallel ranks have a part of each sequence for the mixtures of `model`, and all of what computes it.

    A gradient of that is a sum over them, as of norms. Of experts that ranks share (`layout.ep`) these ranks are as any
    others, and each has its own.
    """
    for layer in model.layers:
        mixture = layer.feed_forward
        _replicate(mixture.router, layout.tp)
        if layout.expert_mesh is None:
            _replicate(mixture.experts, layout.tp)


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """On the meta device, so that nothing is sent."""
    for name, weight in list(module.named_parameters()):
        whole = DTensor.from_local(weight.detach(), mesh, [Replicate()], run_check=False)
        module.register_parameter(name, nn.Parameter(whole))


def _split(experts: Experts, mesh: DeviceMesh) -> None:
    """Replace stacks by this rank's part; on the meta device, so that nothing is sent."""
    for name, weight in list(experts.named_parameters()):
        part = weight.new_empty((weight.shape[0] // mesh.size(), *weight.shape[1:]))
        experts.register_parameter(name, nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False)))


def _shard(experts: Experts, layout: Layout, config: JobConfig, policy: MixedPrecisionPolicy) -> None:
    """FSDP along the inner width, so that no dimension is split twice.

    A rank has the gradient of what its experts computed for all ranks of `ep`, each of which has a mean of its own, or
    with tensor parallelism a part of one: the mean over all means is the sum over the ranks that have the same experts,
    divided by the number of means.
    """
    mesh = layout.fsdp_of_experts
    fully_shard(experts, mesh=mesh, shard_placement_fn=lambda _: Shard(1), **fsdp_options(layout, config, policy))
    assert isinstance(experts, FSDPModule)
    experts.set_gradient_divide_factor(mesh.size() * layout.ep.size() / layout.sizes.tp)
    # gloo cannot divide while it sums; of one shard torch 2.13 would then divide twice.
    shards = mesh.size(mesh.ndim - 1)
    experts.set_force_sum_reduction_for_comms(layout.device.type == "cpu" and shards > 1)


Dispatch = Callable[[torch.Tensor, torch.Tensor, Experts], torch.Tensor]
"""Has rows, sorted by expert, computed by those who have the experts; given how many rows each expert has."""


def compute_here(rows: torch.Tensor, load: torch.Tensor, experts: Experts) -> torch.Tensor:
    """This rank has all experts."""
    computed: torch.Tensor = experts(rows, load.tolist())
    return computed


class MixtureOfExperts(nn.Module):
    """Each token is computed by a few experts; no token is dropped."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config.dim, config.experts)
        self.experts = Experts(config.dim, config.experts)
        self.dispatch: Dispatch = compute_here
        self.real: int | None = None
        """How many tokens of a sequence are no padding, the first ones; None: all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [batch, length, width]; padding becomes zero."""
        real = x[:, : self.real]
        out = self._tokens(real.flatten(0, 1)).view(real.shape)
        return functional.pad(out, (0, 0, 0, x.shape[1] - real.shape[1]))

    def _tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        choice = self.router(tokens)
        each = choice.experts.shape[1]
        order = choice.experts.flatten().argsort(stable=True)
        # Without names, so that copies of all rows in another order are freed at once.
        rows = permuted(tokens[:, None].expand(-1, each, -1).flatten(0, 1), order)
        parts = permuted(self.dispatch(rows, choice.load, self.experts), inverse(order)).unflatten(0, (-1, each))
        mixed: torch.Tensor = (parts.float() * choice.weights[..., None]).sum(dim=1)
        return mixed.to(tokens.dtype)
