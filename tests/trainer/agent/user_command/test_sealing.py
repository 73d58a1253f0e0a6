"""Seals of a user's program's checkpoints: what is sealed, what is refused before a start, what is accepted."""

import asyncio
import os
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.agent.user_command.command_attempt import Attempt, names
from trainer.agent.user_command.checkpoints import CommandCheckpoint
from trainer.agent.user_command.sealing import SealWork, Verdict, verify_seal
from trainer.protocol.checkpoint_seal import ChangedMeanwhile, CheckpointSeal, seal_file
from trainer.protocol.events import EventKind
from trainer.protocol.failures.decision import Action


def save(out: Path, step: int, files: tuple[str, ...] = ("weights.bin", "optimizer.bin", "state.json")) -> Path:
    folder = out / f"checkpoint-{step}"
    folder.mkdir()
    for name in files:
        (folder / name).write_bytes(os.fsencode(f"{name} {step:05d} ") * 50)
    return folder


def sealed(tmp_path: Path, out: Path) -> Attempt:
    """An attempt that has saved two steps and was preempted."""
    attempt = Attempt(tmp_path, 1)
    save(out, 10)
    save(out, 20)
    attempt.stops()
    attempt.stops()  # the second seal
    assert {event["step"] for event in attempt.told(EventKind.CHECKPOINT_SEALED)} == {10, 20}
    return attempt


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def swap(one: Path, other: Path) -> None:
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda out: os.truncate(out / "checkpoint-20" / "weights.bin", 100),
    "flipped": lambda out: flip(out / "checkpoint-20" / "weights.bin"),
    "zero": lambda out: (out / "checkpoint-20" / "weights.bin").write_bytes(bytes(900)),
    "missing": lambda out: (out / "checkpoint-20" / "optimizer.bin").unlink(),
    "swapped": lambda out: swap(out / "checkpoint-20" / "weights.bin", out / "checkpoint-10" / "weights.bin"),
    "empty folder": lambda out: [file.unlink() for file in (out / "checkpoint-20").iterdir()],
    "other rank's": lambda out: shutil.copy(
        out / "checkpoint-20" / "optimizer.bin", out / "checkpoint-20" / "weights.bin"
    ),
}


@pytest.mark.parametrize("kind", set(DAMAGE) - {"swapped"})
def test_a_damaged_checkpoint_moves_away_before_the_program_starts(tmp_path: Path, out: Path, kind: str) -> None:
    sealed(tmp_path, out)
    DAMAGE[kind](out)
    second = Attempt(tmp_path, 2)
    second.stops()
    assert names(out) == ["checkpoint-10"]
    assert second.program.resume == str(out / "checkpoint-10")
    (event,) = second.told(EventKind.CHECKPOINT_SET_ASIDE)
    assert event["damaged"]
    assert any(words in event["reason"] for words in ("weights.bin has", "optimizer.bin", "is an empty folder"))
    (good,) = second.told(EventKind.CHECKPOINT_VERIFIED)
    assert good["step"] == 10


def test_a_file_whose_name_is_not_utf_8_is_sealed_and_compared(tmp_path: Path, out: Path) -> None:
    attempt = Attempt(tmp_path, 1)
    for step in (10, 20):
        save(out, step, ("weights.bin", "caf\udce9.bin"))
    attempt.stops()
    attempt.stops()  # the second seal
    assert {event["step"] for event in attempt.told(EventKind.CHECKPOINT_SEALED)} == {10, 20}
    flip(out / "checkpoint-20" / "caf\udce9.bin")
    second = Attempt(tmp_path, 2)
    second.stops()
    assert names(out) == ["checkpoint-10"]
    (event,) = second.told(EventKind.CHECKPOINT_SET_ASIDE)
    assert "caf\\udce9.bin has other bytes than when it was sealed" in event["reason"]


def test_files_swapped_between_two_steps_leave_nothing_to_start_from(tmp_path: Path, out: Path) -> None:
    sealed(tmp_path, out)
    DAMAGE["swapped"](out)
    second = Attempt(tmp_path, 2)
    second.stops()
    assert names(out) == ["checkpoint-10"]
    assert second.program.resume == ""
    assert second.program.unusable == (
        f"{out}/checkpoint-10 does not match its seal: weights.bin has other bytes than when it was sealed. "
        "It is not moved away, because orch finds no complete older one"
    )


def test_a_torn_checkpoint_without_a_seal_moves_away_if_an_older_one_is_sealed(tmp_path: Path, out: Path) -> None:
    sealed(tmp_path, out)
    save(out, 30)
    (out / "checkpoint-30" / "state.json").write_text('{"tor')
    second = Attempt(tmp_path, 2)
    second.stops()
    assert second.program.resume == str(out / "checkpoint-20")
    assert names(out) == ["checkpoint-10", "checkpoint-20"]


