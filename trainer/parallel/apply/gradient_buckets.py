"""DDP: gradient buckets, and the sums and comparisons of a step.

Like torch's DistributedDataParallel (Li et al. 2020, section 3), but buckets are never rebuilt: sums are taken in the
same order in every step, so a restart is bit-equal.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.costs.peak_bytes import pack_buckets
from trainer.parallel.apply.frozen_base import saved_parameters


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, sharing its memory, or any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_own_part(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Wrap `part`, a local part, as a tensor with the same placement as `whole`."""
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


@dataclass(frozen=True, kw_only=True)
class GradientFacts:
    """Facts that ranks compare about their gradients, and the number of pipeline stages."""

    used: int = 0  # `usage_mark` of this rank
    alike: bool = False  # all ranks have the same gradients
    compared: Sequence[torch.Tensor] = ()  # gradients that must be equal on all ranks; every gradient if `alike`
    stages: int = 1  # ranks with different parameters of one model


def usage_mark(parameters: Iterable[torch.Tensor]) -> int:
    """Return a checksum of the parameters without gradients, at most 2**16, or 0 if all have gradients.

    Without this check, ranks that use different parameters of equal shapes would average the wrong gradients.
    """
    missing = [
        (number, parameter.requires_grad) for number, parameter in enumerate(parameters) if parameter.grad is None
    ]
    return zlib.crc32(repr(missing).encode()) % (1 << 16) + 1 if missing else 0


_MOST_GATHERED = 1 << 16
"""Maximum total length of all rows; above it, reducing is cheaper than gathering."""


class OtherCollective(RuntimeError):
    """The data from a peer is not a row of this step, because the peer is in another collective."""


class StepSums:
    """A sum, in flight, of a row of numbers over all ranks.

    gloo reduces a short row in four consecutive small messages per rank. Gathering the rows and adding them here takes
    one message, and a quarter of the time on two ranks. A row ends with a mark of its step, because gloo accepts a
    message that is shorter than a row.
    """

    def __init__(self, own: torch.Tensor, step: int) -> None:
        """Start the exchange of `own`: float64 [numbers], of the same length on every rank."""
        world = dist.get_world_size()
        self._step = step
        self._rows: list[torch.Tensor] | None = None
        self._own, self._work = own, None
        if own.device.type == "cpu" and world * len(own) <= _MOST_GATHERED:
            marked = torch.cat([own, own.new_tensor([_mark(step)])])
            self._rows = list(own.new_zeros(world, len(marked)))
            self._work = dist.all_gather(self._rows, marked, async_op=True)
        else:
            self._work = dist.all_reduce(own, async_op=True)

    def wait(self) -> torch.Tensor:
        """Return the sums [numbers]; on a GPU the device's stream waits. Raises OtherCollective."""
        if self._work is not None:
            self._work.wait()
        if self._rows is None:
            return self._own
        strange = [rank for rank, row in enumerate(self._rows) if row[-1].item() != _mark(self._step)]
        if strange:
            raise OtherCollective(
                f"step {self._step}: the data from rank {', '.join(map(str, strange))} does not belong to this "
                "step: Is there a distributed collective mismatch in your code?"
            )
        # Add in the same order everywhere: torch's sum over rows depends on the host's vector width.
        sums = self._rows[0][:-1].clone()
        for row in self._rows[1:]:
            sums += row[:-1]
        return sums


def _mark(step: int) -> float:
    """Return a mark unlikely to equal a count or a loss; exact for every step below 2**50."""
    return -(step + 0.375)


class CannotAverage(RuntimeError):
    """Gradients of these parameters cannot be averaged; the text gives the reason and the remedy."""


