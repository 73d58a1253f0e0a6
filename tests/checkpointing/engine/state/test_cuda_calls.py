"""The order of CUDA calls, recorded by a substitute: no GPU is needed, and none is tested."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointing.engine.restore import loader
from checkpointing.engine.state.staging import Copier

GPU = torch.device("cuda", 3)


class Recorder:
    """What was called, by which thread (`copy` for the copier's own), in order."""

    def __init__(self, registered: int = 0) -> None:
        self.calls: list[tuple[str, ...]] = []
        self._registered, self._lock = registered, threading.Lock()

    def note(self, *words: object) -> None:
        who = "copy" if threading.current_thread().name == "checkpoint-copy" else "caller"
        with self._lock:
            self.calls.append((who, *map(str, words)))

    def by(self, who: str) -> list[tuple[str, ...]]:
        return [words for one, *words in self.calls if one == who]  # type: ignore[misc]

    # -- what stands in for torch.cuda

    def Stream(self, device: object = None) -> Any:
        self.note("Stream", device)
        return SimpleNamespace(name="side", wait_event=lambda event: self.note("side waits", event))

    def current_stream(self, device: object = None) -> Any:
        def record() -> str:
            self.note("record ready", device)
            return "ready"

        return SimpleNamespace(
            record_event=record, wait_event=lambda event: self.note("current waits", event.name, device)
        )

    def Event(self) -> Any:
        return SimpleNamespace(
            name="copied", record=lambda stream: self.note("record copied on", stream.name),
            synchronize=lambda: self.note("synchronize"), query=lambda: True,
        )  # fmt: skip

    @contextmanager
    def stream(self, side: Any) -> Iterator[None]:
        self.note("enter", side.name)
        yield
        self.note("leave", side.name)

    def set_device(self, device: object) -> None:
        self.note("set_device", device)

    def synchronize(self, device: object = None) -> None:
        self.note("synchronize device", device)

    def cudart(self) -> Any:
        def register(_address: int, _size: int, _flags: int) -> int:
            self.note("register")
            return self._registered

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda _address: self.note("unregister"))


def stand_in(patch: pytest.MonkeyPatch, registered: int = 0) -> Recorder:
    cuda = Recorder(registered)
    for name in ("Stream", "current_stream", "Event", "stream", "set_device", "synchronize", "cudart"):
        patch.setattr(torch.cuda, name, getattr(cuda, name))
    return cuda


def fits() -> bool:
    return True


def test_a_lazy_copy_runs_on_the_device_of_its_tensors_behind_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = stand_in(monkeypatch)
    copier = Copier(lazy=True, gpu=GPU)
    goal, source = torch.zeros(4), torch.arange(4.0)
    copy = copier.copy([goal], [source], fits)
    copy.wait()
    copier.settle()
    copier.close()
    assert goal.equal(source)
    assert copy.failure is None
    mine = cuda.by("copy")
    assert mine[:6] == [
        ["set_device", "cuda:3"], ["enter", "side"], ["side waits", "ready"], ["record copied on", "side"],
        ["leave", "side"], ["synchronize"],
    ]  # fmt: skip
    assert cuda.by("caller")[:2] == [["Stream", "cuda:3"], ["record ready", "cuda:3"]]
    assert ["current waits", "copied", "cuda:3"] in cuda.by("caller")


def test_a_copy_that_is_waited_for_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = stand_in(monkeypatch)
    copier = Copier(lazy=False, gpu=GPU)
    copier.copy([torch.zeros(4)], [torch.ones(4)], fits)
    copier.close()
    assert cuda.by("copy") == []
    assert [words[0] for words in cuda.by("caller")] == [
        "Stream", "record ready", "enter", "side waits", "record copied on", "leave", "synchronize",
    ]  # fmt: skip


def test_memory_is_pinned_once_and_released(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = stand_in(monkeypatch)
    copier = Copier(lazy=False, gpu=GPU)
    copier.pin([torch.zeros(4), torch.zeros(4)])
    copier.close()
    assert [words[0] for words in cuda.by("caller")] == ["Stream", "register", "register", "unregister", "unregister"]


def test_the_error_of_a_refused_pin_is_cleared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = stand_in(monkeypatch, registered=2)
    pending = ["CUDA error: out of memory"]

    def ones(*_size: int, device: torch.device) -> None:
        cuda.note("launch", device)
        if pending:
            raise RuntimeError(pending.pop())

    monkeypatch.setattr(torch, "ones", ones)
    copier = Copier(lazy=False, gpu=GPU)
    copier.pin([torch.zeros(4), torch.zeros(4)])
    copier.close()
    assert not pending, "the next kernel of the training would raise it"
    assert [words[0] for words in cuda.by("caller")] == ["Stream", "register", "launch"]
    assert "could not be pinned (CUDA error 2)" in caplog.text


def test_host_memory_needs_no_cuda_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = stand_in(monkeypatch)
    copier = Copier(lazy=True, gpu=None)
    copier.pin([torch.zeros(4)])
    copier.copy([torch.zeros(4)], [torch.ones(4)], fits).wait()
    copier.close()
    loader.copy([torch.zeros(4)], [torch.ones(4)])
    assert cuda.calls == []