def test_a_checkpoint_that_the_program_has_written_again_is_no_damage_although_its_seal_is_old(
    tmp_path: Path, out: Path
) -> None:
    sealed(tmp_path, out)
    seal = CheckpointSeal.read(seal_file(tmp_path / "run-1" / "seals", "checkpoint-20"))
    assert seal is not None
    for file in (out / "checkpoint-20").iterdir():
        file.write_bytes(b"other" * 100)
        os.utime(file, ns=(0, int(seal.sealed_at * 1e9) + 5_000_000_000))
    second = Attempt(tmp_path, 2)
    first = second.run.attempt(1)
    first.heartbeat.touch()
    os.utime(first.heartbeat, ns=(0, int(seal.sealed_at * 1e9) + 6_000_000_000))
    second.stops()
    assert second.program.resume == str(out / "checkpoint-20")
    assert not second.told(EventKind.CHECKPOINT_SET_ASIDE)


def test_what_the_program_changes_itself_is_no_damage(tmp_path: Path, out: Path) -> None:
    attempt = sealed(tmp_path, out)

    def goes_on() -> None:
        shutil.rmtree(out / "checkpoint-10")  # retention
        (out / "checkpoint-20" / "results.txt").write_text("added later")
        save(out, 30)

    def saves_again() -> None:
        shutil.rmtree(out / "checkpoint-30")
        save(out, 30, ("weights.bin", "optimizer.bin"))

    for work in (goes_on, saves_again):
        attempt.restarts = 0
        assert attempt.fails(while_it_ran=work).action is Action.RESTART
    attempt.stops()
    attempt.stops()
    second = Attempt(tmp_path, 2)
    second.stops()
    assert second.program.resume == str(out / "checkpoint-30")
    assert not second.told(EventKind.CHECKPOINT_SET_ASIDE)
    assert not seal_file(second.run.seals, "checkpoint-10").exists()


def test_a_file_that_changes_in_place_while_the_program_runs_is_damage(tmp_path: Path, out: Path) -> None:
    attempt = sealed(tmp_path, out)
    attempt.fails(while_it_ran=lambda: flip(out / "checkpoint-20" / "weights.bin"))
    attempt.stops()
    assert names(out) == ["checkpoint-10"]


def archive(path: Path, content: str) -> None:
    """Write a file in place, as torch.save does."""
    with zipfile.ZipFile(path, "w") as stream:
        stream.writestr("data", content * 100)


def settled(path: Path, step: int, *files: str) -> None:
    """Write archives of a step into a checkpoint, and its settings unless they exist."""
    path.mkdir(exist_ok=True)
    for name in files:
        archive(path / name, f"{name} {step:05d}")
    if not (path / "config.json").exists():
        (path / "config.json").write_text('{"lr": 0.1}')


BOTH = ("model.pt", "optimizer.pt")


def test_a_folder_that_is_saved_again_beside_its_settings_is_sealed_again(tmp_path: Path, out: Path) -> None:
    attempt, path = Attempt(tmp_path, 1), out / "checkpoint-1"
    settled(path, 10, *BOTH)
    attempt.stops()
    attempt.fails(while_it_ran=lambda: settled(path, 20, *BOTH))
    attempt.stops()
    assert len(attempt.told(EventKind.CHECKPOINT_SEALED)) == 2
    second = Attempt(tmp_path, 2)
    second.stops()
    assert (second.program.resume, second.program.unusable) == (str(path), "")


@pytest.mark.parametrize(
    ("files", "late", "verdict"),
    [
        (BOTH, False, Verdict.UNSEALED),
        (BOTH, True, Verdict.DAMAGED),  # by somebody else, after the program
        (("model.pt",), False, Verdict.DAMAGED),  # a mixture of two steps: killed between the two files
    ],
)
def test_a_save_that_a_kill_has_followed_counts_if_it_is_complete(tmp_path, out, files, late, verdict):
    path, seals = out / "checkpoint-20", tmp_path / "seals"
    settled(path, 10, *BOTH)
    assert SealWork(folder=seals, checkpoint=_found(path)).run(bool) is not None
    before = time.time_ns()
    settled(path, 20, *files)
    found = verify_seal(seals, path, program_until=before if late else time.time_ns())
    assert found.verdict is verdict


