"""Averaging the gradients of replicas: parameters stay plain tensors, their gradients travel in buckets (DDP).

As torch's DistributedDataParallel does it (Li et al. 2020, section 3), but that buckets are never rebuilt: sums are
taken in the same order in every step, so that a restart is bit-equal.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.contract.bucket_packing import packed


class SecondGradient(RuntimeError):
    """A parameter got a second gradient in one backward pass, when the first one was on its way."""


class GradientBuckets:
    """Averages the gradients of a model's parameters over a process group by the end of each backward pass.

    A bucket leaves as soon as all its gradients are there and those before it have left, while the backward pass goes
    on. All ranks send the same buckets in the same order, whichever parameters they have used.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters = list(parameters)
        self.on_wait: Callable[[], None] = lambda: None
        """Called before a wait for gradients of other ranks."""
        self._group = group
        self._buckets = list(_buckets(self.parameters))
        self._left: int | None = None  # how many buckets of this backward pass have; None: they are kept
        self._works: list[dist.Work] = []
        for bucket in self._buckets:
            for parameter in bucket.members:
                self._watch(parameter, bucket)

    def begin(self) -> None:
        """The next backward pass averages; without this it adds up gradients of this rank."""
        self._left = 0
        for bucket in self._buckets:
            bucket.has_left = False
            bucket.missing = {id(parameter) for parameter in bucket.members if parameter.requires_grad}

    def finish(self) -> None:
        """The backward pass is over: send what parameters without a gradient have held back, and wait for all."""
        while self._left is not None and self._left < len(self._buckets):
            self._send_next()
        self._left = None
        self.on_wait()
        for work in self._works:
            work.wait()
        self._works.clear()

    def _watch(self, parameter: nn.Parameter, bucket: "_Bucket") -> None:
        """Hear of each gradient; frozen parameters may be thawed later, and take no hook before."""
        wanted = parameter.requires_grad
        parameter.requires_grad_(True)
        parameter.register_post_accumulate_grad_hook(lambda one: self._arrived(one, bucket))
        parameter.requires_grad_(wanted)

    def _arrived(self, parameter: torch.Tensor, bucket: "_Bucket") -> None:
        if self._left is None:
            return
        if bucket.has_left:
            raise SecondGradient(
                f"a parameter {list(parameter.shape)} got two gradients in one backward pass: recompute activations "
                "with use_reentrant=False, or type parallel.strategy=zero2"
            )
        bucket.missing.discard(id(parameter))
        while self._left < len(self._buckets) and not self._buckets[self._left].missing:
            self._send_next()

    def _send_next(self) -> None:
        assert self._left is not None
        bucket = self._buckets[self._left]
        flat = bucket.packed()
        bucket.has_left = True
        self._left += 1
        if flat is not None:
            work = dist.all_reduce(flat.div_(self._group.size()), group=self._group, async_op=True)
            assert work is not None
            self._works.append(work)


class _Bucket:
    """Some parameters of one type on one device."""

    def __init__(self, members: Sequence[nn.Parameter]) -> None:
        self.members = members
        self.missing: set[int] = set()
        """Ids of parameters whose gradients are awaited."""
        self.has_left = False
        self._places = [_place(parameter) for parameter in members]

    def packed(self) -> torch.Tensor | None:
        """All gradients in one tensor, which the parameters' `grad` are parts of from now on; None when all are frozen.

        What this rank has not used counts as zero and still has no `grad` afterwards.
        """
        pairs = [pair for pair in zip(self.members, self._places, strict=True) if pair[0].requires_grad]
        if not pairs:
            return None
        flat = _local(pairs[0][0]).new_empty(sum(place.elements for _, place in pairs))
        offset, used, parts = 0, [], []
        for parameter, place in pairs:
            part = flat.as_strided(place.shape, place.stride, offset)
            offset += place.elements
            if parameter.grad is None:
                part.zero_()
            else:
                used.append(parameter)
                parts.append(part)
        torch._foreach_copy_(parts, [_gradient(parameter) for parameter in used])
        for parameter, part in zip(used, parts, strict=True):
            parameter.grad = _like(part, parameter)
        return flat


class _Place(NamedTuple):
    """How a gradient lies in a bucket: as its parameter, or without gaps where that has some."""

    shape: torch.Size
    stride: tuple[int, ...]
    elements: int


def _place(parameter: nn.Parameter) -> _Place:
    own = _local(parameter)
    like = own if torch.ops.aten.is_non_overlapping_and_dense(own) else torch.empty(own.shape, device="meta")
    return _Place(own.shape, like.stride(), own.numel())


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[_Bucket]:
    """From the last parameter to the first one: about the order in which gradients come."""
    ordered = list(reversed(parameters))
    for positions in packed(((one.dtype, one.device), _local(one).nbytes) for one in ordered):
        yield _Bucket([ordered[position] for position in positions])


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part; with tensor parallelism a gradient may still be a sum over its ranks to be taken."""
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    return gradient.redistribute(placements=parameter.placements).to_local()


def _like(part: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_OF_MODELS: WeakKeyDictionary[nn.Module, GradientBuckets] = WeakKeyDictionary()


def bucket_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Have the gradients of `model`, whose parameters exist by now, averaged over `group` from now on."""
    _OF_MODELS[model] = GradientBuckets(model.parameters(), group)


def buckets_of(model: nn.Module) -> GradientBuckets | None:
    """Those of `model`, or of a module within it."""
    return next((_OF_MODELS[module] for module in model.modules() if module in _OF_MODELS), None)
