"""Restore tests typed by a user: read-only, killed midway, and for a user's own program."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.user import User
from tests.folder_snapshot import snapshot

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

PROGRAM = """
import os, pathlib
folder = pathlib.Path("out")
folder.mkdir(exist_ok=True)
if os.environ["RANK"] == "0":
    (folder / "checkpoint-7").mkdir()
    (folder / "checkpoint-7" / "weights.bin").write_bytes(b"w" * 1000)
"""
RESTORE = """
import os, pathlib, sys
weights = pathlib.Path(os.environ["ORCH_CHECKPOINT"]) / "weights.bin"
assert weights.read_bytes() == b"w" * 1000, os.environ["ORCH_CHECKPOINT_STEP"]
try:
    weights.write_bytes(b"x")
except OSError:
    sys.exit(0)
"""


def read_only(user: User, run: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `orch WORDS` and all of its children with the run's folder mounted read-only."""
    folder = str(user.run_dir(run).path)
    shield = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    program = [sys.executable, "-P", "-m", "orchestrator.cli.main", *words]
    programs = {name: value for name, value in user.environment.items() if name != "WARM_CHILDREN"}
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", shield, folder, *program],
        env=programs, cwd=user.folder, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


@pytest.mark.proof
def test_it_needs_no_write_to_the_run_that_it_tests(calm: tuple[User, str]) -> None:
    user, run = calm
    user.run("controller", "stop")
    folder = user.run_dir(run).path
    if read_only(user, run, "status").returncode:
        pytest.skip("no namespace of one's own here: needs unshare -rm")
    before = snapshot(folder)
    done = read_only(user, run, "ckpt", "restore-test", f"{run}@8", "--layout", "1", "--wait")
    user.run("controller", "stop")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "RESTORED" in done.stdout
    assert snapshot(folder) == before


def test_killed_in_the_middle_it_has_no_verdict(calm: tuple[User, str]) -> None:
    user, run = calm
    (begun,) = user.ask("ckpt", "restore-test", f"{run}@4", "--steps", "8")
    (rank, *_) = user.until(lambda: user.processes("orch-rank-"), 60, "a rank of the test", every=0.02)
    rank.send_signal(signal.SIGKILL)

    def verdict() -> dict[str, Any] | None:
        (newest, *_) = user.ask("restore-tests", "history", run)
        return newest if newest["verdict"] else None

    found = user.until(verdict, 90, "an end of the test", every=0.5)
    assert (found["test"], found["verdict"]) == (begun["test"], "NOT_FINISHED"), found
    rows = {row["step"]: row for row in user.ask("ckpt", "ls", run)}
    assert rows[4]["trust"] == "COMMITTED"
    assert not rows[4]["pinned"]
    assert len(user.show(begun["test"])["attempts"]) == 1


@pytest.mark.proof
def test_a_users_own_program_restores_its_checkpoint(tmp_path: Path) -> None:
    user = User(tmp_path, "local")
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "restore.py").write_text(RESTORE)
    settings = ["checkpoints.path=out", "cluster.nodes=1", "cluster.ranks_per_node=1"]
    try:
        run = user.submit(
            "torchrun-script", "command=[python, train.py]", "restore_tests.command=[python, restore.py]", *settings
        )["run"]  # fmt: skip
        assert user.wait(run) == 0
        user.until(lambda: user.ask("ckpt", "ls", run), 30, "its checkpoint")
        done = user.run("ckpt", "restore-test", run, "--wait", "--json")
        weights = tmp_path / "out" / "checkpoint-7" / "weights.bin"
        shielded = shutil.which("unshare") and '"read_only":true' in done.stdout
        # Where nothing can keep the program from writing, its digests show that it did.
        assert (done.returncode, weights.read_bytes()[:1]) == ((0, b"w") if shielded else (4, b"x")), done.stdout
    finally:
        user.leave()
