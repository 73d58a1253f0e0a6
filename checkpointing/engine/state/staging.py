"""Copies a step's live tensors into the arena."""

import logging
import operator
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing.engine.collectives.group import FAILURES, Failed, start_background_thread
from checkpointing.engine.state.fingerprints import digest_replicas
from checkpointing.engine.state.layout import Item, Part, region
from checkpointing.engine.state.save_plan import AgreedPlan
from checkpointing.writer.arena import Arena

_log = logging.getLogger(__name__)
Fits = Callable[[], bool]

_LATER = 0.25
"""Upper bound in seconds on changing one tensor, even on a busy machine where the thread may lose its core.

The wait ends early when the caller settles.
"""


_version = operator.attrgetter("_version")


class PendingCopy:
    """A copy in progress. Check `failure` after `wait`, and again after `certify`."""

    def __init__(self, views: Sequence[Tensor], sources: Sequence[Tensor], versions: list[int] | None) -> None:
        self.failure: Failed | None = None
        self._views, self._sources, self._versions = views, list(sources), versions
        self._issued, self._settled, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._copied: Any = None  # on a GPU, the event recorded after the last copy

    def run(self, side: Any, ready: Any, fits: Fits) -> None:
        """Copy or, on a GPU, enqueue the copy on the stream `side` after the event `ready`.

        It fails if `fits` returns False.
        """
        try:
            # Cheaper than `no_grad` for many small tensors, because nothing about the copied tensors is recorded.
            with torch.inference_mode():
                if side is None:
                    self._copy()
                else:
                    self._enqueue(side, ready)
        except FAILURES as error:
            self.failure = Failed.from_error(error)
        if not fits():  # checked now, while the tensors are all in the cache
            self.failure = Failed("tensors have been given different memory since the last save", final=True)
        self._issued.set()

    def _enqueue(self, side: Any, ready: Any) -> None:
        with torch.cuda.stream(side):
            side.wait_event(ready)  # only after the optimizer's kernels have written the values
            self._copy(non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(side)
        self._copied = copied

    def _copy(self, *, non_blocking: bool = False) -> None:
        if self._views:  # a rank may have nothing to write; torch refuses empty lists
            torch._foreach_copy_(list(self._views), list(self._sources), non_blocking=non_blocking)

    def wait(self) -> None:
        """Return once the values are in the arena, or the copy has failed."""
        self._issued.wait()
        if self._copied is not None:
            self._copied.synchronize()

    def settle(self, gpu: torch.device | None) -> None:
        """Return once the caller may change the tensors. On a GPU, the caller's stream waits rather than its thread."""
        self._issued.wait()
        if self._copied is not None:
            torch.cuda.current_stream(gpu).wait_event(self._copied)
        self.certify()
        self._settled.set()

    def certify_later(self, seconds: float) -> None:
        """Certify the copy in the copying thread, unless the caller settles first and makes that unnecessary."""
        self.wait()
        self._settled.wait(seconds)
        self.certify()

    def certify(self) -> None:
        """Decide whether the copy is consistent. Only the first call counts.

        A tensor that changes while it is being copied yields a state that never existed. torch counts a change when it
        ends. The caller's own thread can therefore check when it settles, before it changes anything. Any other thread
        must wait after the copy until a change in progress has ended, and must treat every change as one that came too
        early.
        """
        with self._lock:
            if self._versions is not None and _versions(self._sources) != self._versions:
                self.failure = self.failure or Failed(
                    "torn: tensors were changed while they were copied; call before_optimizer_step() first", final=True
                )
            # From here on, the caller may change the tensors, so they need not be kept alive.
            self._versions = None
            if self._copied is None or self._copied.query():
                self._sources = []


def _versions(sources: Sequence[Tensor]) -> list[int] | None:
    """Return torch's change counts for the tensors, or None if they have none (inference tensors)."""
    try:
        return list(map(_version, sources))
    except RuntimeError:
        return None


class Copier:
    """Runs copies in the caller's thread or, if they are lazy, in a thread of its own."""

    def __init__(self, *, lazy: bool, gpu: torch.device | None) -> None:
        """Create a copier. `gpu` is the tensors' device, or None if they are in host memory."""
        self._lazy, self._gpu = lazy, gpu
        self._last: PendingCopy | None = None
        self._side = torch.cuda.Stream(gpu) if gpu is not None else None
        self._pinned: list[Tensor] = []
        self._orders: queue.SimpleQueue[tuple[PendingCopy, Any, Fits] | None] = queue.SimpleQueue()
        self._thread = start_background_thread(self._serve, "checkpoint-copy") if lazy else None

    def pin(self, memory: Sequence[Tensor]) -> None:
        """Pin the buffers once, for the GPU's copy engines. Without pinning, copies are slow."""
        if self._gpu is None:
            return
        for buffer in memory:
            result = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
            if int(result) != 0:
                _log.warning("%d bytes for checkpoints could not be pinned (CUDA error %d)", buffer.nbytes, int(result))
                _clear_last_error(self._gpu)
                return
            self._pinned.append(buffer)

    def copy(self, views: Sequence[Tensor], sources: Sequence[Tensor], fits: Fits) -> PendingCopy:
        """Start a copy and, unless it is lazy, finish it. Failures are stored in the copy.

        `fits` is called in the thread that copies.
        """
        self.settle()
        copy = PendingCopy(views, sources, _versions(sources) if self._lazy else None)
        ready = torch.cuda.current_stream(self._gpu).record_event() if self._side is not None else None
        if self._lazy:
            self._last = copy
            self._orders.put((copy, ready, fits))
            return copy
        copy.run(self._side, ready, fits)
        copy.wait()
        return copy

    def settle(self) -> None:
        """Return once the caller may change the tensors that the last lazy copy reads."""
        if self._last is not None:
            self._last.settle(self._gpu)
            self._last = None

    def _serve(self) -> None:
        if self._gpu is not None:
            # A new thread uses GPU 0; leaving the side stream would switch back to it and create a context there.
            torch.cuda.set_device(self._gpu)
        while (order := self._orders.get()) is not None:
            copy, ready, fits = order
            start = time.monotonic()
            copy.run(self._side, ready, fits)
            copy.certify_later(_LATER + time.monotonic() - start)

    def close(self) -> None:
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join()
        for buffer in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
        self._pinned = []


def _clear_last_error(gpu: torch.device) -> None:
    """Clear the error that the CUDA runtime keeps after a failed call, because the next kernel launch would raise it.

    torch does not expose cudaGetLastError, but its own check after a launch reads and clears the error.
    """
    try:
        torch.ones(1, device=gpu)
    except RuntimeError as error:
        _log.debug("cleared: %s", error)


_dtype, _nbytes = operator.attrgetter("dtype"), operator.attrgetter("nbytes")


class Structure:
    """The identity of a state: keys, dtypes, shapes and placements. Matching the same tensors again is cheap."""

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
        """Return this rank's part of every tensor in key order, or None if the structure differs.

        This leaves out the check in `fits`, which takes a tenth of the copying time for small tensors.
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
        """Return whether every tensor still has the same dtype and size, which `tensor.data = ...` can change."""
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
        """Release the caller's tensors."""
        self._known = [torch.empty(0, device="cpu")] * len(self._keys)


def _form(tensor: Tensor) -> tuple[object, ...]:
    if isinstance(tensor, DTensor):
        spec = (tensor.device_mesh, tuple(tensor.placements), tuple(tensor._local_tensor.shape))
        return (tensor.dtype, tuple(tensor.shape), tensor.layout, tensor.device, spec)
    return (tensor.dtype, tuple(tensor.shape), tensor.layout, tensor.device, None)


@dataclass(frozen=True)
class Bucket:
    """A part of a rank's state in a buffer. `copy` is the copy that fills it."""

    part: Part
    buffer: int
    memory: Tensor
    copy: PendingCopy


class Staged:
    """A step's state on its way through the buffers. One thread fills them part by part, and another empties them."""

    def __init__(
        self, free: "queue.SimpleQueue[int]", parts: int, *, kept: bool, replicas: Tensor | None = None
    ) -> None:
        """Create an empty state. Emptied buffers return to `free`.

        `kept` means that all data stays in memory on every rank after the write, for retries. `replicas` are digests of
        the values that other ranks also hold, in the order of the plan.
        """
        self._free, self._parts, self.kept, self._replicas = free, parts, kept, replicas
        self._filled: list[Bucket] = []
        self._emptied: list[Bucket] = []
        self._changed = threading.Condition()

    def add(self, bucket: Bucket) -> None:
        with self._changed:
            self._filled.append(bucket)
            self._changed.notify_all()

    def buckets(self) -> Iterator[Bucket]:
        """Yield the parts as they arrive; a part's copy may still be in progress."""
        for number in range(self._parts):
            with self._changed:
                while len(self._filled) <= number:
                    self._changed.wait()
            yield self._filled[number]

    def replicas(self) -> bytes:
        """Return eight bytes for each value that other ranks also hold. Waits for the device that computes them."""
        return b"" if self._replicas is None else bytes(self._replicas.cpu().view(torch.uint8).flatten().tolist())

    def empty(self, bucket: Bucket) -> None:
        """Give back the buffer of a part that has been written."""
        if bucket not in self._emptied:
            self._emptied.append(bucket)
            self._free.put(bucket.buffer)

    def drain(self) -> None:
        """Release all buffers, after waiting until the last part has been handed over and copied."""
        for bucket in self.buckets():
            bucket.copy.wait()
            self.empty(bucket)


class Stager:
    """Views of an arena's buffers for one plan, into which states are copied."""

    def __init__(self, arena: Arena, plan: AgreedPlan, structure: Structure, mode: str) -> None:
        """Write the templates into the arena. `mode` is `block` or `lazy`. WARNING: no order may be in flight."""
        self.plan, self._arena, self._structure = plan, arena, structure
        self._memory = [torch.frombuffer(arena.buffer(at), dtype=torch.uint8) for at in range(arena.buffers)]
        self._copier = Copier(lazy=mode == "lazy" and plan.whole, gpu=structure.gpu)
        self._copier.pin(self._memory)
        self.free: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Free buffers, in the order in which they will be overwritten.

        A save takes a buffer and returns it when it is done.
        """
        for at in _oldest_first(arena):
            self.free.put(at)
        self._sources = [structure.places[item.key] for item in plan.layout.items]
        self._shared = [structure.places[key] for key in plan.shared]
        self._views: list[list[Tensor]] = []
        if plan.whole:
            self._views = [[_view(memory, item) for item in plan.layout.items] for memory in self._memory]
            for at in range(arena.buffers):
                self.write_templates(at)

    @property
    def has_room(self) -> bool:
        """Whether a save can start without waiting for another one."""
        return self.free.qsize() > 0 if self.plan.whole else self.is_idle

    @property
    def is_idle(self) -> bool:
        return self.free.qsize() == self._arena.buffers

    def match(self, tensors: Mapping[str, Tensor]) -> list[Tensor] | None:
        """Return this rank's parts of the tensors, or None if they do not match the plan's structure."""
        return self._structure.match(tensors)

    def stage(self, parts: Sequence[Tensor], *, compare: bool = True) -> Staged:
        """Copy the state, or start copying it. Check for a failure after waiting for the copy.

        With buckets, this only prepares the state; `stage_buckets` copies it. With `compare`, the values that other
        ranks also hold are digested.
        """
        shared = [parts[at] for at in self._shared] if compare else []
        replicas = digest_replicas(shared) if shared else None
        staged = Staged(self.free, len(self.plan.layout.parts), kept=self.plan.whole, replicas=replicas)
        if self.plan.whole:
            buffer = self._clear()
            sources = [parts[at] for at in self._sources]
            copy = self._copier.copy(self._views[buffer], sources, lambda: self._structure.fits(parts))
            staged.add(Bucket(self.plan.layout.parts[0], buffer, self._memory[buffer], copy))
        return staged

    def stage_buckets(self, staged: Staged, parts: Sequence[Tensor]) -> None:
        """Copy all parts of a plan with buckets, one after another. Another thread must empty the buckets."""
        if self.plan.whole:
            return
        of = {item: parts[at] for item, at in zip(self.plan.layout.items, self._sources, strict=True)}
        for part in self.plan.layout.parts:
            buffer = self._clear()
            memory = self._memory[buffer]
            memory.zero_()  # a file's padding must not contain another tensor's data
            _write_templates(self._arena.buffer(buffer), part.items)
            views = [_view(memory, item) for item in part.items]
            sources = [region(of[item], item.share.within, item.shape) for item in part.items]
            copy = self._copier.copy(views, sources, lambda: self._structure.fits(parts))
            staged.add(Bucket(part, buffer, memory, copy))

    def _clear(self) -> int:
        buffer = self.free.get()
        self._arena.clear(buffer)
        return buffer

    def sample(self) -> tuple[Tensor, list[Item]]:
        """Return a buffer as bytes and one item of every kind in it, which is enough for a trial run."""
        kinds = {(item.dtype, item.share.shape, item.share.offsets): item for item in self.plan.layout.parts[0].items}
        return self._memory[0], list(kinds.values())

    def write_templates(self, buffer: int) -> None:
        """Write the record templates into a buffer that held other data."""
        _write_templates(self._arena.buffer(buffer), self.plan.layout.items)

    def before_optimizer_step(self) -> None:
        """Return once no copy is reading the caller's tensors."""
        self._copier.settle()

    def forget(self) -> None:
        """Release the most recently seen tensors, so that their owner can free them."""
        self._structure.forget()

    def close(self) -> None:
        self._copier.close()
        self._structure.forget()


def _oldest_first(arena: Arena) -> list[int]:
    """Order buffers by the steps of their records, empty ones first, because newer ones may still be worth loading."""
    steps = [record.step if (record := arena.record(at)) else -1 for at in range(arena.buffers)]
    return sorted(range(arena.buffers), key=lambda at: steps[at])


def _view(memory: Tensor, item: Item) -> Tensor:
    return memory[item.place : item.place + item.piece.nbytes].view(item.dtype).view(item.shape)


def _write_templates(memory: memoryview, items: Sequence[Item]) -> None:
    """Write all bytes of the records that are not values."""
    for item in items:
        around = item.share.template
        end = item.place + around.nbytes
        memory[item.place - len(around.head) : item.place] = around.head
        memory[end : end + len(around.tail)] = around.tail
