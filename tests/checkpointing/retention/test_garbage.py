"""Deletion of checkpoints, and which debris may be deleted."""

import errno
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.format.commit import DELETED, checkpoint_name
from checkpointing.retention.garbage import (
    PINS,
    DebrisFolder,
    DebrisState,
    Pin,
    decide_debris,
    delete,
    delete_debris,
    find_debris,
    pin,
    pinned_names,
    read_pins,
    remove_pin,
    unpin,
)
from checkpointing.storage.backends import LocalStorage, open_storage
from checkpointing.tiers.catalog import Catalog
from tests.checkpointing.fake_storages import Faulty, Recording
from tests.checkpointing.made_checkpoint import FILES, NONCE, make

FILES_AND_MARKERS = len(FILES) + 3  # manifest, COMMIT and the tombstone


def test_the_tombstone_is_written_first_and_removed_last(tmp_path: Path) -> None:
    storage = Recording(tmp_path)
    name = make(storage, 5)
    storage.log.clear()
    assert delete(storage, name, lambda: True)
    assert storage.log[0][:2] == ("publish", f"{name}/{DELETED}")
    assert storage.log[1] == ("delete", f"{name}/COMMIT")
    assert storage.log[-2:] == [("delete", f"{name}/{DELETED}"), ("delete", name)]
    assert not (tmp_path / name).exists()


