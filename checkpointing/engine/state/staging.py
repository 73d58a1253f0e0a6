"""Copying a step's state into the arena: every tensor has its place there, found once and used at every save."""

import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing.engine.state.fingerprints import digest_replicas
from checkpointing.engine.state.layout import Item, Part
from checkpointing.engine.state.save_plan import Plan
from checkpointing.engine.state.tensor_copy import Copier, Copy
from checkpointing.writer.arena import Arena

_dtype, _nbytes = operator.attrgetter("dtype"), operator.attrgetter("nbytes")


class Structure:
    """Recognizes a state: the same keys, dtypes, shapes and placements; cheap when the same tensors come again."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._keys, self._known = list(tensors), list(tensors.values())
        self.places = {key: at for at, key in enumerate(self._keys)}
        self._forms = [_form(tensor) for tensor in self._known]
        self._sharded = [isinstance(tensor, DTensor) for tensor in self._known]
        locals_ = self._locals(self._known)
        self.gpu = next((tensor.device for tensor in locals_ if tensor.is_cuda), None)
        self._dtypes, self._nbytes = list(map(_dtype, locals_)), list(map(_nbytes, locals_))
        self._outgrown = False

    def match(self, tensors: Mapping[str, Tensor]) -> list[Tensor] | None:
        """This rank's part of every tensor, in the order of the keys; None when the structure is another one.

        What `fits` finds is not looked for: that takes as long as a tenth of the copy when tensors are small.
        """
        if self._outgrown or list(tensors) != self._keys:
            return None
        given = list(tensors.values())
        if not all(map(operator.is_, given, self._known)):
            for at, (tensor, known) in enumerate(zip(given, self._known, strict=True)):
                if tensor is not known and (not isinstance(tensor, Tensor) or _form(tensor) != self._forms[at]):
                    return None
            self._known = given
        return self._locals(given)

    def fits(self, parts: Sequence[Tensor]) -> bool:
        """Whether no tensor object was given other memory of another type or size since (`tensor.data = ...`)."""
        same = list(map(_dtype, parts)) == self._dtypes and list(map(_nbytes, parts)) == self._nbytes
        self._outgrown = self._outgrown or not same
        return same

    def _locals(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if not any(self._sharded):
            return list(tensors)
        # Not `to_local`, which makes a new tensor and costs as much as copying a small one.
        pairs = zip(tensors, self._sharded, strict=True)
        return [cast(DTensor, tensor)._local_tensor if sharded else tensor for tensor, sharded in pairs]

    def forget(self) -> None:
        """Let go of the caller's tensors."""
        self._known = [torch.empty(0)] * len(self._keys)


def _form(tensor: Tensor) -> tuple[object, ...]:
    if isinstance(tensor, DTensor):
        spec = (tensor.device_mesh, tuple(tensor.placements), tuple(tensor._local_tensor.shape))
        return (tensor.dtype, tuple(tensor.shape), tensor.layout, tensor.device, spec)
    return (tensor.dtype, tuple(tensor.shape), tensor.layout, tensor.device, None)


class Buffers:
    """Which buffers of the arena nobody reads; a buffer is taken by a save and given back when the save has ended."""

    def __init__(self, order: Sequence[int]) -> None:
        """`order`: all buffers, the one that may be overwritten first at the head."""
        self._all, self._free, self._changed = len(order), list(order), threading.Condition()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def idle(self) -> bool:
        return len(self._free) == self._all

    def take(self) -> int:
        """The free buffer that was used longest ago; waits until there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            return self._free.pop(0)

    def give_back(self, buffer: int) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()


@dataclass(frozen=True)
class Bucket:
    """One part of a rank's state in a buffer; `copy` says when it is all there."""

    part: Part
    buffer: int
    memory: Tensor
    copy: Copy


class Staged:
    """One step's state on its way through the buffers, part by part: filled by one thread, emptied by another."""

    def __init__(self, buffers: Buffers, parts: int, *, kept: bool, replicas: Tensor | None = None) -> None:
        """`kept`: whether all of it is still there after it was written, on every rank, to be written again.

        `replicas`: digests of the values that other ranks have too, in the order of the plan.
        """
        self._buffers, self._parts, self.kept, self._replicas = buffers, parts, kept, replicas
        self._filled: list[Bucket] = []
        self._emptied: list[Bucket] = []
        self._changed = threading.Condition()

    def add(self, bucket: Bucket) -> None:
        with self._changed:
            self._filled.append(bucket)
            self._changed.notify_all()

    def buckets(self) -> Iterator[Bucket]:
        """The parts as they come; a part's copy may still be under way."""
        for number in range(self._parts):
            with self._changed:
                while len(self._filled) <= number:
                    self._changed.wait()
            yield self._filled[number]

    def replicas(self) -> bytes:
        """Eight bytes for each value that other ranks have too; waits for the device that computes them."""
        return b"" if self._replicas is None else bytes(self._replicas.cpu().view(torch.uint8).flatten().tolist())

    def empty(self, bucket: Bucket) -> None:
        """Nobody needs this part any more."""
        if bucket not in self._emptied:
            self._emptied.append(bucket)
            self._buffers.give_back(bucket.buffer)

    def drain(self) -> None:
        """Nobody needs any of it any more; waits until the last part has been handed over and copied."""
        for bucket in self.buckets():
            bucket.copy.wait()
            self.empty(bucket)


