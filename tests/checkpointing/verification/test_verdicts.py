"""Verdicts of verifications: what is stored, and which copies they are about."""

from dataclasses import replace
from pathlib import Path

from checkpointing.event_sink import emit_nothing
from checkpointing.retention.policy import Policy, TierRetention
from checkpointing.storage.backends import LocalStorage
from checkpointing.verification.verdicts import (
    RESTORE_TESTED,
    VERDICTS,
    CopyVerdict,
    forget,
    known_bad,
    newest_restore_tested,
    read_manifest_digest,
    read_verdicts,
    record,
)
from tests.checkpointing.made_checkpoint import OWNER, make, tier_at


def bad(storage: LocalStorage, name: str, place: str) -> CopyVerdict:
    found = read_manifest_digest(storage, name)
    return CopyVerdict(name=name, place=place, manifest=found, ok=False, level=2, at=5.0, reason="digest differs")


def test_only_the_bad_copy_is_condemned(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name, place = make(storage, 10), str(tmp_path)
    record(storage, bad(storage, name, place))
    assert known_bad(storage, place, storage) == {name: "digest differs"}
    assert known_bad(storage, "s3://elsewhere", storage) == {}


def test_a_later_verdict_replaces_the_earlier_one(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    first = bad(storage, make(storage, 10), str(tmp_path))
    record(storage, first)
    record(storage, replace(first, ok=True, at=6.0, reason=""))
    assert [(verdict.ok, verdict.at) for verdict in read_verdicts(storage)] == [(True, 6.0)]
    assert known_bad(storage, str(tmp_path), storage) == {}


def test_a_good_verdict_of_a_lower_level_does_not_replace_one_of_a_higher_level(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    failed = bad(storage, make(storage, 10), str(tmp_path))
    tested = replace(failed, ok=True, level=RESTORE_TESTED, reason="")
    lower, again = replace(tested, level=4, at=6.0), replace(tested, at=7.0)
    remade = replace(lower, manifest="0" * 32)
    for verdict, kept in (
        (tested, tested), (lower, tested), (again, again), (failed, failed), (lower, lower), (tested, tested),
        (remade, remade),
    ):  # fmt: skip
        record(storage, verdict)
        assert read_verdicts(storage) == [kept]


def test_verdicts_on_two_copies_are_independent(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    tested = replace(bad(storage, make(storage, 10), str(tmp_path)), ok=True, level=RESTORE_TESTED)
    record(storage, tested)
    record(storage, other := replace(tested, place="s3://elsewhere", level=2))
    assert sorted(read_verdicts(storage), key=lambda verdict: verdict.level) == [other, tested]


def test_the_newest_checkpoint_that_passed_a_restore_test(tmp_path: Path) -> None:
    """By step, attempt and take, as checkpoints are sorted everywhere; only where its copy is still the same one."""
    storage, place = LocalStorage(tmp_path), str(tmp_path)
    first, second = make(storage, 9), make(storage, 10)
    later, latest = make(storage, 10, attempt=2), make(storage, 11)
    names = {first, second, later, latest}
    for name in (first, second, later):
        record(storage, replace(bad(storage, name, place), ok=True, level=RESTORE_TESTED))
    record(storage, replace(bad(storage, latest, place), ok=True, level=4))

    def newest(among: set[str], where: str = place) -> str | None:
        return newest_restore_tested(read_verdicts(storage), where, storage, among)

    assert newest(names) == later
    assert newest(names - {later}) == second
    assert newest({latest}) is None, "level 4 is no restore test"
    assert newest(names, "s3://elsewhere") is None
    (tmp_path / later / "COMMIT").write_bytes(b"torn")
    assert newest(names) == second
    record(storage, bad(storage, second, place))
    assert newest(names) == first, "a bad verdict takes the good one's place"


def test_a_copy_made_again_is_not_condemned(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name = make(storage, 10)
    record(storage, bad(storage, name, str(tmp_path)))
    for file in (tmp_path / name).iterdir():
        file.unlink()
    make(storage, 10, extra={"other": "bytes"})
    assert known_bad(storage, str(tmp_path), storage) == {}


def test_a_copy_without_a_believable_commit_stays_condemned_until_it_has_one(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name = make(storage, 10)
    good = (tmp_path / name / "COMMIT").read_bytes()
    (tmp_path / name / "COMMIT").write_bytes(b"torn")
    record(storage, bad(storage, name, str(tmp_path)))
    assert list(known_bad(storage, str(tmp_path), storage)) == [name]
    (tmp_path / name / "COMMIT").write_bytes(good)
    assert known_bad(storage, str(tmp_path), storage) == {}


def test_verdicts_on_deleted_checkpoints_are_removed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    names = [make(storage, step) for step in (10, 20)]
    for name in names:
        record(storage, bad(storage, name, str(tmp_path)))
    record(storage, bad(storage, names[0], "s3://elsewhere"))
    forget(storage, str(tmp_path), [names[1]])
    assert {(verdict.name, verdict.place) for verdict in read_verdicts(storage)} == {
        (names[1], str(tmp_path)), (names[0], "s3://elsewhere"),
    }  # fmt: skip


def test_a_damaged_verdict_is_ignored(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name = make(storage, 10)
    record(storage, bad(storage, name, str(tmp_path)))
    for file in (tmp_path / VERDICTS).iterdir():
        file.write_bytes(file.read_bytes().replace(name.encode(), b"../../etc"))
    (tmp_path / VERDICTS / "notes").write_text("[]")
    assert read_verdicts(storage) == []


def test_retention_never_counts_a_condemned_copy_as_a_substitute(tmp_path: Path) -> None:
    """Its sizes are right: only reading every byte finds the damage."""
    storage = LocalStorage(tmp_path)
    names = [make(storage, step) for step in (10, 20, 30, 40)]
    record(storage, bad(storage, names[2], str(tmp_path)))
    place = tier_at(tmp_path)
    TierRetention(place, Policy(keep=2), OWNER, emit_nothing).apply(names[3])
    assert [entry.step for entry in place.catalog.committed_entries()] == [40, 30, 20]
