"""Sides of the checkpoint table: raw copies, reads and writes, orch's checkpointer, and torch's checkpoints."""

import ctypes
import gc
import mmap
import os
import pickle
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.runner import LIMIT
from checkpointing.config import CheckpointConfig, StagingConfig
from checkpointing.engine.checkpointer import Checkpointer
from checkpointing.engine.collectives.group import World
from checkpointing.storage import shared_memory
from checkpointing.tiers.catalog import Owner
from checkpointing.tiers.tier import RunTiers

BLOCK = 8 << 20
"""Bytes per write or read, as in the engine's chunks."""
CORES = len(os.sched_getaffinity(0))
Side = Callable[[], float]
"""Function that performs a task once and returns how many seconds it took, excluding setup and cleanup."""

# -- states

_WORDS = {"BIG": (64, 1 << 20), "SMALL": (4000, 1 << 14)}
_KINDS = ("model.{}", "optim.{}.exp_avg", "optim.{}.exp_avg_sq")


class BenchmarkState:
    """Tensors that change slightly before every save, as in training."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self._steps = tensors, count(1)
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())

    @classmethod
    def from_set(cls, set_name: str, scale: float) -> "BenchmarkState":
        """Create a fraction `scale` of the tensors in BIG (64 x 4 MiB) or SMALL (4000 x 64 KiB)."""
        number, words = _WORDS[set_name]
        draw = torch.Generator().manual_seed(number)
        names = (kind.format(f"layers.{index:05d}.weight") for index in count() for kind in _KINDS)
        return cls({key: torch.randn(words, generator=draw) for key in islice(names, max(3, int(number * scale)))})

    def next_step(self) -> int:
        """Advance one step: a value in every tensor changes, and so does the tensor's digest."""
        with torch.no_grad():
            torch._foreach_add_([tensor[:1] for tensor in self.tensors.values()], 0.001)
        return next(self._steps)

    def blank(self) -> "BenchmarkState":
        return BenchmarkState({key: torch.zeros_like(tensor) for key, tensor in self.tensors.items()})

    def equals(self, target: dict[str, Tensor]) -> bool:
        return all(torch.equal(target[key], tensor) for key, tensor in self.tensors.items())


# -- page cache


def drop(files: Iterable[Path]) -> None:
    """Drop `files` from the page cache. Raises RuntimeError if the kernel keeps more than 1 %."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # dirty pages cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            left = resident_share(descriptor)
        finally:
            os.close(descriptor)
        if left > 0.01:
            raise RuntimeError(
                f"{path} stays in the page cache ({left:.0%}): reads from a cold cache cannot be measured here"
            )


def warm(files: Iterable[Path]) -> None:
    """Read `files` once, so that they are in the page cache."""
    block = bytearray(1 << 20)
    for path in files:
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(block):
                pass


def resident_share(descriptor: int) -> float:
    """Return the share of a file's pages that are in the page cache; 0 for a file below one page says nothing."""
    size = os.fstat(descriptor).st_size
    if size < mmap.PAGESIZE:
        return 0.0
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        address, length = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size)
        status = ctypes.CDLL(None, use_errno=True).mincore(address, length, pages)
        del first
    if status:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in pages) / len(pages)


# -- the machine's limits


def room(nbytes: int, *, shared: bool = False) -> memoryview:
    """Return page-aligned memory with resident pages; `shared`: as in the engine's arena, a memfd with huge pages."""
    if not shared:
        view = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    else:
        descriptor = os.memfd_create("limit")
        os.ftruncate(descriptor, nbytes)
        view = shared_memory.map_shared(descriptor, nbytes)
        os.close(descriptor)
        shared_memory.populate(view)
        shared_memory.use_huge_pages(view)
    for start in range(0, nbytes, BLOCK):
        # Random, because some disks and file systems treat zeros and repetitions differently.
        view[start : start + BLOCK] = os.urandom(len(view[start : start + BLOCK]))
    return view


def memcpy_side(nbytes: int) -> Side:
    """Return a side that copies private to shared memory in this thread; ctypes releases the GIL meanwhile."""
    views = room(nbytes, shared=True), room(nbytes)
    target, source = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in views)

    def copy() -> float:
        start = time.perf_counter()
        ctypes.memmove(target, source, len(views[0]))
        return time.perf_counter() - start

    return copy


def _in_threads(threads: int, act: Callable[[int], None]) -> None:
    """Run `act(0)` to `act(threads - 1)` in parallel; a single call runs in this thread."""
    if threads == 1:
        act(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(act, range(threads)))