class Stager:
    """The views of an arena's buffers that belong to one plan, and the way of a state into them."""

    def __init__(self, arena: Arena, plan: Plan, structure: Structure, mode: str) -> None:
        """Writes the templates into the arena; `mode` is `block` or `lazy`. WARNING: no order may be in flight."""
        self.plan, self._arena, self._structure = plan, arena, structure
        self._memory = [torch.frombuffer(arena.buffer(at), dtype=torch.uint8) for at in range(arena.buffers)]
        self._copier = Copier(lazy=mode == "lazy" and plan.whole, gpu=structure.gpu)
        self._copier.pin(self._memory)
        self.buffers = Buffers(_oldest_first(arena))
        self._sources = [structure.places[item.key] for item in plan.items]
        self._shared = [structure.places[key] for key in plan.shared]
        self._views: list[list[Tensor]] = []
        if plan.whole:
            self._views = [[_view(memory, item) for item in plan.items] for memory in self._memory]
            for at in range(arena.buffers):
                self.write_templates(at)

    @property
    def has_room(self) -> bool:
        """Whether a save can begin without waiting for another one."""
        return self.buffers.free > 0 if self.plan.whole else self.buffers.idle

    def match(self, tensors: Mapping[str, Tensor]) -> list[Tensor] | None:
        """This rank's parts of the tensors, None when they are not of the plan's structure."""
        return self._structure.match(tensors)

    def stage(self, parts: Sequence[Tensor], *, compare: bool = True) -> Staged:
        """Copy the state, or begin to; a failure shows when the copy is waited for.

        With buckets, returns when the last one is copied: the receiver must be emptying them meanwhile. `compare`:
        with digests of what other ranks have too.
        """
        shared = [parts[at] for at in self._shared] if compare else []
        replicas = digest_replicas(shared) if shared else None
        staged = Staged(self.buffers, len(self.plan.parts), kept=self.plan.whole, replicas=replicas)
        if self.plan.whole:
            buffer = self._clear()
            sources = [parts[at] for at in self._sources]
            copy = self._copier.copy(self._views[buffer], sources, lambda: self._structure.fits(parts))
            staged.add(Bucket(self.plan.parts[0], buffer, self._memory[buffer], copy))
        return staged

    def stage_buckets(self, staged: Staged, parts: Sequence[Tensor]) -> None:
        """The rest of `stage` for a plan with buckets, after somebody began to empty them."""
        if self.plan.whole:
            return
        of = {item: parts[at] for item, at in zip(self.plan.items, self._sources, strict=True)}
        for part in self.plan.parts:
            buffer = self._clear()
            memory = self._memory[buffer]
            memory.zero_()  # what pads a file is no part of any tensor, of another one least of all
            _write_templates(self._arena.buffer(buffer), part.items)
            views = [_view(memory, item) for item in part.items]
            sources = [_region(of[item], item) for item in part.items]
            copy = self._copier.copy(views, sources, lambda: self._structure.fits(parts))
            staged.add(Bucket(part, buffer, memory, copy))

    def _clear(self) -> int:
        buffer = self.buffers.take()
        self._arena.clear(buffer)
        return buffer

    def sample(self) -> tuple[Tensor, list[Item]]:
        """A buffer as bytes, and one item of every kind in it: enough to try out whatever works on items."""
        kinds = {(item.dtype, item.share.shape, item.share.offsets): item for item in self.plan.parts[0].items}
        return self._memory[0], list(kinds.values())

    def write_templates(self, buffer: int) -> None:
        """Write the record templates into a buffer that was used for something else."""
        _write_templates(self._arena.buffer(buffer), self.plan.items)

    def before_optimizer_step(self) -> None:
        """Return when no copy reads the caller's tensors any more."""
        self._copier.settle()

    def forget(self) -> None:
        """Let go of the tensors that were seen last: their owner may drop them."""
        self._structure.forget()

    def close(self) -> None:
        self._copier.close()
        self._structure.forget()


def _oldest_first(arena: Arena) -> list[int]:
    """Buffers whose records nobody would miss come first: what an earlier generation left may be worth loading."""
    steps = [record.step if (record := arena.record(at)) else -1 for at in range(arena.buffers)]
    return sorted(range(arena.buffers), key=lambda at: steps[at])


def _view(memory: Tensor, item: Item) -> Tensor:
    return memory[item.place : item.place + item.piece.nbytes].view(item.dtype).view(item.shape)


def _region(tensor: Tensor, item: Item) -> Tensor:
    """The values of an item in the rank's part of its tensor."""
    if tuple(tensor.shape) == item.shape:
        return tensor
    region = tensor.detach()
    for axis, (start, length) in enumerate(zip(item.share.within, item.shape, strict=True)):
        region = region.narrow(axis, start, length)
    return region


def _write_templates(memory: memoryview, items: Sequence[Item]) -> None:
    """Everything of the files that is not a value."""
    for item in items:
        around = item.share.template
        end = item.place + around.nbytes
        memory[item.place - len(around.head) : item.place] = around.head
        memory[end : end + len(around.tail)] = around.tail
