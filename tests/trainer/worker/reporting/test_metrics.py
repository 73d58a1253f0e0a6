"""Records of saves, written from two threads."""

import errno
import json
import sys
import threading
from pathlib import Path

import pytest

from trainer.protocol.events import EventKind
from trainer.protocol.messages.ranks import RankSpec
from trainer.protocol.run_dir import AttemptDir
from trainer.worker.reporting.metrics import Journal


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    attempt = AttemptDir(tmp_path / "attempts" / "001")
    for file in (attempt.work_log("n"), attempt.metrics, attempt.rank_events("n"), attempt.final):
        file.parent.mkdir(parents=True, exist_ok=True)
    spec = RankSpec(
        run_dir=str(tmp_path), attempt=1, generation=1, rank=0, local_rank=0, world_size=1, local_world_size=1, node=0,
        node_name="n", cell_fd=-1, control_fd=-1, host="",
    )  # fmt: skip
    return Journal(attempt, spec)


def test_no_stall_is_lost_while_another_thread_tells_of_a_commit(journal: Journal, tmp_path: Path) -> None:
    steps, switched = 3000, sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    failures: list[BaseException] = []

    def commits() -> None:
        try:
            for step in range(1, 200):
                journal.checkpoint(EventKind.CHECKPOINT_COMMITTED, {"step": step, "name": "", "bytes": 0, "seconds": 0})
        except RuntimeError as error:
            failures.append(error)

    saver = threading.Thread(target=commits)
    try:
        saver.start()
        for step in range(1000, 1000 + steps):
            journal.record_stall(step, 1.0)
        saver.join()
    finally:
        sys.setswitchinterval(switched)
    assert failures == []
    journal.checkpoint(EventKind.CHECKPOINT_COMMITTED, {"step": 999, "name": "", "bytes": 0, "seconds": 0})
    assert sum(journal._stalls.values()) == steps
    journal.checkpoint(EventKind.CHECKPOINT_COMMITTED, {"step": 1500, "name": "", "bytes": 0, "seconds": 0})
    journal.close()
    (events,) = tmp_path.rglob("ranks-n.jsonl")
    last = json.loads(events.read_text().splitlines()[-1])
    assert 1.0 in (last.get("stall"), last.get("data", {}).get("stall"))


def test_saves_that_fail_are_told_although_their_events_cannot_be_written(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int]] = []
    journal._on_saves = lambda trouble, size: told.append((trouble, size))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal._events, "write", full)
        with pytest.raises(OSError, match="No space left"):
            journal.checkpoint(EventKind.CHECKPOINT_RETRIED, {"step": 5, "reason": "disk full", "bytes": 9})
    assert told == [("saves failing since step 5: disk full", 9)]
    journal.checkpoint(EventKind.CHECKPOINT_COMMITTED, {"step": 7, "name": "", "bytes": 0, "seconds": 0})
    assert told[1:] == [("", 9)]
    journal.close()
