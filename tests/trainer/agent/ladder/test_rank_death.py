"""Failures for lack of memory are told from kills and bugs, with what to change."""

import signal
from typing import Any

import pytest

from trainer.agent.coordination.job_monitor import desync_judgement, is_needed
from trainer.agent.flight.wait_graph import Finding
from trainer.agent.ladder.rank_death import find_cause
from trainer.agent.watch.waiting_ranks import HangKind
from trainer.protocol.failures.outcome import FailureKind
from trainer.protocol.failures.rank_end import RankEnd, exit_words

KILLED = {"signal": signal.SIGKILL, "out_of_memory": "the kernel killed it; the limit of its cgroup is 4.0 GiB"}
GPU = {"exit_code": 1, "exception": "OutOfMemoryError", "message": "CUDA out of memory. Tried to allocate 20.00 GiB"}
ENDS: dict[str, tuple[dict[str, Any], FailureKind, str]] = {
    "kernel": (KILLED, FailureKind.OUT_OF_MEMORY, "is 4.0 GiB; give the job more (cluster.mem), or use less"),
    "GPU": (GPU, FailureKind.OUT_OF_MEMORY, "20.00 GiB; use less GPU memory (train.micro_batch_size, "),
    "Python": ({"exit_code": 1, "exception": "MemoryError", "message": ""}, FailureKind.OUT_OF_MEMORY, "cluster.mem"),
    "torch on the CPU": (
        {
            "exit_code": 1, "exception": "RuntimeError",
            "message": "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you",
        },
        FailureKind.OUT_OF_MEMORY, "cluster.mem",
    ),
    "a full /dev/shm": (
        {
            "exit_code": 1, "exception": "RuntimeError",
            "message": "unable to write to file </torch_812_33_0>: No space left on device (28)",
        },
        FailureKind.OUT_OF_MEMORY, "cluster.mem",
    ),
    "a full disk": (
        {"exit_code": 1, "exception": "OSError", "message": "[Errno 28] No space left on device"},
        FailureKind.STORAGE, "could not use its storage",
    ),
    "a word of a disk": (
        {"exit_code": 1, "exception": "ValueError", "message": "the input/output error tolerance must be positive"},
        FailureKind.EXCEPTION, "raised ValueError",
    ),
    "somebody's kill": ({"signal": signal.SIGKILL}, FailureKind.RANK_KILLED, "was killed by SIGKILL"),
    "a word of it": (
        {"exit_code": 1, "exception": "ValueError", "message": "the MemoryError class is not callable"},
        FailureKind.EXCEPTION, "raised ValueError",
    ),
}  # fmt: skip


def end(**fields: Any) -> RankEnd:
    return RankEnd(**{"rank": 1, "node": "n1", "at": 1.0, "step": 7, **fields})


@pytest.mark.parametrize("name", ENDS)
def test_what_ended_the_rank(name: str) -> None:
    fields, kind, words = ENDS[name]
    cause = find_cause([end(**fields)], trained=True)
    assert cause.failure.kind is kind
    assert words in cause.failure.reason
    assert cause.retry is (kind is not FailureKind.STORAGE)


@pytest.mark.parametrize("fields", [KILLED, GPU], ids=["kernel", "GPU"])
def test_before_the_first_step_or_twice_at_one_step_no_restart_helps(fields: dict[str, Any]) -> None:
    first = find_cause([end(**fields)], trained=False)
    assert not first.retry
    assert first.failure.reason.endswith(", before the first step")
    again = find_cause([end(**fields)], trained=True, last_mark=find_cause([end(**fields)], trained=True).mark)
    assert (again.retry, again.failure.kind) == (False, FailureKind.OUT_OF_MEMORY)


def test_it_is_the_root_of_what_its_peers_only_saw() -> None:
    lost = end(
        rank=0, at=0.5, exit_code=75, exception="RuntimeError", message="Connection reset by peer", secondary=True
    )
    cause = find_cause([lost, end(**KILLED)], trained=True)
    assert (cause.failure.kind, cause.failure.rank) == (FailureKind.OUT_OF_MEMORY, 1)


def test_the_event_of_the_exit_names_it() -> None:
    assert exit_words(None, 9, "the kernel killed it") == "out of memory: the kernel killed it"


def end_of(rank: int, **fields) -> RankEnd:
    return RankEnd(rank=rank, node=f"n{rank // 2}", at=1.0, step=7, **fields)


ECHO = {"exit_code": 75, "exception": "DistNetworkError", "message": "Connection closed by peer", "secondary": True}


@pytest.mark.parametrize(
    ("ends", "due"),
    [
        ([end_of(0, **ECHO), end_of(1, signal=6)], True),
        ([end_of(0, **ECHO), end_of(1, signal=9)], False),
        ([end_of(0, **ECHO), end_of(1, exit_code=1, exception="KeyError", message="x")], False),
        ([end_of(0, exit_code=0)], False),
        ([], False),
    ],
)
def test_only_when_nobody_explains_himself(ends, due) -> None:
    assert is_needed(ends) is due


def test_different_collectives_are_told_with_the_rank_and_its_node() -> None:
    finding = Finding(kind="desync_shape", ranks=(3,), group="0", sequence=4, reason="rank 3 did something else")
    judgement = desync_judgement(finding, [end_of(rank, **ECHO) for rank in range(4)])
    assert (judgement.kind, judgement.culprit, judgement.node, judgement.step) == (HangKind.DESYNC, 3, "n1", 7)
    assert judgement.waiting == (0, 1, 2)


def test_a_rank_that_is_only_missing_had_been_killed() -> None:
    finding = Finding(kind="missing", ranks=(3,), reason="rank 3 never came")
    assert desync_judgement(finding, [end_of(0, **ECHO)]) is None
