"""Unexpected errors below the save queue end no run and leave no caller waiting."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointing.config import CheckpointConfig, StagingConfig
from checkpointing.engine.save.save_queue import SaveQueue
from checkpointing.storage.backends import LocalStorage
from tests.checkpointing.engine.conftest import Bench, state

SMALL = CheckpointConfig(staging=StagingConfig(host_memory=1 / 1024))


def test_what_follows_a_commit_neither_undoes_it_nor_ends_the_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("a library gave up")

    made = bench.checkpointer(keep=2)
    monkeypatch.setattr("checkpointing.retention.policy.TierRetention.apply", broken)
    for step in (1, 2, 3):
        assert made.save(step, state(step), {})
        made.wait()
    assert made.committed_step == 3
    assert made.failure is None


def test_a_failing_listener_does_not_undo_a_commit(bench: Bench) -> None:
    def emit(kind: str, data: dict[str, Any]) -> None:
        bench.events.append((kind, data))
        if kind == "checkpoint.committed" and len(bench.reported(kind)) == 1:
            raise RuntimeError("dictionary changed size during iteration")

    made = bench.checkpointer(emit=emit)
    assert made.save(1, state(1), {})
    made.wait()
    assert (made.committed_step, made.failure) == (1, None)
    assert bench.reported("checkpoint.failed") == []


class Odd(Exception):
    """An unexpected kind of error."""


@pytest.mark.parametrize("config", [None, SMALL], ids=["whole", "buckets"])
def test_a_dying_queue_thread_reports_it_and_leaves_no_caller_waiting(
    bench: Bench, config: CheckpointConfig | None
) -> None:
    class Unheard(LocalStorage):
        def create(self, path: str) -> Any:
            raise Odd("what is this?")

    made, tensors = bench.checkpointer(storage=Unheard(bench.root), config=config), {"w": torch.ones(700, 1024)}
    assert made.save(1, tensors, {})
    made.wait()
    assert [data["reason"] for data in bench.reported("checkpoint.failed")] == ["rank 0: Odd: what is this?"]
    assert not made.save(2, tensors, {}), "no thread is left to save it"
    made.wait()


class Staged:
    """Of a job: its buffers."""

    kept = False

    def __init__(self) -> None:
        self.drained = threading.Event()

    def drain(self) -> None:
        self.drained.set()


def test_a_dying_queue_thread_frees_its_peers_buffers_and_waiting_callers() -> None:
    goes_on, waits, closed, reported = threading.Event(), threading.Event(), threading.Event(), list[Any]()

    class Saver:
        def run(self, job: Any) -> Any:
            assert goes_on.wait(20)
            raise Odd("what is this?")

    ranks = SimpleNamespace(rank=3, leads=True, close=closed.set)
    made = SaveQueue(Saver(), ranks, lambda kind, data: emit(kind, data), lambda *_: None)  # type: ignore[arg-type]
    jobs: list[Any] = [SimpleNamespace(step=step, staged=Staged()) for step in (1, 2)]
    for job in jobs:
        made.submit(job)

    heard = list[int]()

    def emit(kind: str, data: Any) -> None:
        assert waits.wait(20)
        waiting.join(0.2)  # a waiter that is released before the report returns now
        reported.append((kind, data))

    def wait() -> None:
        waits.set()
        made.wait()
        heard.append(len(reported))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert waits.wait(20)
    assert made.alive
    goes_on.set()
    waiting.join(20)
    assert not waiting.is_alive()
    assert not made.alive
    assert all(job.staged.drained.wait(20) for job in jobs)
    assert heard == [1], "the report comes before the release"
    assert closed.wait(20), "peers that wait for this rank hear that it is gone"
    assert reported == [("checkpoint.failed", {"step": 1, "reason": "rank 3: Odd: what is this?"})]
    made.close()
