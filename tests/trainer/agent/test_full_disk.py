"""Agents whose run folder lies on a disk that is really full: what they report, and how they end."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpointing.proofs.mounts import fill, small_tmpfs
from tests.trainer.agent.job import LocalJob, until
from tests.trainer.agent.warm_agents import WarmAgents
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import ExitCode, FailureKind

WRITES_WHEN_TOLD = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
try:
    with open(os.path.join(os.environ["ORCH_RUN_DIR"], "result"), "wb") as stream:
        stream.write(bytes(1 << 20))
except OSError:
    sys.exit(3)
"""
"""What it would print may find a place in the log, or not."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "disk", "4m") as folder:
        yield folder


def command_job(agents: WarmAgents, jobs: list[LocalJob], folder: Path, *command: str) -> LocalJob:
    jobs.append(LocalJob(folder, nodes=1, ranks=1, command=[sys.executable, "-S", *command], starter=agents))
    jobs[-1].go()
    return jobs[-1]


def test_agents_that_cannot_even_begin_say_so_by_their_exit_code(disk, jobs, agents):
    work = command_job(agents, jobs, disk / "a", "-c", "")
    fill(disk)
    assert work.start().wait() == [ExitCode.STORAGE], work.story()
    assert not work.attempt.outcome.exists()


def test_a_command_that_fails_on_a_full_disk_is_not_blamed_and_its_end_is_kept(disk, jobs, agents, tmp_path):
    told = tmp_path / "told"
    work = command_job(agents, jobs, disk / "a", "-c", WRITES_WHEN_TOLD, str(told)).start()
    until(lambda: work.events(EventKind.GENERATION_STARTED), story=work.story)
    fill(disk)
    told.touch()
    assert work.wait() == [ExitCode.STORAGE], work.story()
    failure = work.outcome().failure
    assert failure.kind is FailureKind.STORAGE
    assert f"disk full ({work.run.path})" in failure.reason
