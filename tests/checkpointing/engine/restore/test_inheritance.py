"""Names that an attempt inherits: another node has seen them, so a missing one is waited for and reported."""

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing.engine.checkpointer import Checkpointer
from checkpointing.engine.collectives.group import RankGroup
from checkpointing.engine.restore import restorer
from checkpointing.engine.restore.restorer import Restored, RestoreOptions, Restorer
from checkpointing.engine.restore.source import OptionalKeys
from checkpointing.errors import NothingIntact, NothingVerifies, UnreadableNow
from checkpointing.storage.backends import LocalStorage
from checkpointing.tiers.catalog import Catalog, Owner
from checkpointing.tiers.tier import ResolvedTier
from checkpointing.verification.verdicts import CopyVerdict, read_manifest_digest, record
from tests.checkpointing.engine.conftest import Bench, blank, loaded, same, state
from tests.checkpointing.fake_storages import Faulty
from tests.checkpointing.made_checkpoint import OWNER, tier_at


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restorer, "LATE_S", 0.3)
    monkeypatch.setattr(restorer, "_PATIENCE_S", 0.01)


def heir(bench: Bench, *steps: int) -> Checkpointer:
    return bench.checkpointer(attempt=2, nonce="22222222", inherit=tuple(bench.folder(step).name for step in steps))


@pytest.mark.usefixtures("impatient")
def test_a_missing_inherited_checkpoint_is_not_a_fresh_start(bench: Bench) -> None:
    with pytest.raises(NothingVerifies, match="step-00000005.*missing"):
        heir(bench, 5).restore(blank())


@pytest.mark.usefixtures("impatient")
def test_an_optional_checkpoint_may_be_missing(bench: Bench) -> None:
    bench.saved(5, 10)
    names = {step: bench.folder(step).name for step in (5, 10, 15)}
    given = {"attempt": 2, "nonce": "22222222", "inherit": (names[5], names[15], names[10])}
    assert loaded(bench.checkpointer(**given, optional_names=(names[15], names[10])).restore(blank())).step == 10
    (refusal,) = bench.reported("checkpoint.refused")
    assert (refusal["name"], refusal["damaged"]) == (names[15], False)
    for step in (5, 10):
        bench.folder(step).rename(bench.root.parent / f"gone-{step}")
    alone = {**given, "inherit": (names[10],)}
    assert bench.checkpointer(**alone, optional_names=(names[10],)).restore(blank()) is None


def found_corrupt(bench: Bench, step: int, reason: str = "model.half: fingerprint differs") -> None:
    """As a restore test writes it, or `orch ckpt verify`: bytes and digests agree, the values are wrong."""
    storage, name = LocalStorage(bench.root), bench.folder(step).name
    manifest = read_manifest_digest(storage, name)
    found = CopyVerdict(name=name, place=str(bench.root), manifest=manifest, ok=False, level=5, at=1.0, reason=reason)
    record(storage, found)


@pytest.mark.parametrize("own", [True, False])
def test_a_corrupt_checkpoint_is_not_loaded_in_place_or_by_a_later_attempt(bench: Bench, own: bool) -> None:
    bench.saved(5, 10)
    found_corrupt(bench, 10)
    assert loaded((bench.checkpointer() if own else heir(bench, 10, 5)).restore(blank())).step == 5
    (refusal,) = bench.reported("checkpoint.refused")
    assert (refusal["step"], refusal["damaged"]) == (10, True)
    assert refusal["reason"] == "was found CORRUPT: model.half: fingerprint differs"


def test_only_corrupt_checkpoints_are_not_a_fresh_start(bench: Bench) -> None:
    bench.saved(5)
    found_corrupt(bench, 5)
    with pytest.raises(NothingIntact, match="was found CORRUPT: model.half"):
        bench.checkpointer().restore(blank())
    name = bench.folder(5).name
    with pytest.raises(NothingIntact, match="no run resumes from it"):
        bench.checkpointer(attempt=2, nonce="22222222", corrupt=(name,)).restore(blank())


def test_a_checkpoint_saved_again_is_not_corrupt(bench: Bench) -> None:
    bench.saved(5)
    found_corrupt(bench, 5)
    shutil.rmtree(bench.folder(5))
    bench.saved(5)
    assert loaded(bench.checkpointer().restore(blank())).step == 5


def test_a_corrupt_checkpoint_is_not_loaded_from_memory_either(bench: Bench) -> None:
    """A generation that restarts in place has the same state in its arena."""
    made = bench.saved(5, 10)
    found_corrupt(bench, 10)
    target = blank()
    assert loaded(made.restore(target)).step == 5
    assert same(target, state(5))


@pytest.mark.usefixtures("impatient")
def test_a_missing_newer_checkpoint_is_reported_and_the_older_one_restored(bench: Bench) -> None:
    bench.saved(5)
    assert loaded(heir(bench, 10, 5).restore(blank())).step == 5
    (refusal,) = bench.reported("checkpoint.refused")
    assert (refusal["step"], refusal["name"]) == (10, bench.folder(10).name)
    assert "missing" in refusal["reason"]
    assert refusal["damaged"] is False


