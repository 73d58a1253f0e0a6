"""Below the save queue: errors that nobody expects end no run and leave nobody waiting."""

from typing import Any

import pytest
import torch

from checkpointing.config import CheckpointConfig, StagingConfig
from checkpointing.storage.backends import LocalStorage
from tests.checkpointing.engine.conftest import Bench, state

SMALL = CheckpointConfig(staging=StagingConfig(host_memory=1 / 1024))


def test_what_follows_a_commit_neither_undoes_it_nor_ends_the_lane(
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


def test_a_listener_that_breaks_does_not_undo_a_commit(bench: Bench) -> None:
    def tell(kind: str, data: dict[str, Any]) -> None:
        bench.events.append((kind, data))
        if kind == "checkpoint.committed" and len(bench.told(kind)) == 1:
            raise RuntimeError("dictionary changed size during iteration")

    made = bench.checkpointer(tell=tell)
    assert made.save(1, state(1), {})
    made.wait()
    assert (made.committed_step, made.failure) == (1, None)
    assert bench.told("checkpoint.failed") == []


class Odd(Exception):
    """Of a kind that nobody has heard of."""


@pytest.mark.parametrize("config", [None, SMALL], ids=["whole", "buckets"])
def test_a_lane_that_dies_says_so_and_leaves_nobody_waiting(bench: Bench, config: CheckpointConfig | None) -> None:
    class Unheard(LocalStorage):
        def create(self, path: str) -> Any:
            raise Odd("what is this?")

    made, tensors = bench.checkpointer(storage=Unheard(bench.root), config=config), {"w": torch.ones(700, 1024)}
    assert made.save(1, tensors, {})
    made.wait()
    assert [data["reason"] for data in bench.told("checkpoint.failed")] == ["rank 0: Odd: what is this?"]
    assert not made.save(2, tensors, {}), "there is nobody to save it"
    made.wait()
