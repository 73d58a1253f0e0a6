"""Ranks that get a request at different times save after the same step. Each rank is a thread with its own store."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from trainer.agent.instrument import stop_agreement
from trainer.agent.instrument.stop_agreement import StopAgreement

STEPS = 1000


class Job:
    """Ranks that train in step: a rank can be at most one step ahead, as with an all-reduce in every step."""

    def __init__(self, world: int, ask: Callable[[int, int], tuple[int, float]]) -> None:
        """`ask` returns the request that a rank's cell holds, given the rank and its step."""
        import torch.distributed as dist

        self.world, self.ask = world, ask
        self.barrier = threading.Barrier(world)
        host = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.stores = [host, *(dist.TCPStore("127.0.0.1", host.port, None, False) for _ in range(world - 1))]
        self.steps, self.saves = [0] * world, [[] for _ in range(world)]  # type: list[int], list[list[tuple[int, int]]]

    def run(self, stop_after: int = 1) -> list[list[tuple[int, int]]]:
        threads = [threading.Thread(target=self._train, args=(rank, stop_after)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return self.saves

    def _train(self, rank: int, stop_after: int) -> None:
        def group() -> tuple[Any, int, int]:
            return self.stores[rank], rank, self.world

        agreement = StopAgreement(lambda: self.ask(rank, self.steps[rank]), group)
        for step in range(1, STEPS):
            time.sleep(random.random() * 0.002)
            self.barrier.wait(60)
            self.steps[rank] = step
            if reason := agreement.due(step):
                self.saves[rank].append((step, reason))
                if len(self.saves[rank]) == stop_after:
                    agreement.leave()
                    return


@pytest.fixture(autouse=True)
def poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_agreement, "POLL_SECONDS", 0.005)


def far() -> float:
    return time.monotonic() + 60.0


def test_ranks_that_are_asked_at_different_steps_save_after_the_same_one() -> None:
    deadline = far()
    saves = Job(4, lambda rank, step: (4, deadline) if step >= 10 + 15 * rank else (0, 0.0)).run()
    assert len({tuple(each) for each in saves}) == 1
    ((step, reason),) = saves[0]
    assert reason == 4
    assert 55 <= step < STEPS


def test_the_highest_reason_applies_to_all() -> None:
    deadline = far()
    saves = Job(3, lambda rank, step: (4 if rank == 2 else 3, deadline) if step >= 10 else (0, 0.0)).run()
    assert [reason for ((_, reason),) in saves] == [4, 4, 4]


def test_a_save_and_then_a_stop() -> None:
    first, second = far(), far() + 1

    def ask(rank: int, step: int) -> tuple[int, float]:
        return (0, 0.0) if step < 10 + rank else (1, first) if step < 150 + 3 * rank else (3, second)

    saves = Job(2, ask).run(stop_after=2)
    assert saves[0] == saves[1]
    assert [reason for _, reason in saves[0]] == [1, 3]


def test_a_rank_that_never_gets_the_request_holds_nobody_up() -> None:
    deadline = time.monotonic() + 0.5
    job = Job(2, lambda rank, step: (4, deadline) if rank == 0 and step >= 10 else (0, 0.0))
    job.run()
    assert job.steps == [STEPS - 1] * 2
    assert job.saves == [[], []]


def test_a_program_with_one_rank_needs_no_store() -> None:
    deadline = far()
    agreement = StopAgreement(lambda: (3, deadline), lambda: (stop_agreement.OneProcess(), 0, 1))
    step = 0
    while not (reason := agreement.due(step := step + 1)):
        time.sleep(0.001)
    assert reason == 3
    agreement.leave()


def test_a_step_costs_little_while_there_is_no_request() -> None:
    agreement = StopAgreement(lambda: (0, 0.0), lambda: None)
    began = time.thread_time()
    for step in range(20000):
        agreement.due(step)
    assert (time.thread_time() - began) / 20000 < 20e-6