@pytest.mark.parametrize("ahead", [-90, 20])
def test_the_clock_of_the_file_server_may_differ_from_this_nodes(tmp_path, out, monkeypatch, ahead):
    """The server's clock is the true one here."""
    attempt, path, true = Attempt(tmp_path, 1), out / "checkpoint-1", time.time
    monkeypatch.setattr(time, "time", lambda: true() - ahead)
    monkeypatch.setattr(time, "time_ns", lambda: int((true() - ahead) * 1e9))
    settled(path, 10, *BOTH)
    attempt.stops()
    monkeypatch.setattr(SealWork, "run", lambda work, tick: None)  # the ranks fail before it is sealed again
    attempt.fails(while_it_ran=lambda: settled(path, 20, *BOTH))
    asyncio.run(attempt.program.start_generation(9))
    assert (attempt.program.resume, attempt.program.unusable) == (str(path), "")


@pytest.mark.parametrize("ahead", [-90, 20])
def test_an_earlier_attempt_ended_by_the_clock_of_the_file_server(tmp_path, out, monkeypatch, ahead):
    first, path, true = Attempt(tmp_path, 1), out / "checkpoint-1", time.time
    monkeypatch.setattr(time, "time", lambda: true() - ahead)
    settled(path, 10, *BOTH)
    first.stops()
    settled(path, 20, *BOTH)
    first.dir.heartbeat.touch()  # its last sign of life: the node is lost
    second = Attempt(tmp_path, 2)
    second.stops()
    assert (second.program.resume, second.program.unusable) == (str(path), "")


def test_a_missing_or_harmed_file_is_damage_also_beside_others_that_were_saved_again(tmp_path, out):
    path, seals = out / "checkpoint-20", tmp_path / "seals"
    for harm in (lambda: (path / "optimizer.pt").unlink(), lambda: flip(path / "optimizer.pt")):
        settled(path, 10, *BOTH)
        SealWork(folder=seals, checkpoint=_found(path)).run(bool)
        settled(path, 20, *BOTH)
        harm()
        assert SealWork(folder=seals, checkpoint=_found(path)).run(bool) is None
        assert verify_seal(seals, path, program_until=time.time_ns()).verdict is Verdict.DAMAGED
        shutil.rmtree(path)
        shutil.rmtree(seals)


def _found(path: Path) -> CommandCheckpoint:
    return CommandCheckpoint(step=20, path=path, identity="a", files={})


def made(out: Path, *files: str, step: int = 20) -> CommandCheckpoint:
    path = save(out, step, files)
    return CommandCheckpoint(step=step, path=path, identity="a", files={})


def test_an_interrupted_seal_continues_with_the_files_that_are_left(tmp_path, out, monkeypatch):
    monkeypatch.setattr("trainer.agent.user_command.sealing.DRAFT_SECONDS", 0.0)
    work, ticks = SealWork(folder=tmp_path / "seals", checkpoint=made(out, "a", "b", "c")), []

    def dies() -> None:
        ticks.append(1)
        if len(ticks) == 3:
            raise ChangedMeanwhile

    with pytest.raises(ChangedMeanwhile):
        work.run(dies)
    assert not seal_file(work.folder, "checkpoint-20").exists()
    seal = work.run(lambda: ticks.append(1))
    assert seal is not None
    assert len(ticks) == 4
    assert verify_seal(work.folder, out / "checkpoint-20").verdict is Verdict.VERIFIED
    assert [path.name for path in work.folder.iterdir()] == ["checkpoint-20.json"]


def test_a_checkpoint_that_grows_meanwhile_is_not_sealed(tmp_path: Path, out: Path) -> None:
    one = made(out, "a", "b")
    with pytest.raises(ChangedMeanwhile):
        SealWork(folder=tmp_path, checkpoint=one).run(lambda: (one.path / "c").touch())
    assert CheckpointSeal.read(seal_file(tmp_path, "checkpoint-20")) is None


@pytest.mark.parametrize("harm", [True, False])
def test_a_single_file_that_is_written_again_is_sealed_again_if_its_checksums_agree(tmp_path, out, harm):
    path = out / "step_20.pt"

    def write(content: bytes) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data", content)

    one = CommandCheckpoint(step=20, path=path, identity="a", files={})
    work = SealWork(folder=tmp_path / "seals", checkpoint=one)
    write(b"first" * 100)
    work.run(bool)
    write(b"again" * 100)
    if harm:
        flip(path)
    assert (work.run(bool) is None) is harm
    assert verify_seal(work.folder, path).verdict is (Verdict.DAMAGED if harm else Verdict.VERIFIED)


def test_a_damaged_seal_counts_as_none(tmp_path: Path, out: Path) -> None:
    one = made(out, "a")
    SealWork(folder=tmp_path, checkpoint=one).run(bool)
    path = seal_file(tmp_path, "checkpoint-20")
    path.write_text(path.read_text().replace('"step":20', '"step":21'))
    assert verify_seal(tmp_path, one.path).verdict is Verdict.UNSEALED
