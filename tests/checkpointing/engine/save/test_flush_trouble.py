"""Failures of one tier do not affect others: damage, full and hung disks, revoked attempts, refused checkpoints."""

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpointing.engine.collectives.group import Failed
from checkpointing.engine.save import flusher, transfer
from checkpointing.engine.save.transfer import (
    BoundedTier,
    FlushState,
    Route,
    TierTransfer,
    TransferTimeouts,
)
from checkpointing.format.manifest import FileEntry, parse
from checkpointing.tiers.catalog import Catalog, DistrustedCheckpoints
from tests.checkpointing.engine.thread_ranks import together
from tests.checkpointing.engine.tier_set import FOUR, SECONDS, Tiers, no_waiting_for_disks, tiers, tiers_of
from tests.checkpointing.fake_storages import full_after
from tests.checkpointing.made_checkpoint import make

__all__ = ["no_waiting_for_disks", "tiers"]

pytestmark = pytest.mark.usefixtures("no_waiting_for_disks")


def test_a_bad_source_is_reported_with_its_chunk_and_never_copied(tiers: Tiers) -> None:
    old = make(tiers.storages["fast"], 10)
    made = make(tiers.storages["fast"], 20)
    (tiers.root / "fast" / made / "__0_0.distcp").write_bytes(b"x" * 999 + b"y")
    tiers.start()
    tiers.idle()
    reported = tiers.wait_for("checkpoint.failed")
    assert "the source is damaged: __0_0.distcp chunk 0: digest differs" in reported["reason"]
    assert reported["tier"] == str(tiers.root / "slow")
    assert tiers.steps("slow") == []
    assert tiers.drain(), "the next older one is good"
    assert Catalog(tiers.root / "slow").names()[-1] == old
    assert tiers.steps("slow") == [10]


def test_a_source_with_a_damaged_manifest_is_reported_and_the_next_older_one_copied(tiers: Tiers) -> None:
    make(tiers.storages["fast"], 10)
    made = make(tiers.storages["fast"], 20)
    (tiers.root / "fast" / made / "manifest.json").write_bytes(b"torn")
    tiers.start()
    assert tiers.wait_for("checkpoint.failed")["reason"].endswith(
        "the source is damaged: manifest.json: does not match the digest in COMMIT"
    )
    assert tiers.drain()
    assert tiers.steps("slow") == [10]


def test_a_full_tier_is_reported_and_the_next_commit_tries_again(tiers: Tiers) -> None:
    tiers.storages["slow"].broken = full_after(100)
    tiers.start()
    tiers.commit(10)
    assert "disk full" in tiers.wait_for("checkpoint.failed")["reason"]
    tiers.idle()
    tiers.storages["slow"].broken = lambda operation, written: 0
    tiers.commit(20)
    assert tiers.drain()
    assert tiers.steps("slow") == [20]


def test_a_tier_that_cannot_be_listed_leaves_the_others_alone(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, "fast", "slow", "far")
    tiers.storages["slow"].broken = lambda operation, _: errno.EIO if operation.startswith("list") else 0
    tiers.start()
    tiers.commit(10)
    tiers.idle()
    assert tiers.steps("far") == [10]
    reported = tiers.wait_for("checkpoint.failed")
    assert reported["tier"] == str(tmp_path / "slow")
    assert "Errno None" not in reported["reason"]
    assert not tiers.drain(0.3), "the slow tier has not received it"
    tiers.close()


