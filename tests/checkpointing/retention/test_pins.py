"""Checkpoints that somebody wants to keep."""

import errno
from pathlib import Path

import fsspec
import pytest

from checkpointing.retention.garbage import PINS, Pin, pin, pinned_names, read_pins, remove_pin, unpin
from checkpointing.storage.backends import LocalStorage, open_storage
from checkpointing.tiers.catalog import Catalog
from tests.checkpointing.fake_storages import Faulty
from tests.checkpointing.made_checkpoint import make

NAME = "step-00000005.001-ab12cd34"


def test_a_pin_reads_back_until_it_is_taken_out(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    assert read_pins(storage) == {}
    pin(storage, NAME, "for the paper", 1234.5)
    assert read_pins(storage) == {NAME: Pin(note="for the paper", pinned_at=1234.5)}
    pin(storage, NAME, "for the talk", 2345.5)
    assert read_pins(storage)[NAME].note == "for the talk"
    assert unpin(storage, NAME)
    assert not unpin(storage, NAME)
    assert pinned_names(storage) == frozenset()


def test_every_holder_has_a_pin_of_its_own(tmp_path: Path) -> None:
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


def test_pins_lie_beside_the_checkpoints_and_never_in_them(tmp_path: Path) -> None:
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


def test_pins_that_cannot_be_listed_are_not_taken_for_none(tmp_path: Path) -> None:
    storage = Faulty(tmp_path, lambda operation, _: errno.EIO if operation.startswith("list") else 0)
    with pytest.raises(OSError, match="Input/output"):
        pinned_names(storage)


def test_only_checkpoints_are_pinned(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the name of a checkpoint"):
        pin(LocalStorage(tmp_path), "../elsewhere", "", 0.0)
    assert list(tmp_path.iterdir()) == []
