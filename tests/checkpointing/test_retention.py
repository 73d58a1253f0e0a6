"""Which checkpoints may go, and how they go."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.catalog import Catalog, Entry
from checkpointing.retention import FLOOR, delete, surplus
from checkpointing.storage import LocalStorage
from tests.checkpointing.made import make
from tests.checkpointing.storages import Recording


def entry(step: int) -> Entry:
    name = f"step-{step:08d}.001-ab12cd34"
    return Entry(name=name, path=Path(name), step=step, attempt=1, nonce="ab12cd34", bytes=1, committed_at=0.0)


newest_first = st.lists(st.integers(0, 1000), unique=True, max_size=20).map(
    lambda steps: [entry(step) for step in sorted(steps, reverse=True)]
)


@given(newest_first, st.integers(-5, 30), st.data())
def test_the_newest_stay_and_never_fewer_than_two(entries: list[Entry], keep: int, data: st.DataObject) -> None:
    pinned = data.draw(st.sets(st.sampled_from([e.name for e in entries]))) if entries else set()
    gone = surplus(entries, keep, pinned)
    left = [e for e in entries if e not in gone]
    loose = [e for e in left if e.name not in pinned]
    assert not {e.name for e in gone} & pinned
    assert len(loose) == min(max(keep, FLOOR), len([e for e in entries if e.name not in pinned]))
    assert [e.step for e in gone] == sorted(e.step for e in gone), "the oldest goes first"
    assert not gone or max(e.step for e in gone) < min(e.step for e in loose)
    assert surplus(left, keep, pinned) == [], "a second pass finds nothing"


def test_the_oldest_of_four_goes_when_three_are_kept() -> None:
    assert surplus([entry(4), entry(3), entry(2), entry(1)], 3) == [entry(1)]


def test_the_marker_goes_first(tmp_path: Path) -> None:
    storage = Recording(tmp_path)
    name = make(storage, 5)
    storage.log.clear()
    assert delete(storage, name, lambda: True)
    assert storage.log[0] == ("delete", f"{name}/COMMIT")
    assert storage.log[-1] == ("delete", name)
    assert not (tmp_path / name).exists()


def test_deleting_twice_or_half_deleted_is_the_same(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name = make(storage, 5)
    (tmp_path / name / "COMMIT").unlink()
    (tmp_path / name / "__0_0.distcp").unlink()
    assert delete(storage, name, lambda: True)
    assert delete(storage, name, lambda: True)
    assert Catalog(tmp_path).names() == []


@pytest.mark.parametrize("answers", range(6))
def test_the_fence_is_asked_before_every_single_delete(tmp_path: Path, answers: int) -> None:
    storage = Recording(tmp_path)
    name = make(storage, 5)
    storage.log.clear()
    left = [True] * answers
    done = delete(storage, name, lambda: bool(left) and left.pop())
    assert len(storage.log) == min(answers, 6)
    assert done == (answers >= 6)


def test_a_folder_with_something_foreign_in_it_is_not_torn_down(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name = make(storage, 5)
    (tmp_path / name / "mine").mkdir()
    (tmp_path / name / "mine" / "notes").write_text("keep me")
    with pytest.raises(OSError, match="not empty"):
        delete(storage, name, lambda: True)
    assert (tmp_path / name / "mine" / "notes").read_text() == "keep me"