@pytest.mark.usefixtures("impatient")
def test_misfits_and_read_errors_are_not_reported_as_damage(bench: Bench, monkeypatch: Any) -> None:
    bench.saved(5)
    for target in (
        {**blank(), "model.more": torch.zeros(2)},
        {key: torch.zeros(77) for key in blank()},
        {key: value.to(torch.complex64) for key, value in blank().items()},
    ):
        with pytest.raises(NothingVerifies):
            bench.checkpointer().restore(target)
        assert bench.reported("checkpoint.refused")[-1]["damaged"] is False

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LocalStorage, "open", broken)
    monkeypatch.setattr(Catalog, "is_committed", lambda *_: True)
    with pytest.raises(NothingVerifies, match="Input/output error") as raised:
        bench.checkpointer().restore(blank())
    assert not isinstance(raised.value, NothingIntact), "the disk may answer the next job"
    assert bench.reported("checkpoint.refused")[-1]["damaged"] is False


def test_wrong_bytes_are_reported_as_damage(bench: Bench) -> None:
    bench.saved(5)
    file = bench.folder(5) / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(NothingIntact, match="digest differs"):
        bench.checkpointer().restore(blank())
    assert bench.reported("checkpoint.refused")[-1]["damaged"] is True


def test_a_name_that_comes_late_is_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.saved(5, 10)
    away = bench.folder(10).rename(bench.root.parent / "away")
    monkeypatch.setattr(restorer.time, "sleep", lambda _: away.exists() and away.rename(bench.folder(10)))
    assert loaded(heir(bench, 10, 5).restore(blank())).step == 10
    assert bench.reported("checkpoint.refused") == []


def test_a_missing_older_checkpoint_is_not_reported(bench: Bench) -> None:
    bench.saved(10)
    assert loaded(heir(bench, 10, 5).restore(blank())).step == 10


# ---- several tiers


@pytest.fixture
def two(bench: Bench, tmp_path: Path) -> tuple[ResolvedTier, ResolvedTier]:
    """The same two checkpoints, and a newer one that only the slower tier has."""
    bench.saved(5, 10, 15)
    shutil.copytree(bench.root, tmp_path / "slow")
    shutil.rmtree(bench.folder(15))
    return tier_at(bench.root), tier_at(tmp_path / "slow")


def restore(bench: Bench, tiers: tuple[ResolvedTier, ...], target: dict[str, Any], **options: Any) -> Restored | None:
    emit = lambda kind, data: bench.events.append((kind, data))  # noqa: E731
    made = Restorer(tiers, RankGroup(None), OWNER, emit, options=RestoreOptions(**options))
    return made.run(target, OptionalKeys())


def test_the_newest_of_all_tiers_is_restored_from_the_faster_tier(bench: Bench, two: Any) -> None:
    fast, slow = two
    restored = loaded(restore(bench, two, blank()))
    assert (restored.step, restored.tier) == (15, slow.path)
    shutil.rmtree(Path(slow.path) / bench.folder(15).name)
    restored = loaded(restore(bench, two, blank()))
    assert (restored.step, restored.tier) == (10, fast.path)


def test_a_bad_copy_in_one_tier_is_refused_and_the_other_restored(bench: Bench, two: Any) -> None:
    fast, slow = two
    shutil.rmtree(Path(slow.path) / bench.folder(15).name)
    (bench.folder(10) / "__0_0.distcp").write_bytes(b"rot")
    target = blank()
    restored = loaded(restore(bench, two, target))
    assert (restored.step, restored.tier) == (10, slow.path)
    assert same(target, state(10))
    (refusal,) = bench.reported("checkpoint.refused")
    assert (refusal["step"], refusal["tier"]) == (10, fast.path)
    assert refusal["reason"].startswith("__0_0.distcp: has 3 bytes instead of")


def test_a_suspect_step_is_skipped_in_every_tier_and_reported_once(bench: Bench, two: Any) -> None:
    assert loaded(restore(bench, two, blank(), suspects={15, 10, 99})).step == 5
    assert [reported["step"] for reported in bench.reported("checkpoint.suspect")] == [15, 10]


def failing(place: ResolvedTier, file: str, times: int = 1 << 30) -> ResolvedTier:
    """The tier, in which opening files of one checkpoint fails for the first `times` tries; it can be listed."""
    left = iter(range(times))
    storage = Faulty(
        Path(place.path),
        lambda act, _: errno.EACCES if act.startswith(f"open {file}") and next(left, None) is not None else 0,
    )
    return replace(place, storage=storage)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("file", ["COMMIT", "manifest.json", "__0_0.distcp"])
