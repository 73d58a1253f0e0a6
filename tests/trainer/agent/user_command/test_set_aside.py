"""Checkpoints of a user's program that are moved away and back, and the files that name the newest one."""

import os
from pathlib import Path

import pytest

from tests.trainer.agent.user_command.test_checkpoints import CONFIG, WHOLE, write
from trainer.agent.user_command.checkpoints import CommandCheckpoint, find
from trainer.agent.user_command.set_aside import find_target, pointers_to, put_back, retarget, set_aside, stale_pointers
from trainer.protocol.command_progress import CommandCheckpointsConfig
from trainer.protocol.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "run-1")
    run.path.parent.mkdir()
    run.make()
    return run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "work" / "out").mkdir(parents=True)
    return tmp_path / "work" / "out"


def place(one: CommandCheckpoint, run: RunDir) -> Path:
    found = find_target(one, run, 2, 3)
    assert found is not None
    return found


def newest(out: Path) -> CommandCheckpoint:
    return find(out, CONFIG)[0][0]


def test_they_are_moved_out_of_the_folder_and_back_with_every_byte(out: Path, run: RunDir) -> None:
    write(out, "checkpoint-9", WHOLE)
    write(out, "checkpoint-10", WHOLE)
    one = newest(out)
    target = place(one, run)
    assert target == out.parent / ".orch-set-aside" / "run-1" / "10.002-003"
    assert set_aside(one, target, CONFIG)
    assert os.listdir(out) == ["checkpoint-9"], "whatever the program looks for there, it does not find it"
    assert {path.name: path.read_bytes() for path in target.iterdir()} == WHOLE
    assert put_back(target, one.path)
    assert newest(out).identity == one.identity
    assert os.listdir(out.parent) == ["out"]


def test_a_folder_behind_a_link_is_moved_beside_the_real_one(out: Path, run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(out)
    write(out, "checkpoint-10", WHOLE)
    assert place(newest(tmp_path / "link"), run).parents[2] == out.parent


def test_where_the_parent_cannot_be_used_the_runs_folder_holds_it(out, run, monkeypatch):
    write(out, "checkpoint-10", WHOLE)
    one, denied = newest(out), [out.parent]
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) not in denied)
    assert place(one, run) == run.path / ".orch-set-aside" / "10.002-003"
    denied.append(run.path)
    assert find_target(one, run, 2, 3) is None


