"""Restore tests with a run's own command: what it sees, how it is stopped, and what its steps prove."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.trainer.agent.coordination.test_requests import Desk
from trainer.agent.user_command import trial
from trainer.agent.user_command.checkpoints import find
from trainer.agent.user_command.opened_files import OpenedFiles
from trainer.agent.user_command.private_view import NAMESPACES
from trainer.agent.user_command.restore_program import (
    Report,
    can_unshare,
    delete,
    delete_leftovers,
    find_fault,
    hold,
    judge_trial,
)
from trainer.agent.user_command.restored_states import RestoredRanks, compare_losses
from trainer.agent.user_command.sealing import SealWork
from trainer.agent.user_command.trial import Trial, has_opened, read_trial, trial_file
from trainer.agent.user_command.trial_view import hide_newer, list_tested
from trainer.protocol.command_progress import CommandCheckpointsConfig
from trainer.protocol.restore_test import RestoreTestOrder, own_command, write_order
from trainer.protocol.run_dir import AttemptDir, RunDir

CONFIG = CommandCheckpointsConfig(path="out", pattern="step-*")
ROOT = Path(__file__).resolve().parents[4]


def order(run: Path = Path("/r-1"), step: int = 20) -> RestoreTestOrder:
    return RestoreTestOrder(
        run="r-1", run_dir=str(run), place="", checkpoint=f"step-{step}.ab", step=step, layout="same", steps=3
    )


@pytest.mark.parametrize(
    ("made", "code", "restored", "outcome", "reason"),
    [
        (Trial(steps=4), 0, ((0, 1), ()), "RESTORED", "all 2 ranks that saved have the parameters of step-20"),
        (Trial(steps=4, restored=(20, 20)), 0, ((), ()), "RESTORED", "continued from step 20 and trained 4 steps"),
        (Trial(steps=1, ended=True), 0, ((0,), ()), "RESTORED", "the command trained 1 step, and ended"),
        (
            Trial(steps=4, restored=(0, 0)),
            0,
            ((), ()),
            "NOT_COMPARABLE",
            "nothing shows that it continued from step-20",
        ),
        (Trial(steps=4, restored=(20, 10)), 0, ((), ()), "NOT_COMPARABLE", "nothing shows"),
        (Trial(steps=4, restored=(20, 20)), 0, ((0,), (1,)), "SUSPECT", "the parameters of rank 1 differ"),
        (Trial(steps=4, restored=(20, 20)), 0, ((), (0, 1)), "NOT_COMPARABLE", "the parameters of ranks 0, 1 differ"),
        (Trial(ended=True), 0, ((), ()), "NOT_COMPARABLE", "ended with exit code 0 before its first step"),
        (
            Trial(steps=2, ended=True),
            1,
            ((), ()),
            "NOT_COMPARABLE",
            "failed after 2 steps: exit code 1 of rank 3 (orch logs t-1)",
        ),
        (Trial(steps=2, ended=True), 1, ((0,), ()), "NOT_COMPARABLE", "bit for bit; the command failed after 2 steps"),
        (Trial(ended=True), 127, ((), ()), "NOT_COMPARABLE", "no such program"),
        (Trial(refused="no overlay"), 1, ((), ()), "NOT_COMPARABLE", "not started: no overlay"),
    ],
)
def test_a_verdict_states_what_the_steps_prove(
    made: Trial, code: int, restored: tuple[tuple[int, ...], tuple[int, ...]], outcome: str, reason: str
) -> None:
    ranks = RestoredRanks(agree=restored[0], differ=restored[1])
    report = Report(test="t-1", rank=3, name="step-20", restored=ranks, losses="", opened=True)
    found = judge_trial(made, code, order(), report)
    assert found[0] == outcome
    assert reason in found[1]
    if outcome in ("RESTORED", "SUSPECT"):
        found = judge_trial(made, code, order(), replace(report, opened=False))
        assert found[0] == "NOT_COMPARABLE"
        assert "nothing shows that it loaded step-20: no process has opened its files" in found[1]


def save(folder: Path, *steps: int) -> Path:
    for step in steps:
        (folder / f"step-{step}").mkdir(parents=True)
        (folder / f"step-{step}" / "weights.npy").write_bytes(bytes([step]) * 64)
    return folder


def test_newer_checkpoints_are_hidden_and_pointers_name_the_tested_one(tmp_path: Path) -> None:
    folder = save(tmp_path / "out", 10, 20, 30, 40)
    for step in (10, 20, 30):
        (folder / f"optimizer-{step}.pt").touch()
    (folder / "latest").write_text("step-40\n")
    (folder / "last").symlink_to("step-30")
    (folder / "last_step.txt").write_text("40")
    hide_newer(folder / "step-20", 20, CONFIG)
    assert sorted(os.listdir(folder)) == [
        "last", "last_step.txt", "latest", "optimizer-10.pt", "optimizer-20.pt", "step-10", "step-20",
    ]  # fmt: skip
    assert (folder / "latest").read_text() == "step-20\n"
    assert os.readlink(folder / "last") == "step-20"
    assert (folder / "last_step.txt").read_text() == "20"


def test_where_files_cannot_be_watched_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, run = save(tmp_path / "out", 20), RunDir(tmp_path / "run")
    run.make()
    attempt = run.attempt(1)
    attempt.make()
    write_order(run, asdict(order(run.path)))

    def refuse(files: object) -> None:
        raise OSError(28, "inotify watch limit reached")

    monkeypatch.setattr(trial, "OpenedFiles", refuse)
    monkeypatch.setattr(trial, "_share_cells", list)
    monkeypatch.setattr(trial, "find_config", lambda source: CONFIG)
    monkeypatch.chdir(tmp_path)
    for name, value in {"RUN_DIR": run.path, "ATTEMPT": 1, "CHECKPOINT": folder / "step-20"}.items():
        monkeypatch.setenv(f"ORCH_{name}", str(value))
    assert trial.main(tmp_path, ["false"]) == 1
    refused = read_trial(attempt, 0).refused
    assert refused == "whether it opens step-20 cannot be seen: [Errno 28] inotify watch limit reached"


def test_folders_of_killed_tests_are_deleted_and_those_of_others_kept(tmp_path: Path) -> None:
    for name in ("killed", "lives", "begins"):
        (tmp_path / f"orch-restore-test-{name}" / "0" / "upper").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    os.close(hold(tmp_path / "orch-restore-test-killed"))
    held = hold(tmp_path / "orch-restore-test-lives")
    delete_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["orch-restore-test-begins", "orch-restore-test-lives", "other"]
    os.close(held)


def test_damage_is_found_by_the_seal(tmp_path: Path) -> None:
    folder, run = save(tmp_path / "out", 20), RunDir(tmp_path / "run")
    run.make()
    place = folder / "step-20"
    (place / "optimizer.npy").write_bytes(b"o" * 64)
    SealWork(folder=run.seals, checkpoint=find(folder, CONFIG)[0][0]).run(lambda: None)
    assert find_fault(place, order(run.path)) == ""
    (place / "weights.npy").write_bytes(b"x" * 64)
    assert "weights.npy has other bytes than when it was sealed" in find_fault(place, order(run.path))
    assert find_fault(place, None) == "", "only rank 0 reads the files"
    (place / "optimizer.npy").write_bytes(b"y" * 64)
    assert find_fault(place, order(run.path)) == "", "the run has written all of it again"


def attempt_of(path: Path, rows: Sequence[str] = ()) -> AttemptDir:
    attempt = RunDir(path).attempt(1)
    attempt.make()
    attempt.program_saves(0).write_text("".join(f"{row}\n" for row in rows))
    return attempt


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ({21: 2.5, 22: 2.0}, "; its losses of 2 steps are as in the run"),
        ({21: 2.5}, "; its loss of step 21 is as in the run"),
        ({21: 2.5, 22: 2.25}, "; its loss of step 22 is 2.25, and was 2 in the run"),
        ({31: 2.5}, ""),
    ],
)
def test_losses_are_compared_with_those_after_the_same_save(
    tmp_path: Path, after: dict[int, float], words: str
) -> None:
    def rows(place: str, losses: dict[int, float]) -> list[str]:
        return [f'{{"after": "{place}", "of_step": {step}, "loss": {loss}}}' for step, loss in losses.items()]

    run = attempt_of(
        tmp_path / "run", [*rows("/out/step-20/w.pt", {21: 2.5, 22: 2.0}), *rows("/out/step-30", {31: 9.0})]
    )
    test = attempt_of(tmp_path / "test", rows("/out/step-20", after))
    assert compare_losses(run.run, test, "/out/step-20") == words


def test_the_own_command_begins_after_the_restore_program() -> None:
    place = "/opt/orch/trainer/agent/user_command/restore_program.py"
    assert own_command(("python", place, "--train", "torchrun", "train.py")) == 3
    assert own_command(("python", place, "restore.py", "--train")) == 0
    assert own_command(("python", "train.py", "--train", "x")) == 0


def test_a_test_ends_before_the_last_step_and_a_program_that_does_has_not_finished(tmp_path: Path) -> None:
    place = "/opt/orch/trainer/agent/user_command/restore_program.py"
    for name, command, expected in (
        ("run", ("python", "train.py"), "step 35 of 60"),
        ("test", ("python", place, "--train", "python", "train.py"), ""),
    ):
        (tmp_path / name).mkdir()
        desk = Desk(tmp_path / name, command=command)
        desk.report(step=35, total=60)
        assert desk.state.shortfall() == expected
        desk.events.close()


def test_a_file_that_another_process_opens_is_seen(tmp_path: Path) -> None:
    place = save(tmp_path / "out", 10, 20) / "step-20"
    for step in (10, 20):
        (tmp_path / "out" / f"optimizer-{step}.pt").touch()
    files = list_tested(place, CONFIG)
    assert sorted(file.name for file in files) == ["optimizer-20.pt", "weights.npy"]
    for file in files:
        opened = OpenedFiles(files)
        list_tested(place, CONFIG)
        assert not opened.is_any_opened(), "listed, but not opened"
        subprocess.run(["cat", str(file)], capture_output=True, check=True)
        assert opened.is_any_opened()
        assert opened.is_any_opened()
        opened.close()
    opened = OpenedFiles(files)
    shutil.rmtree(place)
    assert not opened.is_any_opened(), "deleted, but not opened"
    opened.close()


@pytest.mark.parametrize(("opens", "found"), [([], False), ([4], True), ([3, 4], True)])
def test_one_process_of_any_node_must_open_the_checkpoint(tmp_path: Path, opens: list[int], found: bool) -> None:
    attempt = attempt_of(tmp_path / "test")
    for rank in (0, 3, 4):
        trial_file(attempt, rank).write_text(json.dumps(asdict(Trial(steps=4, opened=rank in opens))))
    assert has_opened(attempt) is found


COMMAND = """
import os, subprocess, sys, time
from pathlib import Path
from trainer.protocol.rank_progress.progress import ProgressCell
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
Path("child").write_text(str(child.pid))
cell = ProgressCell(int(sys.argv[1]))
Path("ckpt").read_text()
for step in range(1, int(sys.argv[2]) + 1):
    cell.update(step=step)
