"""The other side: torch's distributed checkpoints in every reasonable configuration, and torch.save."""

import gc
import os
import pickle
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.checkpoint.states import BenchmarkState

THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS

KINDS = {
    "DCP thread": (THREAD, StagingOptions(False, False, False, False)),
    "DCP thread, async staging": (THREAD, StagingOptions(False, False, True, False)),
    "DCP process": (PROCESS, StagingOptions(False, True, False, False)),
    "DCP process, async staging": (PROCESS, StagingOptions(False, True, True, False)),
}
"""Every stager is reused, plans are cached, and a process receives shared memory."""


@dataclass(frozen=True)
class Times:
    """Seconds of one asynchronous save: the call, until the state may change again, until the files are durable."""

    call: float
    staged: float
    whole: float


@contextmanager
def lone_group(folder: Path) -> Iterator[None]:
    """Create a gloo group of this process alone, which DCP's process mode requires."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{os.getpid()}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Dcp:
    """Repeated `dcp.async_save` of one state set."""

    def __init__(self, folder: Path, state: BenchmarkState, kind: str) -> None:
        self._folder, self._state = folder / kind.replace(" ", "-"), state
        self._type, options = KINDS[kind]
        self._stager = DefaultStager(options)
        self._planner = DefaultSavePlanner(enable_plan_caching=True)
        self._number = 0
        self._place = folder

    def start(self) -> tuple[Future[Any], Future[Any] | None]:
        """Begin a save; return futures of its end, and of the end of its staging if that is asynchronous."""
        self._number += 1
        self._place = self._folder / str(self._number)
        answer = dcp.async_save(
            self._state.tensors, checkpoint_id=self._place, async_stager=self._stager, planner=self._planner,
            async_checkpointer_type=self._type,
        )  # fmt: skip
        if isinstance(answer, Future):
            return answer, None
        return answer.upload_completion, answer.staging_completion

    def save(self) -> Times:
        self._state.next_step()
        start = time.perf_counter()
        ended, staging = self.start()
        called = staged = time.perf_counter()
        if staging is not None:
            staging.result()
            staged = time.perf_counter()
        ended.result()
        whole = time.perf_counter()
        self.clean()
        return Times(called - start, staged - start, whole - start)

    def clean(self) -> None:
        shutil.rmtree(self._place)

    def close(self) -> None:
        self._stager.close()
        gc.collect()


def dcp_save(tensors: dict[str, Tensor], place: Path, *, threads: int) -> float:
    """Return the seconds of a durable, blocking `dcp.save`."""
    start = time.perf_counter()
    dcp.save(tensors, storage_writer=FileSystemWriter(place, thread_count=threads, sync_files=True), no_dist=True)
    seconds = time.perf_counter() - start
    shutil.rmtree(place)
    return seconds


def torch_save(tensors: dict[str, Tensor], path: Path) -> float:
    """Return the seconds of `torch.save` and fsync."""
    start = time.perf_counter()
    with path.open("wb") as stream:
        torch.save(tensors, stream)
        stream.flush()
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def without_numpy() -> None:
    """Replace the two conversions that need NumPy; their cost is equal to within microseconds."""
    c10d._object_to_tensor = _pack_object
    c10d._tensor_to_object = _unpack_object


def _pack_object(value: Any, device: torch.device, _group: Any) -> tuple[Tensor, Tensor]:
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    return data, torch.tensor([data.numel()], device=device)


def _unpack_object(data: Tensor, size: Tensor | int, _group: Any) -> Any:
    room = bytearray(int(size))
    torch.frombuffer(room, dtype=torch.uint8).copy_(data[: int(size)].cpu())
    return pickle.loads(room)