def test_on_another_file_system_there_is_no_place(out: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    write(out, "checkpoint-10", WHOLE)
    one, stat = newest(out), os.stat
    monkeypatch.setattr(os, "stat", lambda path: os.stat_result((0o40755, 1, 0xBAD, *stat(path)[3:])))
    assert find_target(one, run, 2, 3) is None


def test_one_that_is_written_to_is_left_alone(out: Path, run: RunDir) -> None:
    write(out, "checkpoint-10", WHOLE)
    one = newest(out)
    (out / "checkpoint-10" / "late.pt").write_bytes(b"more")
    assert not set_aside(one, place(one, run), CONFIG)
    assert (out / "checkpoint-10").is_dir()


def test_a_name_that_was_taken_meanwhile_is_not_overwritten(out: Path, run: RunDir) -> None:
    write(out, "checkpoint-10", WHOLE)
    one = newest(out)
    target = place(one, run)
    assert set_aside(one, target, CONFIG)
    write(out, "checkpoint-10", {"new.pt": b"x"})
    assert not put_back(target, one.path)
    assert target.is_dir()
    assert (out / "checkpoint-10" / "new.pt").read_bytes() == b"x"


POINTERS = {
    "latest": ("checkpoint-10", "checkpoint-9"),  # DeepSpeed
    "latest_checkpointed_iteration.txt": ("10\n", "9\n"),  # Megatron
    "last_checkpoint": ("/data/out/checkpoint-10\n", "/data/out/checkpoint-9\n"),
    "latest_step.txt": ("00010", "00009"),
}
OTHERS = {
    "latest_loss.txt": "10.5",
    "latest_other": "checkpoint-100",
    "latest_list": "checkpoint-10 checkpoint-9",
    "best": "checkpoint-10",
    "last.ckpt": "x" * 5000,
}


def test_of_numbers_that_name_no_checkpoint_only_megatrons_is_changed_at_a_start(out: Path) -> None:
    write(out, "checkpoint-10", WHOLE)
    numbers = ("latest_checkpointed_iteration.txt", "last_ckpt_epoch.txt", "latest_checkpoint", "checkpoint_last.txt")
    for name in numbers:
        (out / name).write_text("6")
    (out / "latest").write_text("checkpoint-12")
    found = {Path(pointer.path).name: pointer.after for pointer in stale_pointers(newest(out), CONFIG)}
    assert found == {"latest_checkpointed_iteration.txt": "10", "latest": "checkpoint-10"}, "others may be epochs"


def test_files_that_name_it_name_the_older_one_and_nothing_else_changes(out: Path, run: RunDir) -> None:
    for name in ("checkpoint-9", "checkpoint-10"):
        write(out, name, WHOLE)
    for name, (before, _) in POINTERS.items():
        (out / name).write_text(before)
    for name, text in OTHERS.items():
        (out / name).write_text(text)
    (out / "latest_binary").write_bytes(b"\xff\xfe")
    (out / "latest").chmod(0o640)
    (out / "last-link").symlink_to("checkpoint-10")
    one, older = find(out, CONFIG)[0]
    pointers, target = pointers_to(one, older), place(one, run)
    assert {Path(pointer.path).name for pointer in pointers} == {*POINTERS, "last-link"}
    assert set_aside(one, target, CONFIG)
    assert all(retarget(pointer, target) for pointer in pointers)
    assert {name: (out / name).read_text() for name in POINTERS} == {
        name: after for name, (_, after) in POINTERS.items()
    }
    assert {name: (out / name).read_text() for name in OTHERS} == OTHERS
    assert os.readlink(out / "last-link") == "checkpoint-9"
    assert (out / "latest").stat().st_mode & 0o777 == 0o640
    assert not any(retarget(pointer, target) for pointer in pointers), "once is enough"
    assert pointers[0].words == "last-link now names checkpoint-9"
    assert put_back(target, one.path)
    assert all(retarget(pointer, target, back=True) for pointer in pointers)
    assert {name: (out / name).read_text() for name in POINTERS} == {name: text for name, (text, _) in POINTERS.items()}
    assert os.readlink(out / "last-link") == "checkpoint-10"


@pytest.mark.parametrize("name", ["ckpt_latest.pt", "model_last.pt", "current", "best.pt", "resume"])
def test_every_link_to_it_leads_to_the_older_one(out: Path, run: RunDir, name: str) -> None:
    for folder in ("checkpoint-9", "checkpoint-10"):
        write(out, folder, WHOLE)
    elsewhere = out.parent / "other"
    (elsewhere / "checkpoint-10").mkdir(parents=True)
    (out / name).symlink_to(f"../{out.name}/checkpoint-10")
    (out / "pretrained").symlink_to(elsewhere / "checkpoint-10")
    one, older = find(out, CONFIG)[0]
    (pointer,) = pointers_to(one, older)
    assert retarget(pointer, place(one, run))
    assert os.readlink(out / name) == f"../{out.name}/checkpoint-9"


def test_a_file_that_names_the_newest_one_at_the_end_of_its_name_follows(out: Path) -> None:
    for folder in ("checkpoint-9", "checkpoint-10"):
        write(out, folder, WHOLE)
    (out / "model_last.txt").write_text("checkpoint-10")
    (out / "blast.txt").write_text("checkpoint-10")
    one, older = find(out, CONFIG)[0]
    assert [Path(pointer.path).name for pointer in pointers_to(one, older)] == ["model_last.txt"]


def test_where_no_other_is_left_a_file_that_names_it_is_moved_too(out: Path, run: RunDir) -> None:
    write(out, "checkpoint-10", WHOLE)
    (out / "latest").write_text("checkpoint-10")
    one = newest(out)
    (pointer,), target = pointers_to(one, None), place(one, run)
    assert set_aside(one, target, CONFIG)
    assert retarget(pointer, target)
    assert (os.listdir(out), pointer.words) == ([], "latest is moved too")
    assert put_back(target, one.path)
    assert retarget(pointer, target, back=True)
    assert (out / "latest").read_text() == "checkpoint-10"


def test_a_file_that_the_program_has_written_since_stays(out: Path, run: RunDir) -> None:
    for name in ("checkpoint-9", "checkpoint-10"):
        write(out, name, WHOLE)
    (out / "latest").write_text("checkpoint-10")
    one, older = find(out, CONFIG)[0]
    (pointer,) = pointers_to(one, older)
    (out / "latest").write_text("checkpoint-11")
    assert not retarget(pointer, place(one, run))
    assert (out / "latest").read_text() == "checkpoint-11"


RANKS = CommandCheckpointsConfig(pattern="ep*-ba*-rank0.pt")


def save_ranks(out: Path, epoch: int, step: int) -> None:
    """As composer does: each rank has a file and a link to its newest one."""
    for rank in (0, 1):
        name = f"ep{epoch}-ba{step}-rank{rank}.pt"
        (out / name).write_text(name)
        (out / f"latest-rank{rank}.pt").unlink(missing_ok=True)
        (out / f"latest-rank{rank}.pt").symlink_to(name)


def test_the_files_of_all_ranks_move_together_and_each_link_follows(out: Path, run: RunDir) -> None:
    save_ranks(out, 0, 20)
    save_ranks(out, 1, 30)
    before = sorted(os.listdir(out))
    one, older = find(out, RANKS)[0]
    pointers, target = pointers_to(one, older), place(one, run)
    assert set_aside(one, target, RANKS)
    assert all([retarget(pointer, target) for pointer in pointers])
    assert sorted(os.listdir(out)) == ["ep0-ba20-rank0.pt", "ep0-ba20-rank1.pt", "latest-rank0.pt", "latest-rank1.pt"]
    for rank in (0, 1):
        assert (out / f"latest-rank{rank}.pt").read_text() == f"ep0-ba20-rank{rank}.pt"
    assert put_back(target, one.path, one.siblings)
    assert all([retarget(pointer, target, back=True) for pointer in pointers])
    assert (sorted(os.listdir(out)), os.listdir(out.parent)) == (before, ["out"])
    assert [(out / f"latest-rank{rank}.pt").read_text() for rank in (0, 1)] == [one.path.name, *one.siblings]


def test_all_of_it_is_moved_or_nothing(out: Path, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    save_ranks(out, 0, 20)
    save_ranks(out, 0, 30)
    before = sorted(os.listdir(out))
    one, rename = find(out, RANKS)[0][0], os.rename

    def refuse(source: Path, target: Path) -> None:
        if Path(source) == out / "ep0-ba30-rank1.pt":
            raise PermissionError
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.rename", refuse)
        assert not set_aside(one, place(one, run), RANKS)
    assert sorted(os.listdir(out)) == before
    (out / "ep0-ba30-rank2.pt").write_text("another rank, since it was looked at")
    assert not set_aside(one, place(one, run), RANKS)
    (out / "ep0-ba30-rank2.pt").unlink()
    target = place(one, run)
    assert set_aside(one, target, RANKS)
    (out / "ep0-ba30-rank1.pt").write_text("new")
    assert not put_back(target, one.path, one.siblings)
    assert (out / "ep0-ba30-rank1.pt").read_text() == "new"


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_link_of_a_rank_that_the_older_one_does_not_have_stops_it(out: Path, epoch: int) -> None:
    save_ranks(out, 0, 20)
    save_ranks(out, epoch, 30)
    (out / "ep0-ba20-rank1.pt").unlink()
    one, older = find(out, RANKS)[0]
    with pytest.raises(LookupError, match=f"has no counterpart of ep{epoch}-ba30-rank1"):
        pointers_to(one, older)