def test_a_half_deleted_checkpoint_can_be_deleted_again(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name = make(storage, 5)
    (tmp_path / name / "COMMIT").unlink()
    (tmp_path / name / "__0_0.distcp").unlink()
    assert delete(storage, name, lambda: True)
    assert delete(storage, name, lambda: True)
    assert Catalog(tmp_path).names() == []


@pytest.mark.parametrize("answers", range(FILES_AND_MARKERS + 2))
def test_the_fence_is_checked_before_every_action(tmp_path: Path, answers: int) -> None:
    storage = Recording(tmp_path)
    name = make(storage, 5)
    storage.log.clear()
    left = [True] * answers
    done = delete(storage, name, lambda: bool(left) and left.pop())
    needed = FILES_AND_MARKERS + 2  # the tombstone is made and removed; the folder goes at the end
    assert len(storage.log) == min(answers, needed)
    assert done == (answers >= needed)


def test_a_folder_with_foreign_files_is_not_deleted(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name = make(storage, 5)
    (tmp_path / name / "mine").mkdir()
    (tmp_path / name / "mine" / "notes").write_text("keep me")
    with pytest.raises(OSError, match="not empty"):
        delete(storage, name, lambda: True)
    assert (tmp_path / name / "mine" / "notes").read_text() == "keep me"


def half(
    attempt: int, nonce: str = NONCE, step: int = 5, state: DebrisState = DebrisState.HALF_WRITTEN
) -> DebrisFolder:
    return DebrisFolder(name=checkpoint_name(step, attempt, nonce), state=state, bytes=10)


def decided(folder: DebrisFolder, **known: object) -> tuple[bool, str]:
    (verdict,) = decide_debris([folder], **known)
    return verdict.collect, verdict.reason


def test_half_written_checkpoints_are_deleted_by_owner_and_epoch() -> None:
    mine = half(2, "22222222")
    assert decided(mine, owner=(2, "22222222")) == (True, "half-written by this attempt itself")
    assert decided(mine, owner=(3, "33333333"), ended={(2, "22222222")}) == (
        True,
        "half-written by attempt 2 (22222222), which has ended",
    )
    unknown = (False, "half-written by attempt 2 (22222222), which is not known to have ended")
    assert decided(mine) == unknown
    assert decided(mine, owner=(2, "99999999"), ended={(2, "88888888"), (1, "22222222")}) == unknown
    assert decided(mine, inherit=[mine.name]) == (True, "handed over to this attempt, and not committed")
    assert decided(mine, owner=(2, "22222222"), busy=[mine.name]) == (False, "is being written")


def test_any_attempt_finishes_a_deletion_that_was_begun() -> None:
    buried = half(2, "22222222", state=DebrisState.TOMBSTONED)
    assert decided(buried) == (True, "its deletion began but did not finish")
    assert decided(buried, busy=[buried.name])[0] is False


attempt_ids = st.tuples(st.integers(1, 3), st.sampled_from(["aaaaaaaa", "bbbbbbbb"]))


@given(st.lists(attempt_ids, max_size=8), attempt_ids, st.sets(attempt_ids))
def test_half_written_folders_of_others_are_never_touched(found, owner, ended) -> None:
    folders = [half(attempt, nonce, step=at) for at, (attempt, nonce) in enumerate(found)]
    for verdict in decide_debris(folders, owner=owner, ended=ended):
        assert verdict.collect == (verdict.folder.attempt_id == owner or verdict.folder.attempt_id in ended)


def test_debris_is_decided_on_first_and_deleted_as_decided(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    whole = make(storage, 1)
    own, foreign = make(storage, 2), make(storage, 3, attempt=4, nonce="44444444")
    for name in (own, foreign):
        (tmp_path / name / "COMMIT").unlink()
    buried = make(storage, 4, attempt=4, nonce="44444444")
    (tmp_path / buried / DELETED).write_text("")
    (tmp_path / "my-notes").mkdir()
    (tmp_path / "step-5.tmp").mkdir()
    found = find_debris(Catalog(tmp_path))
    assert {folder.name: folder.state for folder in found} == {
        buried: DebrisState.TOMBSTONED,
        foreign: DebrisState.HALF_WRITTEN,
        own: DebrisState.HALF_WRITTEN,
    }
    assert all(folder.bytes >= sum(map(len, FILES.values())) for folder in found)
    verdicts = decide_debris(found, owner=(1, NONCE))
    assert delete_debris(storage, verdicts, lambda: False) == []
    assert delete_debris(storage, verdicts, lambda: True) == [buried, own]
    assert {path.name for path in tmp_path.iterdir()} == {whole, foreign, "my-notes", "step-5.tmp"}


NAME = "step-00000005.001-ab12cd34"


def test_a_pin_reads_back_until_it_is_removed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    assert read_pins(storage) == {}
    pin(storage, NAME, "for the paper", 1234.5)
    assert read_pins(storage) == {NAME: Pin(note="for the paper", pinned_at=1234.5)}
    pin(storage, NAME, "for the talk", 2345.5)
    assert read_pins(storage)[NAME].note == "for the talk"
    assert unpin(storage, NAME)
    assert not unpin(storage, NAME)
    assert pinned_names(storage) == frozenset()


def test_every_holder_has_its_own_pin(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    pin(storage, NAME, "read", 1.0, holder="reader", process="here:1:2")
    pin(storage, NAME, "mine", 2.0)
    pin(storage, NAME, "tested", 3.0, holder="a-test")
    assert read_pins(storage) == {NAME: Pin(note="mine", pinned_at=2.0)}
    remove_pin(storage, NAME, "")
    remove_pin(storage, NAME, "a-test")
    assert read_pins(storage) == {NAME: Pin(note="read", pinned_at=1.0, process="here:1:2")}
    assert pinned_names(storage) == {NAME}
    assert unpin(storage, NAME)
    assert pinned_names(storage) == frozenset()


def test_pins_are_stored_beside_the_checkpoints(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name = make(storage, 5)
    before = storage.list(name)
    pin(storage, name, "", 0.0)
    assert storage.list(name) == before
    assert [entry.name for entry in Catalog(tmp_path).committed_entries()] == [name]


def test_pins_work_on_object_stores() -> None:
    storage = open_storage("memory://pins-of-a-run")
    pin(storage, NAME, "note", 1.0)
    assert pinned_names(storage) == {NAME}
    assert unpin(storage, NAME)
    assert pinned_names(storage) == frozenset()
    fsspec.filesystem("memory").rm("/", recursive=True)


@pytest.mark.parametrize("left", [b"", b"{}", b"[1]", b"\xff\xfe"])
def test_a_damaged_pin_still_pins(tmp_path: Path, left: bytes) -> None:
    storage = LocalStorage(tmp_path)
    pin(storage, NAME, "note", 1.0)
    (tmp_path / PINS / NAME).write_bytes(left)
    assert read_pins(storage) == {NAME: Pin(note="", pinned_at=0.0)}
    assert pinned_names(storage) == {NAME}


def test_unreadable_pins_are_not_treated_as_absent(tmp_path: Path) -> None:
    storage = Faulty(tmp_path, lambda operation, _: errno.EIO if operation.startswith("list") else 0)
    with pytest.raises(OSError, match="Input/output"):
        pinned_names(storage)


def test_only_checkpoints_can_be_pinned(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the name of a checkpoint"):
        pin(LocalStorage(tmp_path), "../elsewhere", "", 0.0)
    assert list(tmp_path.iterdir()) == []
