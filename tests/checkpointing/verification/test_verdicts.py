"""Verdicts of verifications by hand: what is kept of them, and which copies they are about."""

from dataclasses import replace
from pathlib import Path

from checkpointing.event_sink import emit_nothing
from checkpointing.owner import Owner
from checkpointing.retention.policy import Policy, TierRetention
from checkpointing.storage.backends import LocalStorage
from checkpointing.tiers.catalog import Catalog
from checkpointing.tiers.tier import ResolvedTier
from checkpointing.verification.verdicts import VERDICTS, Verdict, forget, known_bad, manifest_of, read_verdicts, record
from tests.checkpointing.made_checkpoint import NONCE, make


def bad(storage: LocalStorage, name: str, place: str) -> Verdict:
    found = manifest_of(storage, name)
    return Verdict(name=name, place=place, manifest=found, ok=False, level=2, at=5.0, reason="digest differs")


def test_a_bad_copy_is_condemned_in_its_place_alone(tmp_path: Path) -> None:
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


def test_a_copy_that_was_made_anew_is_not_condemned(tmp_path: Path) -> None:
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


def test_verdicts_on_what_is_gone_are_taken_away(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    names = [make(storage, step) for step in (10, 20)]
    for name in names:
        record(storage, bad(storage, name, str(tmp_path)))
    record(storage, bad(storage, names[0], "s3://elsewhere"))
    forget(storage, str(tmp_path), [names[1]])
    assert {(verdict.name, verdict.place) for verdict in read_verdicts(storage)} == {
        (names[1], str(tmp_path)), (names[0], "s3://elsewhere"),
    }  # fmt: skip


def test_a_damaged_verdict_is_none(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    name = make(storage, 10)
    record(storage, bad(storage, name, str(tmp_path)))
    for file in (tmp_path / VERDICTS).iterdir():
        file.write_bytes(file.read_bytes().replace(name.encode(), b"../../etc"))
    (tmp_path / VERDICTS / "notes").write_text("[]")
    assert read_verdicts(storage) == []


def test_retention_takes_a_condemned_copy_for_nobody_s_substitute(tmp_path: Path) -> None:
    """Its sizes are right: only whoever read every byte knows."""
    storage = LocalStorage(tmp_path)
    names = [make(storage, step) for step in (10, 20, 30, 40)]
    record(storage, bad(storage, names[2], str(tmp_path)))
    place = ResolvedTier(path=str(tmp_path), storage=storage, catalog=Catalog(tmp_path, storage))
    TierRetention(place, Policy(keep=2), Owner(1, NONCE, (), lambda: True), emit_nothing).apply(names[3])
    assert [entry.step for entry in place.catalog.committed()] == [40, 30, 20]