class GradientBuckets:
    """Averages a model's gradients over a process group during each backward pass.

    All ranks send the same buckets in the same order, regardless of which parameters they used.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup, on_wait: Callable[[], None], *,
        uses_hooks: bool = True,
    ) -> None:  # fmt: skip
        """`on_wait` is called before a wait for gradients of other ranks. Raises CannotAverage.

        `uses_hooks`: send buckets during the backward pass. Without hooks, as in a pipeline, `finish` sends all
        buckets.
        """
        own = {name: one for name, one in parameters.items() if one.is_floating_point() or one.is_complex()}
        self._names = {id(parameter): name for name, parameter in own.items()}
        self.parameters = list(own.values())
        self._group, self._on_wait = group, on_wait
        self._buckets = list(_buckets(self.parameters))
        self._left: int | None = None  # buckets sent in this backward pass; None: gradients are only accumulated
        self._works: list[dist.Work] = []
        self._is_over = False
        self._uses_hooks = uses_hooks
        for bucket in self._buckets if uses_hooks else ():
            for parameter in bucket.members:
                self._watch(parameter, bucket)

    def begin_step(self) -> None:
        """Accept gradients from now on."""
        self._is_over = False

    def begin(self) -> None:
        """Average gradients during the next backward pass; other passes only accumulate this rank's gradients."""
        self._left = 0
        for bucket in self._buckets:
            bucket.has_left = False
            bucket.missing = {id(parameter) for parameter in bucket.members if parameter.requires_grad}
            for parameter in bucket.members if self._uses_hooks else ():
                if len(parameter._post_accumulate_grad_hooks) != 1:
                    raise self._hook_error(parameter)

    def finish(self) -> None:
        """Send the remaining buckets, which lack gradients, after the backward pass, and wait for all buckets."""
        while self._left is not None and self._left < len(self._buckets):
            self._send_next()
        self._left = None
        self._on_wait()
        for work in self._works:
            work.wait()
        self._works.clear()

    def end_step(self) -> None:
        """Refuse gradients until the next step, because they would not be averaged."""
        self._is_over = True

    def _watch(self, parameter: nn.Parameter, bucket: "_Bucket") -> None:
        """Register a gradient hook; a frozen parameter accepts hooks only while it requires gradients."""
        if parameter._post_accumulate_grad_hooks:
            raise self._hook_error(parameter)
        wanted = parameter.requires_grad
        parameter.requires_grad_(True)
        parameter.register_post_accumulate_grad_hook(lambda one: self._on_gradient_ready(one, bucket))
        parameter.requires_grad_(wanted)

    def _hook_error(self, parameter: torch.Tensor) -> CannotAverage:
        return CannotAverage(
            f"{self._names[id(parameter)]} has a hook set by the workload (register_post_accumulate_grad_hook), "
            "which would see gradients before they are averaged: use optimizer.register_step_pre_hook in "
            "build_optimizer()"
        )

    def _on_gradient_ready(self, parameter: torch.Tensor, bucket: "_Bucket") -> None:
        if self._is_over:
            raise CannotAverage(
                f"{self._names[id(parameter)]} got a gradient outside the backward pass, as from an optimizer that "
                "computes gradients itself: each rank would have its own gradient: type parallel.strategy=zero2"
            )
        if self._left is None:
            return
        if bucket.has_left:
            raise CannotAverage(
                f"{self._names[id(parameter)]} got two gradients in one backward pass: recompute activations with "
                "use_reentrant=False"
            )
        bucket.missing.discard(id(parameter))
        while self._left < len(self._buckets) and not self._buckets[self._left].missing:
            self._send_next()

    def _send_next(self) -> None:
        assert self._left is not None
        bucket = self._buckets[self._left]
        bucket.has_left = True
        self._left += 1
        if self._group.size() == 1:
            bucket.complete()
        elif (flat := bucket.pack_gradients()) is not None:
            work = dist.all_reduce(flat.div_(self._group.size()), group=self._group, async_op=True)
            assert work is not None
            self._works.append(work)


class _Bucket:
    """Parameters of the same type on the same device."""

    def __init__(self, members: Sequence[nn.Parameter]) -> None:
        self.members = members
        self.missing: set[int] = set()
        """Ids of parameters with pending gradients."""
        self.has_left = False
        self._places = [_place(parameter) for parameter in members]

    def complete(self) -> None:
        """Reduce gradients that are still partial sums over tensor-parallel ranks, if there is only one replica."""
        for parameter in self.members:
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

    def pack_gradients(self) -> torch.Tensor | None:
        """Pack all gradients into one tensor, and make each `grad` a view of it; None if all are frozen."""
        every = zip(self.members, self._places, strict=True)
        # A parameter that is frozen now may have a gradient from an earlier micro-batch.
        pairs = [pair for pair in every if pair[0].requires_grad or pair[0].grad is not None]
        if not pairs:
            return None
        flat = own_part(pairs[0][0]).new_empty(sum(place.elements for _, place in pairs))
        offset, used, parts = 0, [], []
        for parameter, place in pairs:
            part = flat.as_strided(place.shape, place.stride, offset)
            offset += place.elements
            if parameter.grad is None:
                part.zero_()
            else:
                used.append(parameter)
                parts.append(part)
        if used:
            torch._foreach_copy_(parts, [_gradient(parameter) for parameter in used])
        for parameter, part in zip(used, parts, strict=True):
            parameter.grad = like_own_part(part, parameter)
        return flat


class _Place(NamedTuple):
    """A gradient's layout in a bucket: its parameter's layout, or contiguous if the parameter has gaps."""

    shape: torch.Size
    stride: tuple[int, ...]
    elements: int


def _place(parameter: nn.Parameter) -> _Place:
    own = own_part(parameter)
    like = own if torch.ops.aten.is_non_overlapping_and_dense(own) else torch.empty(own.shape, device="meta")
    return _Place(own.shape, like.stride(), own.numel())


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[_Bucket]:
    """Yield buckets from the last parameter to the first, which is roughly the order in which gradients arrive."""
    ordered = list(reversed(parameters))
    for positions in pack_buckets(((one.dtype, one.device), own_part(one).nbytes) for one in ordered):
        yield _Bucket([ordered[position] for position in positions])


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's part of the gradient. Reduces it if it is still a partial sum over tensor-parallel ranks."""
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    return gradient.redistribute(placements=parameter.placements).to_local()


_MARK = "_is_plain_replica"


def mark_replica(model: nn.Module) -> None:
    """Mark the module so that its gradients are averaged once training begins; copies of it are marked too."""
    vars(model)[_MARK] = True


def replicated_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of all marked modules within `model`, keyed by their names in it; no frozen base."""
    members = {
        id(parameter) for module in model.modules() if vars(module).get(_MARK) for parameter in module.parameters()
    }
    return {name: parameter for name, parameter in saved_parameters(model) if id(parameter) in members}
