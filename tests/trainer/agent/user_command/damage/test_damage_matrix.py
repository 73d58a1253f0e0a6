"""Ten kinds of damage to the newest checkpoint of each framework: it is refused, and the older complete one is used."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.trainer.agent.user_command.command_attempt import Attempt
from tests.trainer.agent.user_command.damage import save_checkpoints
from trainer.agent.adapters.registry import NAMES
from trainer.agent.fork_server.launch_order import free_port
from trainer.protocol.events import EventKind

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]
INTEROP = Path(__file__).resolve().parents[5] / ".venv" / "interop"


class Layout(NamedTuple):
    """How a framework names its checkpoints."""

    pattern: str
    folder: str = "."
    ranks: int = 1
    needs: str = "torch"
    pointer: str = ""
    adapter: str = ""  # the layout's name if empty


LAYOUTS = {
    "plain": Layout("step_*.pt"),
    "dcp": Layout("step-*", ranks=2),
    "deepspeed": Layout("global_step*", ranks=2, pointer="latest"),
    "megatron": Layout("iter_*", ranks=2, pointer="latest_checkpointed_iteration.txt"),
    "megatron_dist": Layout("iter_*", ranks=2, pointer="latest_checkpointed_iteration.txt", adapter="megatron"),
    "accelerate": Layout("checkpoint_*", folder="checkpoints", needs="accelerate"),
    "hf": Layout("checkpoint-*", needs="transformers"),
    "lightning": Layout("epoch=*-step=*.ckpt", needs="lightning"),
}


class Saved(NamedTuple):
    """A run's folder with three sealed checkpoints."""

    name: str
    root: Path

    @property
    def out(self) -> Path:
        return self.root / "out" / LAYOUTS[self.name].folder

    def path(self, step: int) -> Path:
        config = self.attempt(9).program._checkpoints.config
        (found,) = [entry for entry in self.out.iterdir() if config.parse_step(entry.name) == step]
        return found

    def attempt(self, number: int) -> Attempt:
        layout = LAYOUTS[self.name]
        return Attempt(self.root, number, path=f"out/{layout.folder}", pattern=layout.pattern)

    def files(self, step: int) -> list[Path]:
        path = self.path(step)
        return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]

    def largest(self, step: int) -> Path:
        return max(self.files(step), key=lambda file: (file.stat().st_size, file.name))


def run_program(name: str, out: Path) -> None:
    path = os.pathsep.join([str(INTEROP), os.environ.get("PYTHONPATH", "")])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1")), "PYTHONPATH": path}
    command = [sys.executable, save_checkpoints.__file__, name, str(out)]
    world = LAYOUTS[name].ranks
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]  # fmt: skip
    errors = [rank.communicate(timeout=300)[1].decode() for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), errors


@pytest.fixture(scope="module", params=LAYOUTS)
def base(request, tmp_path_factory) -> Saved:
    name, root = request.param, tmp_path_factory.mktemp(request.param)
    needs = LAYOUTS[name].needs
    if not (INTEROP / needs).is_dir() and importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    (root / "out").mkdir()
    run_program(name, root / "out")
    saved = Saved(name, root)
    attempt = saved.attempt(1)
    adapter = LAYOUTS[name].adapter or name
    row = {"step": 30, "path": str(saved.path(30)), "frameworks": f"torch,{adapter}", "time": time.time()}
    if adapter in NAMES:
        attempt.dir.program_saves(0).write_text(json.dumps(row) + "\n")
    for _ in save_checkpoints.STEPS:
        attempt.stops()
    assert len(attempt.told(EventKind.CHECKPOINT_SEALED)) == 3, f"all are sealed: {attempt.past}"
    return saved


@pytest.fixture
def saved(base: Saved, tmp_path: Path) -> Saved:
    shutil.copytree(base.root, tmp_path / "copy", symlinks=True)
    return Saved(base.name, tmp_path / "copy")


