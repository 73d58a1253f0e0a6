"""A batch that is skipped is on disk before any rank reads it again, and told of when it cannot be."""

import asyncio
from pathlib import Path

import pytest

from trainer.agent.ladder.in_job_policy import record_skip
from trainer.protocol import skipped_batches
from trainer.protocol.events import EventKind, EventLog, read_events
from trainer.protocol.run_dir import RunDir
from trainer.protocol.skipped_batches import Skip

SKIP = Skip(step=7, position=56, reason="loss nan")


@pytest.mark.parametrize("works", [True, False])
def test_a_skipped_batch_is_recorded_and_told(
    tmp_path: Path, works: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "run-1")
    run.make()
    attempt = run.attempt(1)
    attempt.make()
    path = attempt.event_file("coordinator")

    def refuses(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if not works:
        monkeypatch.setattr(skipped_batches, "add", refuses)
    asyncio.run(record_skip(SKIP, attempt, EventLog(path, "coordinator", 1)))
    (event,) = read_events(path)[0]
    assert (event.kind, event.data) == (EventKind.BATCH_SKIPPED, {"step": 7, "position": 56, "reason": "loss nan"})
    assert attempt.skipped_batches.exists() == works
    assert ("cannot write" in capsys.readouterr().err) != works
