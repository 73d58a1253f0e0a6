"""Logs of a program with endless output: bounded on disk, and readable across rotations, restarts and attempts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.printing_program import line
from tests.end_to_end.user import User, assert_gone
from trainer.protocol.logs.log_rotation import log_files

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).with_name("printing_program.py")


def followed(user: User, run: str, seen: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "orchestrator.cli.main", "logs", run, "--rank", "0", "-f", "--tail", "20000"]
    with seen.open("wb") as output:
        return subprocess.Popen(command, env=user.environment, cwd=user.folder, stdout=output)


@pytest.mark.parametrize("mib", [2, pytest.param(350, marks=[pytest.mark.proof, pytest.mark.timeout(3000)])])
def test_a_rank_that_prints_without_end(user: User, tmp_path: Path, mib: int) -> None:
    seen = tmp_path / "seen"
    seen.touch()
    words = [sys.executable, str(PROGRAM), str(tmp_path), str(seen), str(mib)]
    command = f"command=[{', '.join(repr(word) for word in words)}]"
    shape = ["cluster.nodes=1", "cluster.ranks_per_node=1", "recovery.backoff=0", "logs.max_mib=1", "logs.keep=3"]
    run = str(user.submit("torchrun-script", command, *shape)["run"])
    user.until(lambda: user.run_dir(run).attempt(1).rank_log(0).exists(), 60, "the first line")
    follower = followed(user, run, seen)
    user.until((tmp_path / "waits").exists, 2000, "the second life")
    (agent,) = user.processes("orch-agent")
    family = agent.children(recursive=True)
    os.kill(agent.pid, signal.SIGKILL)
    assert_gone(family)
    assert user.wait(run, 2000) == 0
    assert follower.wait(60) == 0

    shown = [text for text in seen.read_text().splitlines() if text.startswith("life")]
    count = mib * (1 << 20) // 64
    assert shown == [line(life, number) for life in (1, 2, 3) for number in range(count)]
    assert len(user.show(run)["attempts"]) == 2
    for attempt in user.run_dir(run).all_attempts():
        sizes = [file.stat().st_size for file in log_files(attempt.rank_log(0))]
        assert len(sizes) <= 3
        assert max(sizes) <= 1 << 20
    tail = user.run("logs", run, "--rank", "0", "--tail", "20000").stdout.splitlines()
    assert tail[-20000:] == [line(3, number) for number in range(count - 20000, count)]
    kept = user.run("logs", run, "--rank", "0", "--attempt", "1").stdout.splitlines()
    assert kept[-1] == line(2, count - 1)
    assert len(kept) > 2 * (1 << 20) // 64