def raw_write(view: memoryview, folder: Path, *, threads: int = 1) -> float:
    """Return how many seconds it takes to write `view` to a new file on disk, with O_DIRECT if supported."""
    path = folder / "raw-write"

    def write(number: int) -> None:
        for at in range(number * BLOCK, len(view), threads * BLOCK):
            block = view[at : at + BLOCK]
            if (done := os.pwrite(descriptor, block, at)) != len(block):
                raise OSError(f"{done} of {len(block)} bytes were written")

    start = time.perf_counter()
    descriptor = _open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.posix_fallocate(descriptor, 0, len(view))
        _in_threads(threads, write)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    parent = os.open(folder, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def raw_reads(files: Sequence[Path], target: memoryview, *, cold: bool) -> dict[str, Side]:
    """Return the sides that measure the read limit; if `cold`, one of them also bypasses the page cache (O_DIRECT)."""
    ways: dict[str, Side] = {LIMIT: lambda: raw_read(files, target, threads=CORES, cold=cold)}
    if cold:
        ways[f"{LIMIT}, O_DIRECT"] = lambda: raw_read(files, target, threads=CORES, cold=cold, direct=True)
    return ways


def raw_read(files: Sequence[Path], target: memoryview, *, threads: int, cold: bool, direct: bool = False) -> float:
    """Return how many seconds it takes to read `files` in sequence into `target`, with `threads` threads.

    `target` may be smaller than the files; it is then refilled repeatedly, like a verifier's memory.
    """
    if cold:
        drop(files)
    pieces = [(path, at) for path in files for at in range(0, path.stat().st_size, BLOCK)]
    # A multiple of the threads, so that two threads never fill the same block.
    blocks = max(threads, len(target) // BLOCK // threads * threads)

    def read(number: int) -> None:
        for index in range(number, len(pieces), threads):
            place, (path, at) = index % blocks * BLOCK, pieces[index]
            os.preadv(opened[path], [target[place : place + BLOCK]], at)

    start = time.perf_counter()
    opened = {path: _open(path, os.O_RDONLY, direct=direct) for path in files}
    try:
        _in_threads(threads, read)
        return time.perf_counter() - start
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


def _open(path: Path, flags: int, *, direct: bool = True) -> int:
    """Open with O_DIRECT if requested and supported."""
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            pass
    return os.open(path, flags, 0o600)


# -- orch


class SaveTimes(NamedTuple):
    """Seconds of one save: training pauses for `stall`, COMMIT follows `written` later, and `whole` is the sum."""

    stall: float
    written: float
    whole: float
    name: str = ""


class Ours:
    """A checkpointer for one state set in a separate folder, as the trainer uses it."""

    def __init__(self, folder: Path, state: BenchmarkState, *, mode: str = "block", **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.state = folder, state
        self.events: list[tuple[float, str, dict[str, Any]]] = []
        owner = Owner(1, "ab12cd34", (), lambda: True)
        config = CheckpointConfig(keep=2, staging=StagingConfig(mode=mode))
        tiers = RunTiers.single(folder, keep=2)
        self.checkpointer = Checkpointer(owner, World(), tiers, self._record_event, config=config, **options)
        self.checkpointer.prepare(state.tensors)

    @classmethod
    def save_once(cls, folder: Path, state: BenchmarkState) -> Path:
        """Save `state` once, close the checkpointer, and return the checkpoint's folder."""
        ours = cls(folder, state)
        name = ours.save().name
        ours.checkpointer.close()
        return folder / name

    def _record_event(self, kind: str, data: dict[str, Any]) -> None:
        self.events.append((time.perf_counter(), kind, data))

    def save(self) -> SaveTimes:
        """Save once in block mode, and wait for the commit and the removal of old checkpoints. Raises RuntimeError."""
        step = self.state.next_step()
        start = time.perf_counter()
        self.checkpointer.save(step, self.state.tensors, {})
        staged = time.perf_counter()
        self.checkpointer.wait()
        committed, name = self.commit_of(step)
        return SaveTimes(staged - start, committed - staged, committed - start, name)

    def has_committed(self, step: int) -> bool:
        return any(kind == "checkpoint.committed" and data["step"] == step for _, kind, data in self.events)

    def commit_of(self, step: int) -> tuple[float, str]:
        """Return the commit time and name of `step`. Raises RuntimeError if it was not committed.

        The time is the event's, so that the later deletion of older checkpoints does not count.
        """
        for when, kind, data in reversed(self.events):
            if kind == "checkpoint.committed" and data["step"] == step:
                return when, str(data["name"])
        raise RuntimeError(f"step {step} was not committed: {[event[1:] for event in self.events[-3:]]}")

    def close(self) -> None:
        self.checkpointer.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def checkpoint_files(folder: Path) -> list[Path]:
    """Return every file of a checkpoint, the largest first."""
    return sorted((path for path in folder.iterdir() if path.is_file()), key=lambda path: -path.stat().st_size)


# -- torch

_THREAD, _PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
DCP_KINDS = {
    "DCP thread": (_THREAD, StagingOptions(False, False, False, False)),
    "DCP thread, async staging": (_THREAD, StagingOptions(False, False, True, False)),
    "DCP process": (_PROCESS, StagingOptions(False, True, False, False)),
    "DCP process, async staging": (_PROCESS, StagingOptions(False, True, True, False)),
}
"""Stagers are reused, plans are cached, and a DCP process receives shared memory."""


class Dcp:
    """Repeated `dcp.async_save` calls for one state set."""

    def __init__(self, folder: Path, state: BenchmarkState, kind: str) -> None:
        self._folder, self._state = folder / kind.replace(" ", "-"), state
        self._type, options = DCP_KINDS[kind]
        self._stager = DefaultStager(options)
        self._planner = DefaultSavePlanner(enable_plan_caching=True)
        self._numbers = count(1)
        self._place = folder

    def start(self) -> tuple[Future[Any], Callable[[], Any]]:
        """Start a save; return a future for its completion, and a function that waits until staging has finished."""
        self._place = self._folder / str(next(self._numbers))
        answer = dcp.async_save(
            self._state.tensors, checkpoint_id=self._place, async_stager=self._stager, planner=self._planner,
            async_checkpointer_type=self._type,
        )  # fmt: skip
        if isinstance(answer, Future):
            return answer, lambda: None
        return answer.upload_completion, answer.staging_completion.result

    def save(self) -> SaveTimes:
        self._state.next_step()
        start = time.perf_counter()
        ended, wait_for_staging = self.start()
        wait_for_staging()
        staged = time.perf_counter()
        ended.result()
        whole = time.perf_counter()
        self.clean()
        return SaveTimes(staged - start, whole - staged, whole - start)

    def clean(self) -> None:
        shutil.rmtree(self._place)

    def close(self) -> None:
        self._stager.close()
        gc.collect()


@contextmanager
def opened_dcps(folder: Path, state: BenchmarkState, *kinds: str) -> Iterator[dict[str, Dcp]]:
    """Open DCP in these modes, within a gloo group of only this process, which DCP's process mode requires."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{os.getpid()}", rank=0, world_size=1)
    try:
        dcps = {kind: Dcp(folder, state, kind) for kind in kinds}
        yield dcps
        for opened in dcps.values():
            opened.close()
    finally:
        dist.destroy_process_group()


def dcp_save(tensors: dict[str, Tensor], place: Path, *, threads: int) -> float:
    """Return how many seconds a durable, blocking `dcp.save` takes."""
    start = time.perf_counter()
    dcp.save(tensors, storage_writer=FileSystemWriter(place, thread_count=threads, sync_files=True), no_dist=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(place)
    return seconds


def torch_save(tensors: dict[str, Tensor], path: Path) -> float:
    """Return how many seconds `torch.save` and fsync take."""
    start = time.perf_counter()
    with path.open("wb") as stream:
        torch.save(tensors, stream)
        stream.flush()
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def replace_numpy_conversions() -> None:
    """Replace torch's two conversions that need NumPy; the replacements cost the same to within microseconds."""

    def pack(value: Any, device: torch.device, _group: Any) -> tuple[Tensor, Tensor]:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
        return data, torch.tensor([data.numel()], device=device)

    def unpack(data: Tensor, size: Tensor | int, _group: Any) -> Any:
        return pickle.loads(bytes(data[: int(size)].cpu().tolist()))

    c10d._object_to_tensor, c10d._tensor_to_object = pack, unpack


class SavePasses:
    """Matrix products in one thread that take about `seconds`, as a stand-in for a forward and backward pass."""

    def __init__(self, seconds: float) -> None:
        self._left, self._right = torch.randn(256, 512), torch.randn(512, 512)
        self._number = 10
        self._number = max(1, int(10 * seconds / statistics.median(self.run() for _ in range(9))))

    def run(self) -> float:
        start = time.perf_counter()
        for _ in range(self._number):
            self._left = torch.tanh(self._left @ self._right)
        return time.perf_counter() - start
