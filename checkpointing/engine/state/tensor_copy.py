"""Copies of live tensors into the arena: at once, or beside the next forward and backward pass."""

import logging
import operator
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from checkpointing.engine.ranks.background_thread import start_background_thread
from checkpointing.engine.ranks.failure import FAILURES, Failed

_log = logging.getLogger(__name__)
Fits = Callable[[], bool]

_LATER = 0.25
"""Seconds; a change of one tensor takes no longer than this and a copy of all of them together, on a busy machine too:
its thread may lose its core in the middle. A caller that settles ends this wait.
"""


_version = operator.attrgetter("_version")


class Copy:
    """One copy under way. `failure` is settled when `wait` has returned."""

    def __init__(self, views: Sequence[Tensor], sources: Sequence[Tensor], versions: list[int] | None) -> None:
        self.failure: Failed | None = None
        self._views, self._sources, self._versions = views, list(sources), versions
        self._issued, self._settled, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._copied: Any = None  # on a GPU, the event behind the last copy

    def run(self, side: Any, ready: Any, fits: Fits) -> None:
        """Do it, or on a GPU enqueue it on the stream `side`, behind the event `ready`; what does not fit fails."""
        try:
            # Cheaper than `no_grad` for many small tensors: nothing is noted about what is copied.
            with torch.inference_mode():
                if side is None:
                    self._copy()
                else:
                    self._enqueue(side, ready)
        except FAILURES as error:
            self.failure = Failed.of(error)
        if not fits():  # asked now, when all of them are in the cache
            self.failure = Failed("tensors were given other memory since the last save", final=True)
        self._issued.set()

    def _enqueue(self, side: Any, ready: Any) -> None:
        with torch.cuda.stream(side):
            side.wait_event(ready)  # not before the optimizer's kernels have written what is copied
            self._copy(non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(side)
        self._copied = copied

    def _copy(self, *, non_blocking: bool = False) -> None:
        if self._views:  # a rank may have nothing to write; torch refuses empty lists
            torch._foreach_copy_(list(self._views), list(self._sources), non_blocking=non_blocking)

    def wait(self) -> None:
        """Return when the values are in the arena, or never will be."""
        self._issued.wait()
        if self._copied is not None:
            self._copied.synchronize()

    def settle(self, gpu: torch.device | None) -> None:
        """Return when the caller may change the tensors: on a GPU its stream waits, not its thread."""
        self._issued.wait()
        if self._copied is not None:
            torch.cuda.current_stream(gpu).wait_event(self._copied)
        self.certify()
        self._settled.set()

    def certify_later(self, seconds: float) -> None:
        """Certify it in the copy's own thread, unless the caller was faster: then the caller need not do it."""
        self.wait()
        self._settled.wait(seconds)
        self.certify()

    def certify(self) -> None:
        """Decide whether it is whole; only the first call counts.

        A tensor that was changed while it was copied would be a state that never was. torch counts a change when it has
        ended. So the caller's own thread may look when it settles, which is before it changes anything; anybody else
        has to look so long after the copy that a change that was under way has ended, and takes any change for one that
        came too early.
        """
        with self._lock:
            if self._versions is not None and _versions(self._sources) != self._versions:
                self.failure = self.failure or Failed(
                    "torn: tensors were changed while they were copied; call before_optimizer_step() first", final=True
                )
            # From here on the caller may change them, and what they hold need not be kept alive.
            self._versions = None
            if self._copied is None or self._copied.query():
                self._sources = []


def _versions(sources: Sequence[Tensor]) -> list[int] | None:
    """torch counts the changes of every tensor; None when these have no such count (inference tensors)."""
    try:
        return list(map(_version, sources))
    except RuntimeError:
        return None


class Copier:
    """Runs copies: in the caller's thread, or in one thread of its own when they are lazy."""

    def __init__(self, *, lazy: bool, gpu: torch.device | None) -> None:
        """`gpu`: where the tensors are; None for host memory."""
        self._lazy, self._gpu = lazy, gpu
        self._last: Copy | None = None
        self._side = torch.cuda.Stream(gpu) if gpu is not None else None
        self._pinned: list[Tensor] = []
        self._orders: queue.SimpleQueue[tuple[Copy, Any, Fits] | None] = queue.SimpleQueue()
        self._thread = start_background_thread(self._serve, "checkpoint-copy") if lazy else None

    def pin(self, memory: Sequence[Tensor]) -> None:
        """Lock the buffers in memory for the GPU's copy engines: once, not per tensor. Without it copies are slow."""
        if self._gpu is None:
            return
        for buffer in memory:
            result = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
            if int(result) != 0:
                _log.warning("%d bytes for checkpoints could not be pinned (CUDA error %d)", buffer.nbytes, int(result))
                _clear_last_error(self._gpu)
                return
            self._pinned.append(buffer)

    def copy(self, views: Sequence[Tensor], sources: Sequence[Tensor], fits: Fits) -> Copy:
        """Begin a copy; when it is not a lazy one, it is done by then. Failures are the copy's.

        `fits` is asked where the copy is made.
        """
        self.settle()
        copy = Copy(views, sources, _versions(sources) if self._lazy else None)
        ready = torch.cuda.current_stream(self._gpu).record_event() if self._side is not None else None
        if self._lazy:
            self._last = copy
            self._orders.put((copy, ready, fits))
            return copy
        copy.run(self._side, ready, fits)
        copy.wait()
        return copy

    def settle(self) -> None:
        """Return when the caller may change what the last lazy copy reads."""
        if self._last is not None:
            self._last.settle(self._gpu)
            self._last = None

    def _serve(self) -> None:
        if self._gpu is not None:
            # A thread begins with GPU 0: leaving the side stream would go back there, and make a context on it.
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
    """Take away the error that the CUDA runtime keeps of a failed call: the next kernel launch would raise it.

    torch binds no cudaGetLastError; the check behind a launch of its own reads the error and clears it.
    """
    try:
        torch.ones(1, device=gpu)
    except RuntimeError as error:
        _log.debug("cleared: %s", error)