def test_an_unreadable_newest_checkpoint_is_not_skipped(bench: Bench, file: str) -> None:
    """A store that answers 500 or 403 for a while would cost all steps since the one before."""
    bench.saved(5, 10)
    place = failing(tier_at(bench.root), f"{bench.folder(10).name}/{file}")
    with pytest.raises(
        UnreadableNow, match=r"step-00000010\S* cannot be read, and no older .*Permission denied"
    ) as raised:
        restore(bench, (place,), blank())
    assert str(raised.value).startswith(f"{bench.folder(10)} cannot be read")
    (refusal,) = bench.reported("checkpoint.refused")
    assert (refusal["step"], refusal["damaged"]) == (10, False)
    assert bench.reported("checkpoint.restored") == []


def test_an_unreadable_newest_checkpoint_is_retried(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restorer, "_PATIENCE_S", 0.0)
    bench.saved(5, 10)
    target = blank()
    assert loaded(restore(bench, (failing(tier_at(bench.root), bench.folder(10).name, times=3),), target)).step == 10
    assert same(target, state(10))
    assert bench.reported("checkpoint.refused") == []


def test_another_readable_tier_is_used_immediately(bench: Bench, two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = two
    shutil.copytree(Path(slow.path) / bench.folder(15).name, bench.folder(15))
    monkeypatch.setattr(restorer.time, "sleep", lambda _: pytest.fail("nothing is to be waited for"))
    restored = loaded(restore(bench, (failing(fast, bench.folder(15).name), slow), blank()))
    assert (restored.step, restored.tier) == (15, slow.path)
    (refusal,) = bench.reported("checkpoint.refused")
    assert (refusal["step"], refusal["tier"]) == (15, fast.path)


def test_an_unreadable_checkpoint_on_a_nodes_own_disk_is_skipped(
    bench: Bench, two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = two
    shutil.move(Path(slow.path) / bench.folder(15).name, bench.folder(15))
    monkeypatch.setattr(restorer.time, "sleep", lambda _: pytest.fail("nothing is to be waited for"))
    own = replace(failing(fast, bench.folder(15).name), shared=False)
    assert loaded(restore(bench, (own, slow), blank())).step == 10


@pytest.mark.usefixtures("impatient")
def test_a_damaged_checkpoint_is_skipped(bench: Bench) -> None:
    bench.saved(5, 10)
    (bench.folder(10) / "__0_0.distcp").write_bytes(b"rot")
    assert loaded(restore(bench, (failing(tier_at(bench.root), bench.folder(10).name, times=2),), blank())).step == 5


def closed(place: ResolvedTier) -> ResolvedTier:
    """The same tier, whose folder cannot be listed."""

    def fail(path: str) -> dict[str, int | None]:
        raise OSError(errno.EACCES, "Permission denied")

    storage = LocalStorage(Path(place.path))
    storage.list = fail  # type: ignore[method-assign]
    return replace(place, storage=storage, catalog=Catalog(place.path, storage))


@pytest.mark.usefixtures("impatient")
def test_an_unreadable_tier_does_not_matter_where_another_has_the_newest(bench: Bench) -> None:
    bench.saved(5, 10)
    names = tuple(bench.folder(step).name for step in (10, 5))
    readable = tier_at(bench.root)
    places = (closed(tier_at(bench.root.parent / "scratch")), readable)

    def restored(inherit: tuple[str, ...], optional: tuple[str, ...] = ()) -> Restored | None:
        owner = Owner(attempt=2, nonce="22222222", inherit=inherit, fence=lambda: True)
        options = RestoreOptions(optional_names=optional)
        emit = lambda kind, data: bench.events.append((kind, data))  # noqa: E731
        return Restorer(places, RankGroup(None), owner, emit, options=options).run(blank(), OptionalKeys())

    found = restored(names)
    assert found is not None
    assert found.step == 10
    newer = "step-00000015.001-0badcafe"
    for inherit, optional in (((newer, *names), ()), ((newer, *names), (newer,)), ((), ())):
        with pytest.raises(NothingVerifies, match="Permission denied"):
            restored(inherit, optional)


@pytest.mark.usefixtures("impatient")
def test_a_tier_that_is_not_mounted_on_this_node_repeats_no_steps(bench: Bench) -> None:
    """The controller saw step 10 there; the file system is not mounted on the node of rank 0."""
    bench.saved(5)
    names = tuple(bench.folder(step).name for step in (10, 5))
    far = bench.root.parent / "far"

    def restored() -> Restored | None:
        owner = Owner(attempt=2, nonce="22222222", inherit=names, fence=lambda: True)
        made = Restorer((tier_at(far), tier_at(bench.root)), RankGroup(None), owner, lambda *_: None)
        return made.run(blank(), OptionalKeys())

    with pytest.raises(NothingVerifies, match="step-00000010.*the tier .*/far has no folder on rank 0's node"):
        restored()
    far.mkdir()
    found = restored()
    assert found is not None, "an empty folder: that one was deleted"
    assert found.step == 5
