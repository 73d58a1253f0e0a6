"""A run of months: its record stays small, and is not written whole with every change."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller import record_writer
from orchestrator.controller.record_writer import RecordWriter
from orchestrator.registry import run_record
from orchestrator.registry.records import Checkpoint
from orchestrator.registry.run_record import RunRecord, load_record, write_record
from orchestrator.registry.store import Store
from orchestrator.run_dirs.bounded_files import DirectFiles
from orchestrator.states import Trust
from tests.scenarios.world import World, training

DELETED_KEPT = 10


@pytest.fixture(autouse=True)
def _few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "DELETED_KEPT", DELETED_KEPT)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def world_of(tmp_path: Path, store: Store) -> World:
    (tmp_path / "runs").mkdir()
    return World(tmp_path / "runs", store=store)


def saved_and_deleted(world: World, count: int) -> None:
    """Checkpoints that retention has deleted, the newest but one excepted; all in one transaction, to save time."""
    world.store.together(lambda: _saved_and_deleted(world, count))


def _saved_and_deleted(world: World, count: int) -> None:
    stamp: dict[str, Any] = {"epoch": world.lease.epoch, "now": world.clock.now}
    for step in range(1, count + 1):
        made = Checkpoint(
            run=world.name, name=f"old-{step:06d}", step=step, attempt=1, trust=Trust.COMMITTED, bytes=7, path="/x",
            committed_at=1.0,
        )  # fmt: skip
        world.store.put_checkpoint(made, epoch=world.lease.epoch)
        if step < count:
            world.store.trust(world.name, made.name, Trust.DELETED, "retention", **stamp)


def test_checkpoints_that_were_deleted_long_ago_leave_the_record(tmp_path: Path) -> None:
    with Store.open(tmp_path / "registry.db") as store:
        world = world_of(tmp_path, store)
        training(world, 4)
        saved_and_deleted(world, DELETED_KEPT + 50)
        record = load_record(store, world.name)
        names = sorted(one.name for one in record.checkpoints if one.name.startswith("old-"))
        assert names[0] == "old-000050"
        assert names[-1] == f"old-{DELETED_KEPT + 50:06d}"
        assert len(names) == DELETED_KEPT + 1
        assert {one.subject for one in record.transitions if one.subject.startswith("old-")} <= set(names)
        assert record.changes == len(store.transitions(world.name)) > len(record.transitions)


def test_an_older_record_never_replaces_a_newer_one_that_has_left_more_out(tmp_path: Path) -> None:
    with Store.open(tmp_path / "registry.db") as store:
        world = world_of(tmp_path, store)
        training(world, 4)
        saved_and_deleted(world, DELETED_KEPT)
        older = load_record(store, world.name)
        saved_and_deleted(world, 2 * DELETED_KEPT)
        newer = load_record(store, world.name)
        assert write_record(world.folder, newer) > 0
        assert write_record(world.folder, older) == 0
        assert RunRecord.read(world.folder.record).changes == newer.changes


def test_a_large_record_is_written_less_often_and_nothing_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(tmp_path / "registry.db") as store:
        world, clock = world_of(tmp_path, store), Clock()
        training(world, 4)
        stamp: dict[str, Any] = {"epoch": world.lease.epoch, "now": world.clock.now}
        store.database.after_commit = records = RecordWriter(store, DirectFiles(), clock)

        def change(reason: str) -> bool:
            """Whether the record tells of a change at once."""
            store.note_run(world.name, reason=reason, **stamp)
            records({world.name})
            return reason in world.folder.record.read_text()

        assert change("small, once")
        assert change("small, twice")
        monkeypatch.setattr(record_writer, "RATE", world.folder.record.stat().st_size / 60.0)  # large: a minute's worth
        assert change("large")
        assert not change("too early")
        clock.now += 30.0
        assert not change("still too early")
        clock.now += 60.0
        records(set())
        assert "still too early" in world.folder.record.read_text()
        assert not change("at the end")
        records.write_owed()
        assert "at the end" in world.folder.record.read_text()