"""
PARENT = """
import os, subprocess, sys
from pathlib import Path
from trainer.agent.user_command.opened_files import OpenedFiles
from trainer.agent.user_command.trial import train
from trainer.protocol.rank_progress.progress import ProgressCell
from trainer.protocol.run_dir import RunDir
cell = ProgressCell.create()
os.dup2(cell.descriptor, 0)
command, attempt = [sys.executable, "command.py", "0", sys.argv[1]], RunDir(Path("test")).attempt(1)
sys.exit(train(command, [cell], 3, attempt, OpenedFiles([Path("ckpt")])))
"""


def run_trial(folder: Path, last: int, end: str) -> tuple[int, Trial, Path]:
    """Return the exit code, the result, and the folder in /proc of the process that the command has left behind."""
    attempt = attempt_of(folder / "test")
    (folder / "ckpt").touch()
    (folder / "command.py").write_text(f"{COMMAND}{end}\n")
    environ = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PARENT, str(last)], cwd=folder, env=environ, check=False)
    return done.returncode, read_trial(attempt, 0), Path("/proc", (folder / "child").read_text())


def test_a_command_is_stopped_after_its_steps_with_all_that_it_has_started(tmp_path: Path) -> None:
    code, found, child = run_trial(tmp_path, 4, "time.sleep(600)")
    assert (code, found.steps, found.ended, found.opened) == (0, 4, False, True)
    assert not child.exists()


@pytest.mark.parametrize(("end", "code"), [("sys.exit(5)", 5), ("pass", 0)])
def test_a_command_that_ends_before_reports_its_steps(tmp_path: Path, end: str, code: int) -> None:
    found = run_trial(tmp_path, 2, end)
    assert (found[0], found[1].steps, found[1].ended, found[1].opened) == (code, 2, True, True)
    assert not found[2].exists()


VIEW = """
import json, os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from trainer.agent.user_command.private_view import make_private
work, kept, outside = Path({work!r}), Path({kept!r}), [Path(one) for one in {outside!r}]
os.chdir(work)
scratch = Path({scratch!r})
scratch.mkdir()
make_private(["/", work], work, [kept], scratch)  # / cannot have an overlay
os.chdir(work)
(work / "own.txt").write_text("x")
(work / "old.txt").unlink()
(kept / "report").write_text("x")
try:
    Path("/etc/orch-test").write_text("x")
