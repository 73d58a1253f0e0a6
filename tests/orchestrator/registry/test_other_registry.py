"""Two registries that have the same run: the one whose attempts the other does not know goes on with it."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.registry.backup import backup
from orchestrator.registry.records import Lease
from orchestrator.registry.run_record import RunRecord
from orchestrator.registry.store import Store
from orchestrator.registry_rebuild.rebuild import rebuild
from orchestrator.run_dirs.other_registry import OtherRegistry, find_other_registry
from orchestrator.states import AttemptState, RunState
from tests.orchestrator.registry.test_rebuild import begin, live_through_two_attempts, lose
from tests.orchestrator.registry.test_rebuild_while_served import serve
from trainer.protocol.run_dir import RunDir

Desk = Any


@pytest.fixture
def run(desk: Desk) -> RunDir:
    """A run that was cancelled after its first attempt, by the registry of the desk."""
    folder = begin(desk)
    desk.store.move_attempt(folder.name, 1, AttemptState.SUBMITTED, "job 7", **desk.stamp, job_id="7")
    desk.store.move_attempt(folder.name, 1, AttemptState.ENDED, "cancelled", **desk.stamp)
    desk.store.move_run(folder.name, RunState.CANCELLED, "cancelled", **desk.stamp)
    return folder


@pytest.fixture
def second(desk: Desk, run: RunDir, tmp_path: Path) -> Iterator[Store]:
    """Another registry, rebuilt from the run's folder."""
    path = tmp_path / "second" / "registry.db"
    path.parent.mkdir()
    assert rebuild(path, [desk.root]) == 1
    with Store.open(path) as store:
        yield store


def go_on(store: Store, run: str) -> dict[str, Any]:
    """Resume the run and begin its next attempt."""
    lease: Lease | None = store.take_lease("there", 20.0, 1e9)
    assert lease is not None
    stamp = {"epoch": lease.epoch, "now": 20.0}
    store.move_run(run, RunState.RECOVERING, "resumed by a person", **stamp)
    attempt = store.add_attempt(run, nonce="bbbbbbbb", excluded=(), **stamp)
    store.move_attempt(run, attempt.number, AttemptState.SUBMITTED, "job 8", **stamp, job_id="8")
    store.drop_lease(lease)
    return stamp


def found(store: Store, run: RunDir) -> OtherRegistry | None:
    return find_other_registry(store.run(run.name), store.attempts(run.name), store.path)


def test_the_registry_with_the_newer_attempts_goes_on_with_the_run(desk: Desk, run: RunDir, second: Store) -> None:
    assert (found(desk.store, run), found(second, run)) == (None, None), "both know all of it"
    go_on(second, run.name)
    other = found(desk.store, run)
    assert other is not None
    assert other.what == (
        f"another registry has continued {run.name}: {second.path} has attempt 2, unknown to {desk.path}"
    )
    assert other.hint.startswith(f"`orch db rebuild --root {desk.root}` imports that")
    assert found(second, run) is None
    desk.store.drop_lease(desk.lease)
    rebuild(desk.path, [desk.root])
    with Store.open(desk.path) as again:
        assert found(again, run) is None


def test_an_attempt_of_the_same_number_and_another_nonce_is_unknown(desk: Desk, run: RunDir, second: Store) -> None:
    go_on(second, run.name)
    desk.store.move_run(run.name, RunState.RECOVERING, "resumed by a person", **desk.stamp)
    desk.store.add_attempt(run.name, nonce="aaaaaaaa", excluded=(), **desk.stamp)
    other = found(desk.store, run)
    assert other is not None
    assert "has attempt 2, unknown" in other.what


def test_a_registry_that_is_behind_leaves_the_record_of_the_other_one(desk: Desk, run: RunDir, second: Store) -> None:
    go_on(second, run.name)
    for state in (RunState.RECOVERING, RunState.HELD) * 4:  # more changes than the other one has
        desk.store.move_run(run.name, state, "of no effect", **desk.stamp)
    assert RunRecord.read(run.record).registry == str(second.path)


def test_a_registry_that_is_ahead_replaces_the_record_whatever_it_left_out(
    desk: Desk, run: RunDir, second: Store
) -> None:
    record = RunRecord.read(run.record)
    run.record.write_bytes(replace(record, changes=1000).encode())
    go_on(second, run.name)
    assert RunRecord.read(run.record).registry == str(second.path)


def test_a_registry_put_back_from_its_own_backup_goes_on(desk: Desk, run: RunDir) -> None:
    copy, link = desk.folder / "copy.db", desk.folder / "link.db"
    desk.store.drop_lease(desk.lease)
    backup(desk.path, copy)
    go_on(desk.store, run.name)
    assert len(RunRecord.read(run.record).attempts) == 2
    lose(desk)
    os.rename(copy, desk.path)
    with Store.open(desk.path) as store:
        assert len(store.attempts(run.name)) == 1
        assert found(store, run) is None
        link.symlink_to(desk.path)
        assert find_other_registry(store.run(run.name), store.attempts(run.name), link) is None, "the same file"


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"schema": "orch.record/1"}'])
def test_a_record_that_is_missing_or_damaged_names_no_registry(
    desk: Desk, run: RunDir, second: Store, content: str | None
) -> None:
    go_on(second, run.name)
    run.record.unlink()
    if content is not None:
        run.record.write_text(content)
    assert found(desk.store, run) is None


def test_the_record_of_another_run_names_no_registry(desk: Desk, run: RunDir, second: Store) -> None:
    go_on(second, run.name)
    record = RunRecord.read(run.record)
    strange = replace(record.attempts[0], nonce="99999999")
    run.record.write_bytes(replace(record, attempts=(strange, *record.attempts[1:])).encode())
    assert found(desk.store, run) is None


def test_a_live_run_of_another_registrys_live_controller_is_served_there(
    desk: Desk, run: RunDir, second: Store
) -> None:
    desk.store.move_run(run.name, RunState.RECOVERING, "resumed by a person", **desk.stamp)
    assert found(second, run) is None, "no controller serves it"
    serve(desk)
    other = found(second, run)
    assert other is not None
    assert f"{run.name} is RECOVERING, and the controller of another registry serves it: {desk.path}" in other.what
    assert found(desk.store, run) is None


def test_a_copy_of_the_folder_is_not_served_by_the_registry_of_the_original(
    desk: Desk, run: RunDir, tmp_path: Path
) -> None:
    desk.store.move_run(run.name, RunState.RECOVERING, "resumed by a person", **desk.stamp)
    copy = tmp_path / "copies" / run.name
    shutil.copytree(run.path, copy)
    path = tmp_path / "second" / "registry.db"
    path.parent.mkdir()
    assert rebuild(path, [copy.parent]) == 1
    serve(desk)
    with Store.open(path) as store:
        assert found(store, RunDir(copy)) is None


def test_a_rebuild_writes_no_record_under_the_name_of_its_draft(desk: Desk, run: RunDir, tmp_path: Path) -> None:
    other = live_through_two_attempts(desk)
    shutil.rmtree(other.checkpoints)
    path = tmp_path / "second" / "registry.db"
    path.parent.mkdir()
    rebuild(path, [desk.root])
    assert RunRecord.read(other.record).registry == str(desk.path)


def test_lost_registries_have_no_say(desk: Desk, run: RunDir, second: Store) -> None:
    desk.store.move_run(run.name, RunState.RECOVERING, "resumed by a person", **desk.stamp)
    serve(desk)
    lose(desk)
    assert found(second, run) is None