def cut(saved: Saved) -> None:
    file = saved.largest(30)
    os.truncate(file, file.stat().st_size * 2 // 3)


def flip(saved: Saved) -> None:
    data = bytearray(saved.largest(30).read_bytes())
    data[len(data) // 2] ^= 0x10
    saved.largest(30).write_bytes(data)


def zero(saved: Saved) -> None:
    file = saved.largest(30)
    file.write_bytes(bytes(file.stat().st_size))


def missing(saved: Saved) -> None:
    if saved.path(30).is_dir():
        saved.largest(30).unlink()
    else:
        saved.path(30).write_bytes(b"")


def swapped(saved: Saved) -> None:
    """The older file keeps its content elsewhere, so that a complete older checkpoint is left."""
    saved.largest(30).write_bytes(saved.largest(10).read_bytes())


def wrong_rank(saved: Saved) -> None:
    files = saved.files(30) if len(saved.files(30)) > 1 else [saved.path(20), saved.path(30)]
    by_size = sorted(files, key=lambda file: file.stat().st_size)
    by_size[-1].write_bytes(by_size[-2].read_bytes())


def empty_folder(saved: Saved) -> None:
    path = saved.path(30)
    if path.is_dir():
        shutil.rmtree(path)
        path.mkdir()
    else:
        path.write_bytes(b"")


def half_metadata(saved: Saved) -> None:
    by_size = sorted(saved.files(30), key=lambda file: file.stat().st_size)
    small = next((file for file in by_size if file.name == ".metadata" or file.suffix == ".json"), by_size[0])
    os.truncate(small, small.stat().st_size // 2)


DAMAGE: dict[str, Callable[[Saved], None]] = {
    "cut file": cut, "flipped bit": flip, "file of zeros": zero, "missing file": missing,
    "file of another step": swapped, "file of another rank": wrong_rank, "empty folder": empty_folder,
    "half-written metadata": half_metadata,
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_checkpoint_is_refused_and_the_older_one_used(saved: Saved, kind: str) -> None:
    newest = saved.path(30)
    DAMAGE[kind](saved)
    attempt = saved.attempt(2)
    attempt.stops()
    assert attempt.program.resume == str(saved.path(20))
    assert not newest.exists()
    assert [event["step"] for event in attempt.told(EventKind.CHECKPOINT_SET_ASIDE)] == [30]
    if pointer := LAYOUTS[saved.name].pointer:
        assert (saved.out / pointer).read_text() in (saved.path(20).name, "20")


def test_an_extra_partial_checkpoint_is_refused(saved: Saved) -> None:
    """A save that was killed: half of the largest file, and none of those that are written after it."""
    newest = saved.path(30)
    extra = newest.with_name(newest.name.replace("30", "40"))
    if newest.is_dir():
        shutil.copytree(newest, extra)
        last = max((file for file in extra.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
        for file in extra.rglob("*"):
            if file.is_file() and (file.name > last.name or file.name == ".metadata"):
                file.unlink()
    else:
        shutil.copy(newest, extra)
        last = extra
    os.truncate(last, last.stat().st_size // 2)
    attempt = saved.attempt(2)
    attempt.stops()
    assert attempt.program.resume == str(newest)
    assert not extra.exists()


def test_a_pointer_to_a_checkpoint_that_does_not_exist_names_the_newest_one(saved: Saved) -> None:
    pointer, newest = saved.out / (LAYOUTS[saved.name].pointer or "latest"), saved.path(30)
    is_number = pointer.name.endswith(".txt")
    pointer.write_text("40" if is_number else newest.name.replace("30", "40"))
    attempt = saved.attempt(2)
    attempt.stops()
    assert attempt.program.resume == str(newest)
    assert pointer.read_text() == ("30" if is_number else newest.name)


def test_healthy_checkpoints_are_accepted(base: Saved, tmp_path: Path) -> None:
    """Fifteen of each framework: sealed or not, with retention, additions and new times."""
    for number in range(15):
        shutil.copytree(base.root, tmp_path / str(number), symlinks=True)
        saved = Saved(base.name, tmp_path / str(number))
        newest = saved.path(30)
        if number % 3 == 1:
            shutil.rmtree(saved.attempt(9).run.seals)
        if number % 3 == 2:
            oldest = saved.path(10)
            shutil.rmtree(oldest) if oldest.is_dir() else oldest.unlink()
        if number % 2 and newest.is_dir():
            (newest / "notes.txt").write_text("added later")
        for file in saved.files(30):
            os.utime(file, (1e9 + number, 1e9 + number))
        attempt = saved.attempt(2)
        attempt.stops()
        assert attempt.program.resume == str(newest), number
        assert not attempt.told(EventKind.CHECKPOINT_SET_ASIDE), number