@pytest.mark.parametrize("size", [1, 2])
def test_a_tier_that_fails_at_the_end_is_tried_again_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Credentials that were renewed a minute late: the run would end without its last checkpoint there."""
    monkeypatch.setattr(flusher, "_RETRY_SECONDS", 0.0)
    tiers = tiers_of(tmp_path, size=size)
    tiers.start()
    left = iter(range(4))
    tiers.storages["slow"].broken = lambda operation, _: (
        errno.EACCES if operation.startswith("create") and next(left, None) is not None else 0
    )
    tiers.commit(10, files=FOUR)
    assert tiers.drain()
    assert tiers.steps("slow") == [10]
    assert next(left, None) is None, "all of them have failed"
    assert tiers.kinds()[-1] == "checkpoint.flushed"
    tiers.close()


def test_a_failure_that_stays_is_reported_once_and_waited_for_as_long_as_there_is_time(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(flusher, "_POLL_SECONDS", 0.02)
    tries: list[str] = []

    def broken(operation: str, _: int) -> int:
        tries.append(operation)
        return errno.EACCES

    tiers.start()
    tiers.storages["slow"].broken = broken
    tiers.commit(10)
    tiers.idle()
    patience = iter([5.0] * 3)
    tries.clear()
    assert not tiers.flushers[0].drain(lambda: next(patience, -1.0))
    assert len(tries) > 1, "it was tried again"
    assert tiers.kinds() == ["checkpoint.failed"]


def test_a_copy_that_is_there_after_all_ends_the_report_of_its_failure(tiers: Tiers) -> None:
    tiers.start()
    tiers.commit(10)
    tiers.idle()
    tiers.storages["slow"].broken = lambda operation, _: errno.EIO
    for one in tiers.flushers:
        one.record_commit(tiers.flushers[0]._state.latest or "")
    tiers.wait_for("checkpoint.failed")
    tiers.idle()
    tiers.storages["slow"].broken = lambda operation, _: 0
    assert tiers.drain()
    kind, data = tiers.reported[-1]
    assert (kind, data["step"], data["bytes"]) == ("checkpoint.flushed", 10, 0)


@pytest.mark.parametrize("operation", ["list", "create", "write", "publish", "delete"])
def test_a_hung_tier_is_reported_and_delays_nothing(tmp_path: Path, operation: str) -> None:
    tiers = tiers_of(tmp_path, "fast", "slow", "far", slow={"keep": 2})
    hung, slow = threading.Event(), tiers.storages["slow"]
    for step in (1, 2):
        make(slow, step)
    slow.hung = lambda met: hung.is_set() and met.startswith(operation)
    tiers.start(timeouts=TransferTimeouts(access=0.3, copy=0.3, look=0.02))
    tiers.idle()
    hung.set()
    start = time.monotonic()
    tiers.commit(10)
    assert time.monotonic() - start < 0.2, "telling the flusher does not wait for it"
    tiers.idle()
    assert tiers.steps("far")[0] == 10, "the other tier goes on"
    if operation != "delete":  # retention's own trouble is no flush's
        assert tiers.wait_for("checkpoint.stuck")["tier"] == str(tmp_path / "slow")
    tiers.commit(20)
    tiers.idle()
    assert tiers.steps("far")[0] == 20
    hung.clear()
    slow.healed.set()
    deadline = time.monotonic() + SECONDS
    while tiers.steps("slow")[0] != 30 and time.monotonic() < deadline:
        tiers.commit(30) if 30 not in tiers.steps("fast") else tiers.flushers[0].drain(SECONDS)
    assert tiers.steps("slow")[0] == 30, "once it answers again, it is used again"
    tiers.close()


def test_a_copy_that_takes_too_long_is_reported_while_it_runs(tiers: Tiers) -> None:
    tiers.storages["slow"].hung = lambda met: met.startswith("write")
    tiers.start(timeouts=TransferTimeouts(access=0.05, look=0.02))
    tiers.commit(10)
    reported = tiers.wait_for("checkpoint.stuck")
    assert (reported["tier"], reported["step"]) == (str(tiers.root / "slow"), 10)
    assert reported["reason"].endswith("still under way (rank 0)")
    time.sleep(0.1)
    assert tiers.kinds().count("checkpoint.stuck") == 1, "once is enough"
    tiers.storages["slow"].healed.set()
    tiers.idle()
    assert tiers.steps("slow") == [10], "it was waited for all the same"


def test_a_tier_that_was_stuck_is_served_after_the_others(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, "fast", "slow", "far", size=2)
    slow = tiers.storages["slow"]
    slow.hung = lambda met: met.startswith("write") and not slow.healed.is_set()
    tiers.start(timeouts=TransferTimeouts(access=SECONDS, copy=0.1, look=0.02))
    tiers.commit(10)
    tiers.wait_for("checkpoint.stuck")
    tiers.idle()
    slow.healed.set()
    deadline = time.monotonic() + SECONDS
    while any(flusher._tiers[1].stuck for flusher in tiers.flushers) and time.monotonic() < deadline:
        time.sleep(0.002)
    for step, order in ((20, ["far", "far", "slow", "slow"]), (30, ["slow", "slow", "far", "far"])):
        made = tiers.commit(step)
        tiers.idle()
        assert [Path(each.target).name for each in tiers.writer.orders if each.folder == made] == order
    tiers.close()


def test_a_hung_tier_does_not_hold_up_the_end(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path)
    tiers.storages["slow"].hung = lambda met: met.startswith("write")
    tiers.start()
    tiers.commit(10)
    assert tiers.storages["slow"].met.wait(SECONDS)
    start = time.monotonic()
    assert not tiers.drain(0.1)
    together([flusher.close for flusher in tiers.flushers])
    assert time.monotonic() - start < 5.0
    tiers.close()


def test_an_end_that_cannot_wait_for_a_tier_says_so(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, "fast", "slow", "far", size=2)
    tiers.storages["far"].hung = lambda met: met.startswith("write")
    tiers.start()
    tiers.commit(10, files=FOUR)
    assert tiers.storages["far"].met.wait(SECONDS)
    patience = iter([5.0, 0.01])
    results = together(
        [lambda: tiers.flushers[0].drain(lambda: next(patience, -1.0)) or tiers.flushers[0].close(),
         lambda: tiers.flushers[1].drain(0.0)]
    )  # fmt: skip
    assert results == [None, False], "only the time of rank 0 counts, and it takes the others along"
    (reported,) = [data for kind, data in tiers.reported if kind == "checkpoint.failed"]
    assert (reported["step"], reported["tier"]) == (10, str(tmp_path / "far"))
    assert f"no time left to copy it from {tmp_path / 'fast'}" in reported["reason"]
    assert tiers.steps("slow") == [10]
    tiers.close()


def test_a_revoked_attempt_copies_nothing(tiers: Tiers) -> None:
    make(tiers.storages["fast"], 10)
    tiers.alive = False
    tiers.start()
    tiers.idle()
    assert tiers.steps("slow") == []
    assert tiers.writer.orders == []


def test_an_attempt_that_is_revoked_while_it_copies_does_not_commit(tiers: Tiers) -> None:
    def revoke(order: object) -> None:
        tiers.alive = False

    tiers.writer.before = revoke
    tiers.start()
    tiers.commit(10)
    assert "fenced off" in tiers.wait_for("checkpoint.failed")["reason"]
    assert tiers.steps("slow") == []


@pytest.mark.parametrize("lost", [os.unlink, lambda path: path.write_bytes(b"short")], ids=["gone", "short"])
def test_a_copy_that_lost_a_file_on_the_way_is_not_sealed(tiers: Tiers, lost: Callable[[Path], object]) -> None:
    slow = tiers.storages["slow"]

    def lose(operation: str, written: int) -> int:
        for path in slow.root.glob("*/__0_0.distcp"):
            if operation.startswith("list"):
                lost(path)
        return 0

    tiers.start(timeouts=TransferTimeouts(look=0.02, late=0.1))
    slow.broken = lose
    tiers.commit(10)
    assert "__0_0.distcp is missing" in tiers.wait_for("checkpoint.failed")["reason"]
    assert tiers.steps("slow") == []


def refused(tier: Path, name: str) -> DistrustedCheckpoints:
    distrusted = DistrustedCheckpoints()
    distrusted.refuse(str(tier), name)
    return distrusted


def test_refused_checkpoints_are_not_copied(tiers: Tiers) -> None:
    make(tiers.storages["fast"], 10)
    suspect = make(tiers.storages["fast"], 20)
    tiers.start(distrusted=refused(tiers.root / "fast", suspect))
    tiers.idle()
    assert tiers.steps("slow") == [10]


def test_a_checkpoint_refused_in_one_tier_is_copied_from_another(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, "fast", "slow", "far")
    for tier in ("fast", "slow"):
        made = make(tiers.storages[tier], 20)
    tiers.start(distrusted=refused(tmp_path / "fast", made))
    tiers.idle()
    assert tiers.steps("far") == [20]
    assert {order.source for order in tiers.writer.orders} == {str(tmp_path / "slow")}
    tiers.close()


def test_a_source_that_is_bad_in_one_tier_is_read_from_another(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, "fast", "slow", "far")
    for tier in ("fast", "slow"):
        made = make(tiers.storages[tier], 20)
    (tmp_path / "fast" / made / "__0_0.distcp").write_bytes(b"x" * 999 + b"y")
    tiers.start()
    tiers.idle()
    assert tiers.drain()
    assert tiers.steps("far") == [20]
    tiers.close()


def test_a_single_tier_needs_no_flusher(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, "fast")
    before = threading.active_count()
    tiers.start()
    assert threading.active_count() == before
    tiers.commit(10)
    assert tiers.drain(0.0)
    tiers.close()
    assert tiers.flushers[0]._ranks.closed


# ---- what is waited for, and what is reported


def test_a_file_that_is_visible_late_is_waited_for(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_POLL_SECONDS", 0.0)
    slow, looks = tiers.storages["slow"], list[str]()
    real = slow.list

    def late(path: str) -> dict[str, int | None]:
        found = real(path)
        if path and tiers.writer.orders:
            looks.append(path)
            found = found if len(looks) > 3 else {**found, "__0_0.distcp": 1}
        return found

    tiers.start()
    monkeypatch.setattr(slow, "list", late)
    tiers.commit(10)
    assert tiers.drain()
    assert tiers.kinds() == ["checkpoint.flushed"]


def test_an_access_error_is_not_a_hung_tier(tiers: Tiers) -> None:
    bounded = BoundedTier(tiers.place("slow"), SECONDS)

    def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        bounded.run(fail)
    assert not bounded.stuck


def test_a_failure_that_an_arrival_has_ended_is_not_reported_as_ended_again(tiers: Tiers) -> None:
    reported: list[str] = []
    state = FlushState(lambda kind, _: reported.append(kind))
    place, name = tiers.place("slow"), make(tiers.storages["fast"], 10)
    state.latest = name
    manifest = parse((tiers.root / "fast" / name / "manifest.json").read_bytes())
    state.report_failure(place, Failed("disk full"))
    state.report_arrival(place, manifest, 1.0)
    state.report_presence(place)
    assert reported == ["checkpoint.failed", "checkpoint.flushed"]


@pytest.mark.parametrize(
    ("bandwidth", "patience", "usual"), [(0.0, 25.0, 3.125), (4.0, 50.0, 50.0), (32.0, 25.0, 6.25)]
)
def test_the_time_for_a_copy_is_that_of_a_slow_disk_or_of_its_limit(
    tiers: Tiers, bandwidth: float, patience: float, usual: float
) -> None:
    """For 100 MiB: the limit is the time at 4 MiB/s; copies slower than 32 MiB/s are reported."""
    limits = TransferTimeouts()
    assert (limits.access, limits.copy, limits.late) == (120.0, 300.0, 30.0)
    place = replace(tiers.place("slow"), bandwidth=bandwidth)
    unused: Any = None
    made = TierTransfer([BoundedTier(place, 1.0)], unused, unused, unused, limits, unused)
    route, size = Route(0, 0, unused), 100 << 20
    files = tuple(FileEntry(name=name, size=size // 2, chunks=("0" * 32,) * 7) for name in ("a", "b"))
    assert made._copy_timeout(route, files) == 300.0 + patience
    assert made._usual(route, size) == usual
