"""What the catalog lists for which attempt."""

import errno
from pathlib import Path

from checkpointing.format.commit import DELETED
from checkpointing.retention.garbage import find_debris
from checkpointing.storage.backends import LocalStorage
from checkpointing.tiers.catalog import Catalog, Owner
from tests.checkpointing.fake_storages import Faulty
from tests.checkpointing.made_checkpoint import FILES, NONCE, make


def names(entries: list) -> list[str]:
    return [entry.name for entry in entries]


def test_newest_first_by_step_then_attempt_then_take(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    make(storage, 20, attempt=1)
    make(storage, 100, attempt=1)
    make(storage, 100, attempt=2, nonce="ffff0000")
    make(storage, 100, attempt=2, nonce="ffff0000", take=2)
    make(storage, 30, attempt=10, nonce="00000000")
    assert names(Catalog(tmp_path).committed_entries()) == [
        "step-00000100.002-ffff0000-2",
        "step-00000100.002-ffff0000",
        "step-00000100.001-ab12cd34",
        "step-00000030.010-00000000",
        "step-00000020.001-ab12cd34",
    ]


def test_an_entry_says_what_commit_recorded(tmp_path: Path) -> None:
    name = make(LocalStorage(tmp_path), 20, now=1234.5)
    (entry,) = Catalog(tmp_path).committed_entries()
    assert (entry.name, entry.path, entry.step, entry.attempt, entry.nonce) == (name, tmp_path / name, 20, 1, NONCE)
    assert (entry.bytes, entry.committed_at) == (sum(map(len, FILES.values())), 1234.5)


def test_half_written_and_unknown_folders_are_not_listed(tmp_path: Path) -> None:
    name = make(LocalStorage(tmp_path), 20)
    half = make(LocalStorage(tmp_path), 30)
    (tmp_path / half / "COMMIT").unlink()
    (tmp_path / "step-00000040.001-ab12cd34").mkdir()
    (tmp_path / "my-notes").mkdir()
    (tmp_path / "my-notes" / "COMMIT").write_text("mine")
    (tmp_path / "step-00000050.001-ab12cd34").write_text("a file, not a folder")
    assert names(Catalog(tmp_path).committed_entries()) == [name]


def test_no_folder_is_an_empty_catalog(tmp_path: Path) -> None:
    assert Catalog(tmp_path / "nothing").committed_entries() == []


def test_a_damaged_commit_stays_listed_so_that_it_is_reported(tmp_path: Path) -> None:
    name = make(LocalStorage(tmp_path), 20)
    (tmp_path / name / "COMMIT").write_bytes(b"\0" * 10)
    (entry,) = Catalog(tmp_path).committed_entries()
    assert (entry.name, entry.bytes, entry.committed_at) == (name, 0, 0.0)


def test_an_attempt_sees_its_own_and_what_it_may_inherit(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    inherited = make(storage, 10, attempt=1)
    make(storage, 15, attempt=1)  # committed by a zombie after the token of attempt 2 was written
    own = make(storage, 20, attempt=2, nonce="22222222")
    make(storage, 25, attempt=2, nonce="33333333")  # another submission that called itself attempt 2
    catalog = Catalog(tmp_path)
    listed = (inherited, "step-00000099.001-ab12cd34", "../elsewhere")
    assert names(catalog.entries_for_owner(Owner(2, "22222222", listed, lambda: True))) == [own, inherited]


def test_a_checkpoint_with_a_tombstone_is_not_listed_even_while_its_marker_is_seen(tmp_path: Path) -> None:
    name = make(LocalStorage(tmp_path), 20)
    (tmp_path / name / DELETED).write_text("")
    catalog = Catalog(tmp_path)
    assert catalog.committed_entries() == []
    assert catalog.entries_for_owner(Owner(1, NONCE, (name,), lambda: True)) == []
    assert catalog.is_tombstoned(name)


def test_an_unreadable_tombstone_hides_nothing(tmp_path: Path) -> None:
    storage = Faulty(tmp_path)
    name = make(storage, 20)
    storage.broken = lambda act, _: errno.EIO if act == f"open {name}/{DELETED}" else 0
    assert names(Catalog(tmp_path, storage).committed_entries()) == [name]


def test_an_unreadable_marker_is_never_treated_as_debris(tmp_path: Path) -> None:
    storage = Faulty(tmp_path)
    name = make(storage, 20)
    storage.broken = lambda act, _: errno.EIO if act.startswith("open") else 0
    catalog = Catalog(tmp_path, storage)
    assert names(catalog.committed_entries()) == [name]
    assert find_debris(catalog) == []
