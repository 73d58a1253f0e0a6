"""Run directories that hang: each costs its own run, once, for a bounded time, and says so."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.durable import NotAFile, read_json
from orchestrator.controller.record_writer import RecordWriter
from orchestrator.registry.store import Store
from orchestrator.run_dirs import bounded_files
from orchestrator.run_dirs.bounded_files import BoundedFiles, RunDirHangs
from orchestrator.states import RunState
from tests.scenarios.world import World, training
from trainer.protocol.events import read_events
from trainer.protocol.heartbeat import Heartbeat


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_files, "PATIENCE", 0.3)
    monkeypatch.setattr(bounded_files, "HURRIED", 0.1)


class Hang:
    """Stands for a dead file server: a system call that comes back when it is mended."""

    def __init__(self) -> None:
        self.mended = threading.Event()

    def __call__(self) -> str:
        self.mended.wait()
        return "late"


@pytest.fixture
def hang() -> Iterator[Hang]:
    made = Hang()
    yield made
    made.mended.set()


def test_what_hangs_is_left_behind_and_waited_for_only_once(hang: Hang) -> None:
    files, folder = BoundedFiles(), Path("/runs/a-1")
    with pytest.raises(RunDirHangs, match=r"the run directory has not answered for 0 s: /runs/a-1"):
        files.call(folder, hang)
    began, ran = time.monotonic(), []
    with pytest.raises(RunDirHangs):
        files.call(folder, lambda: ran.append("overtaken"), 60.0)
    assert time.monotonic() - began < 30.0, "it is not waited for again"
    assert ran == [], "nothing overtakes what has not come back"
    assert files.call(Path("/elsewhere/b-1"), lambda: "fine") == "fine"
    hang.mended.set()
    while files._stuck:
        try:
            assert files.call(folder, lambda: "again") == "again"
        except RunDirHangs:
            time.sleep(0.01)


def test_the_lease_is_looked_after_meanwhile_and_its_loss_ends_the_wait(hang: Hang) -> None:
    class Lost(Exception):
        pass

    def lost() -> None:
        raise Lost

    files, folder = BoundedFiles(lost), Path("/runs/a-1")
    with pytest.raises(Lost):
        files.call(folder, hang, 600.0)
    with pytest.raises(RunDirHangs):
        files.call(folder, lambda: None)


def test_one_file_system_gets_so_many_threads_and_no_more(hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_files, "MOST_STUCK", 3)
    files = BoundedFiles()
    for number in range(20):
        with pytest.raises(RunDirHangs):
            files.call(Path(f"/runs/a-{number}"), hang)
    assert len(files._stuck) == 3
    assert files.call(Path("/dev/shm/b-1"), lambda: "of another file system") == "of another file system"
    hang.mended.set()
    while files._stuck:
        try:
            files.call(Path("/runs/a-19"), lambda: None)
        except RunDirHangs:
            time.sleep(0.01)


def test_what_a_file_raises_is_raised_where_it_is_waited_for() -> None:
    with pytest.raises(PermissionError):
        BoundedFiles().call(Path("/runs/a-1"), lambda: (_ for _ in ()).throw(PermissionError("no")))


def fifo(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(1 << 40)


def deep(path: Path) -> None:
    path.write_text("[" * 200_000)


ODD: dict[Callable[[Path], Any], str] = {
    fifo: "is a FIFO", loop: "symbolic links", device: "is a device", huge: "is larger than", Path.mkdir: "is a folder",
    deep: "is damaged",
}  # fmt: skip


@pytest.mark.parametrize("name", ["heartbeat.json", "outcome.json", "GO", "metrics/steps.jsonl", "events/x.jsonl"])
@pytest.mark.parametrize("odd", ODD)
def test_whatever_stands_in_the_place_of_a_file_costs_at_most_its_own_run(
    tmp_path: Path, odd: Callable[[Path], Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_files, "PATIENCE", 600.0)  # a FIFO would take it all, a busy machine does not
    world = World(tmp_path)
    training(world, 8)
    path = world.folder.attempt(1).path / name
    if path.exists():
        path.unlink()
    odd(path)
    files = world.controller.files = world.controller.actor.files = BoundedFiles()
    report = world.controller.tick(world.lease)
    assert not files._stuck, "it is seen at once for what it is"
    assert report.errors == ()
    if name in ("heartbeat.json", "outcome.json"):
        assert f"{path} " in world.run.reason
        assert ODD[odd] in world.run.reason
        assert world.run.reason.endswith(": remove it")
    assert world.run.state is RunState.RUNNING


def test_a_run_whose_directory_hangs_says_so_and_goes_on_afterwards(tmp_path: Path, hang: Hang) -> None:
    world = World(tmp_path)
    training(world, 8)
    files = world.controller.files = world.controller.actor.files = BoundedFiles()
    with pytest.raises(RunDirHangs):
        files.call(world.folder.path, hang)
    report = world.controller.tick(world.lease)
    assert world.run.reason.startswith(f"the run directory has not answered for 0 s: {world.folder.path}")
    assert report.errors
    hang.mended.set()
    while files._stuck:
        world.controller.tick(world.lease)
    assert world.controller.tick(world.lease).errors == ()
    assert world.run.reason == "job 1 is RUNNING"


def test_a_cancel_needs_no_directory(tmp_path: Path, hang: Hang) -> None:
    world = World(tmp_path)
    training(world, 8)
    files = world.controller.files = world.controller.actor.files = BoundedFiles()
    world.store.add_user_request(world.name, "cancel", {"now": True}, world.clock.now)
    with pytest.raises(RunDirHangs):
        files.call(world.folder.path, hang)
    world.controller.tick(world.lease)
    assert "cancel 1" in world.slurm.calls


def test_the_record_of_a_run_whose_directory_hangs_is_written_later(
    tmp_path: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.controller.record_writer.AGAIN", 0.0)
    with Store.open(tmp_path / "registry.db") as store:
        world = World(tmp_path / "runs", store=store)
        (tmp_path / "runs").mkdir()
        files = BoundedFiles()
        store.database.after_commit = RecordWriter(store, files)
        training(world, 8)
        with pytest.raises(RunDirHangs):
            files.call(world.folder.path, hang)
        world.folder.record.unlink()
        began = time.monotonic()
        stamp = {"epoch": world.lease.epoch, "now": world.clock.now}
        store.move_run(world.name, RunState.RECOVERING, "mended meanwhile", **stamp)
        assert time.monotonic() - began < 30.0
        assert not world.folder.record.exists()
        hang.mended.set()
        while not world.folder.record.exists():
            store.database.after_commit(set())
        assert "mended meanwhile" in world.folder.record.read_text()


def test_files_that_are_none_are_refused_at_once(tmp_path: Path) -> None:
    for odd in (fifo, device, huge):
        path = tmp_path / odd.__name__
        odd(path)
        with pytest.raises(NotAFile):
            Heartbeat.read(path)
    with pytest.raises(NotAFile):
        read_events(tmp_path / "fifo")
    with pytest.raises(NotAFile):
        read_json(tmp_path / "device")
