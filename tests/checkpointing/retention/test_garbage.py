"""How checkpoints go, and which remains may be taken away."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.format.commit import DELETED, checkpoint_name
from checkpointing.retention.garbage import DebrisFolder, DebrisState, decide_debris, delete, delete_debris, find_debris
from checkpointing.storage.backends import LocalStorage
from checkpointing.tiers.catalog import Catalog
from tests.checkpointing.fake_storages import Recording
from tests.checkpointing.made_checkpoint import FILES, NONCE, make

FILES_AND_MARKERS = len(FILES) + 3  # manifest, COMMIT and the tombstone


def test_the_tombstone_comes_first_and_goes_last(tmp_path: Path) -> None:
    storage = Recording(tmp_path)
    name = make(storage, 5)
    storage.log.clear()
    assert delete(storage, name, lambda: True)
    assert storage.log[0][:2] == ("publish", f"{name}/{DELETED}")
    assert storage.log[1] == ("delete", f"{name}/COMMIT")
    assert storage.log[-2:] == [("delete", f"{name}/{DELETED}"), ("delete", name)]
    assert not (tmp_path / name).exists()


def test_deleting_twice_or_half_deleted_is_the_same(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name = make(storage, 5)
    (tmp_path / name / "COMMIT").unlink()
    (tmp_path / name / "__0_0.distcp").unlink()
    assert delete(storage, name, lambda: True)
    assert delete(storage, name, lambda: True)
    assert Catalog(tmp_path).names() == []


@pytest.mark.parametrize("answers", range(FILES_AND_MARKERS + 2))
def test_the_fence_is_asked_before_every_single_act(tmp_path: Path, answers: int) -> None:
    storage = Recording(tmp_path)
    name = make(storage, 5)
    storage.log.clear()
    left = [True] * answers
    done = delete(storage, name, lambda: bool(left) and left.pop())
    needed = FILES_AND_MARKERS + 2  # the tombstone is made and removed; the folder goes at the end
    assert len(storage.log) == min(answers, needed)
    assert done == (answers >= needed)


def test_a_folder_with_something_foreign_in_it_is_not_torn_down(tmp_path: Path) -> None:
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


def test_half_written_ones_go_by_owner_and_epoch() -> None:
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


def test_a_deletion_that_was_begun_is_finished_by_anybody() -> None:
    buried = half(2, "22222222", state=DebrisState.TOMBSTONED)
    assert decided(buried) == (True, "its deletion was begun and not finished")
    assert decided(buried, busy=[buried.name])[0] is False


attempt_ids = st.tuples(st.integers(1, 3), st.sampled_from(["aaaaaaaa", "bbbbbbbb"]))


@given(st.lists(attempt_ids, max_size=8), attempt_ids, st.sets(attempt_ids))
def test_nobody_elses_half_written_folder_is_ever_touched(found, owner, ended) -> None:
    folders = [half(attempt, nonce, step=at) for at, (attempt, nonce) in enumerate(found)]
    for verdict in decide_debris(folders, owner=owner, ended=ended):
        assert verdict.collect == (verdict.folder.attempt_id == owner or verdict.folder.attempt_id in ended)


def test_a_survey_sees_remains_only_and_act_takes_what_was_decided(tmp_path: Path) -> None:
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
