"""Tokens travel to the ranks that have their experts, and back: an uneven all-to-all in each direction."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainer.worker.context_parallel.peer_waits import waiting
from trainer.worker.experts.expert_weights import Experts
from trainer.worker.experts.permutation import inverse, permuted
from trainer.worker.reporting.phase_tracker import current_tracker


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
