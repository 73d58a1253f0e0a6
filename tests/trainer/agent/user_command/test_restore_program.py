"""A user's restore program: its exit code is the verdict, unless nothing was found out."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trainer.agent.user_command import restore_program
from trainer.protocol.events import read_events
from trainer.protocol.restore_test import CHECKPOINT_VARIABLE, RESTORE_PROGRAM
from trainer.protocol.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "r-1")
    made.make()
    made.attempt(1).make()
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / "weights").write_bytes(b"w" * 100)
    return made


def restored(
    run: RunDir, program: str, rank: int = 0, *, shield: bool = True, words: list[str] | None = None
) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of one rank, and the verdicts that it wrote."""
    programs = os.environ["PATH"] if shield else str(run.path)  # no `unshare` there
    environment = {
        **os.environ, CHECKPOINT_VARIABLE: str(run.path.parent / "checkpoint-7"), "ORCH_RUN_DIR": str(run.path),
        "ORCH_ATTEMPT": "1", "RANK": str(rank), "PATH": programs,
    }  # fmt: skip
    environment["TMPDIR"] = temporary = tempfile.mkdtemp()
    own = words or [sys.executable, "-c", program]
    done = subprocess.run([sys.executable, str(RESTORE_PROGRAM), *own], env=environment, check=False, timeout=60)
    os.rmdir(temporary)  # nothing is left in it
    path = run.attempt(1).event_file(f"restore-test-{rank:05d}")
    return done.returncode, [event.data for event in read_events(path)[0]] if path.exists() else []


@pytest.mark.parametrize(
    ("code", "verdict"),
    [(0, "RESTORED"), (7, "SUSPECT"), (1, "NOT_COMPARABLE"), (126, "NOT_COMPARABLE"), (255, "NOT_COMPARABLE")],
)
def test_the_exit_code_is_the_verdict(run: RunDir, code: int, verdict: str) -> None:
    exit_code, told = restored(run, f"raise SystemExit({code})")
    assert (exit_code, [one["verdict"] for one in told]) == (code, [verdict])


def test_a_pass_is_told_by_rank_0_and_a_failure_by_any(run: RunDir) -> None:
    assert restored(run, "pass", rank=1) == (0, [])
    code, told = restored(run, "raise SystemExit(7)", rank=1)
    assert (code, told[0]["reason"]) == (7, "the program found it bad: exit code 7 of rank 1")


@pytest.mark.parametrize("shield", [True, False])
def test_a_program_that_is_not_there_is_no_verdict(run: RunDir, shield: bool) -> None:
    code, told = restored(run, "", shield=shield, words=["no-such-program"])
    assert (code, [one["verdict"] for one in told]) == (127, ["NOT_COMPARABLE"])
    assert told[0]["reason"] == "exit code 127 of rank 0: no such program (restore_tests.command)"


def test_a_program_that_raises_is_no_verdict(run: RunDir) -> None:
    code, told = restored(run, "import no_such_package")
    assert (code, told[0]["verdict"]) == (1, "NOT_COMPARABLE")
    assert "the program failed: exit code 1 of rank 0 (7 means a bad checkpoint)" in told[0]["reason"]


def test_exit_code_75_says_nothing(run: RunDir) -> None:
    code, told = restored(run, "raise SystemExit(75)")
    assert (code, told[0]["verdict"], told[0]["reason"]) == (75, "NOT_FINISHED", "no result: exit code 75 of rank 0")


def test_a_checkpoint_that_the_run_has_deleted_says_nothing(run: RunDir) -> None:
    shutil.rmtree(run.path.parent / "checkpoint-7")
    code, told = restored(run, "pass")
    assert (code, told[0]["verdict"]) == (75, "NOT_FINISHED")
    assert told[0]["reason"] == f"no result: the run has deleted {run.path.parent / 'checkpoint-7'}"


def test_who_was_killed_says_nothing(run: RunDir) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert restored(run, killed) == (-signal.SIGKILL, [])


WRITES = "open(__import__('os').environ['ORCH_CHECKPOINT'] + '/weights', 'wb').write(b'x')"


def test_a_program_that_writes_is_found_out_where_nothing_keeps_it_from_it(run: RunDir) -> None:
    code, told = restored(run, WRITES, shield=False)
    assert code == 1
    reason = "the checkpoint changed meanwhile: by the program or by a run that writes to it"
    assert (told[0]["verdict"], told[0]["reason"]) == ("NOT_COMPARABLE", reason)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_where_it_cannot_have_been_the_program_nothing_is_known(run: RunDir, tmp_path: Path) -> None:
    if not restore_program.can_shield(tmp_path / "checkpoint-7"):
        pytest.skip("no namespace of one's own here")
    # A training that goes on writes beside the mount, once the program has begun.
    waits = "import os, pathlib, time; place = pathlib.Path(os.environ['ORCH_RUN_DIR']); (place / 'begun').touch()"
    waits += "\nwhile not (place / 'go').exists(): time.sleep(0.01)"
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(restored, run, waits)
        while not (run.path / "begun").exists() and not done.done():
            time.sleep(0.01)
        (tmp_path / "checkpoint-7" / "weights").write_bytes(b"x")
        (run.path / "go").touch()
        code, told = done.result()
        assert (code, told[0]["verdict"]) == (75, "NOT_FINISHED")