except OSError as error:
    (kept / "refused").write_text(error.strerror)
visible = [one.exists() for one in outside]
for one in outside:
    one.unlink(missing_ok=True)
    one.parent.mkdir(exist_ok=True)
    one.with_suffix(".new").write_text("x")
seen = [int(name) for name in os.listdir("/proc") if name.isdigit()]
(kept / "seen").write_text(json.dumps([seen, visible, os.readlink("/proc/self/ns/ipc")]))
"""


@pytest.fixture
def outside() -> Iterator[list[Path]]:
    """Files of other programs in folders that all of a node share."""
    found = [Path(tempfile.mkdtemp(prefix="orch-test-", dir=place)) for place in ("/tmp", "/var/tmp", "/dev/shm")]  # noqa: S108
    for one in found:
        (one / "cache").write_text("x")
    yield [one / "cache" for one in found]
    for one in found:
        shutil.rmtree(one)


@pytest.mark.skipif(not can_unshare(NAMESPACES), reason="no user namespaces here")
def test_nothing_outside_a_private_view_is_changed_or_seen(tmp_path: Path, outside: list[Path]) -> None:
    work, kept = tmp_path, tmp_path / "runs"
    kept.mkdir()
    (work / "old.txt").write_text("old")
    scratch = tmp_path.parent / f"{tmp_path.name}-scratch"
    program = VIEW.format(
        root=str(ROOT), work=str(work), kept=str(kept), scratch=str(scratch), outside=list(map(str, outside))
    )
    done = subprocess.run([*NAMESPACES, sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(work)) == ["old.txt", "runs"]
    assert (kept / "report").read_text() == "x"
    assert (kept / "refused").read_text() == "Read-only file system"
    assert [os.listdir(one.parent) for one in outside] == [["cache"]] * 3
    processes, visible, ipc = json.loads((kept / "seen").read_text())
    assert processes == [1], "processes outside have no number in it"
    assert visible == [True, True, False], "/dev/shm begins empty"
    assert ipc != os.readlink("/proc/self/ns/ipc")
    delete(scratch)
    assert not scratch.exists()
