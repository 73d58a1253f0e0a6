"""The flush lane: what reaches the slower tiers, and that trouble there stays there."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.catalog import Catalog
from checkpointing.config import RetentionConfig
from checkpointing.digests import CHUNK, digest
from checkpointing.engine.flushing import Flusher, Patience
from checkpointing.engine.saving import Owner
from checkpointing.flush_plan import Choice, Shelf, choose, share
from checkpointing.manifest import FileEntry, parse
from checkpointing.tiers import TierPlace
from checkpointing.verify import verify
from tests.checkpointing.engine.halls import Hall, ThreadedWriter, together
from tests.checkpointing.made import FILES, NONCE, make
from tests.checkpointing.storages import Faulty, Recording, full_after, replay

SECONDS = 20.0
FOUR = {
    ".metadata": b"metadata",
    "index.json": b"index",
    **{f"__{rank}_0.distcp": b"%d" % rank * 999 for rank in range(4)},
}


@dataclass
class Tiers:
    """Two or more tiers below one folder, and the flushers of all ranks over them."""

    root: Path
    names: tuple[str, ...] = ("fast", "slow")
    size: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    alive: bool = True
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    flushers: list[Flusher] = field(default_factory=list)
    hall: Hall = field(init=False)

    def __post_init__(self) -> None:
        self.storages = {name: Faulty(self.root / name) for name in self.names}
        self.writer = ThreadedWriter({str(storage.root): storage for storage in self.storages.values()})
        self.heard = threading.Condition()

    def place(self, name: str) -> TierPlace:
        storage = self.storages[name]
        place = TierPlace(path=str(storage.root), storage=storage, catalog=Catalog(storage.root, storage))
        return replace(place, **self.changes.get(name, {}))

    def start(self, places: Callable[[int], list[TierPlace]] | None = None, **options: Any) -> None:
        self.hall = Hall(self.size)
        owner = Owner(1, NONCE, (), lambda: self.alive)
        for member in self.hall.members():
            known = places(member.rank) if places else [self.place(name) for name in self.names]
            arguments = {"patience": Patience(look=0.02), **self.options, **options}
            self.flushers.append(Flusher(known, member, owner, lambda: self.writer, self.tell, **arguments))
        self.idle()  # what was there before is dealt with

    def tell(self, kind: str, data: dict[str, Any]) -> None:
        with self.heard:
            self.told.append((kind, data))
            self.heard.notify_all()

    def commit(self, step: int, **options: Any) -> str:
        name = make(self.storages[self.names[0]], step, **options)
        for flusher in self.flushers:
            flusher.committed(name)
        return name

    def drain(self, seconds: float = SECONDS) -> bool:
        results = together([lambda flusher=flusher: flusher.drain(seconds) for flusher in self.flushers])
        assert len(set(results)) == 1
        return results[0]

    def idle(self) -> None:
        """Wait until everything that was signalled is dealt with."""
        deadline = time.monotonic() + SECONDS
        while any(flusher._done < flusher._signals for flusher in self.flushers):
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def steps(self, name: str) -> list[int]:
        return [entry.step for entry in Catalog(self.root / name).committed()]

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.told]

    def wait_for(self, kind: str) -> dict[str, Any]:
        with self.heard:
            assert self.heard.wait_for(lambda: kind in self.kinds(), SECONDS), self.told
            return next(data for told, data in self.told if told == kind)

    def close(self) -> None:
        for storage in self.storages.values():
            if isinstance(storage, Faulty):
                storage.healed.set()
        together([flusher.close for flusher in self.flushers])


@pytest.fixture(autouse=True)
def _no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy disk must not look like a hung one here; what is waited for in which order others test."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(tmp_path)
    yield made
    made.close()


def tiers_of(tmp_path: Path, *names: str, size: int = 1, **changes: dict[str, Any]) -> Tiers:
    return Tiers(tmp_path, names or ("fast", "slow"), size, changes=changes)


# ---- what is due


def name(step: int, attempt: int = 1) -> str:
    return f"step-{step:08d}.{attempt:03d}-{NONCE}"


def shelf(*steps: int) -> Shelf:
    return Shelf(tuple(name(step) for step in steps))


@pytest.mark.parametrize(
    ("shelves", "facts", "expected"),
    [
        ([shelf(), shelf()], {}, Choice(None, 0, "no faster tier has a checkpoint that can be trusted")),
        ([shelf(30, 20), shelf()], {}, Choice(name(30), 0, "there is none yet")),
        ([shelf(30, 20), shelf(30)], {}, Choice(None, 0, "the newest one is there already")),
        ([shelf(30, 20), shelf(20)], {}, Choice(name(30), 0, "there is a newer one")),
        ([shelf(30), shelf(20)], {"every": 10}, Choice(name(30), 0, "there is a newer one")),
        (
            [shelf(30), shelf(20)],
            {"every": 11},
            Choice(None, 0, "it is 10 steps newer than the newest one there, 11 are asked for"),
        ),
        (
            [shelf(30), shelf(20)],
            {"every": 11, "everything": True},
            Choice(name(30), 0, "the last one goes everywhere"),
        ),
        # After a roll-back from 30 to 20, 25 is the newest work.
        ([shelf(30, 25), shelf(30)], {"latest": name(25)}, Choice(name(25), 0, "there is a newer one")),
        ([shelf(30, 26), shelf(30, 25)], {"latest": name(26), "last": name(25), "every": 5}, None),
        # The fastest tier that has it is read.
        ([shelf(20), shelf(30, 20), shelf()], {}, Choice(name(30), 1, "there is none yet")),
        ([shelf(30), shelf(30), shelf()], {}, Choice(name(30), 0, "there is none yet")),
        # What was just committed may be gone again.
        ([shelf(40), shelf()], {"latest": name(35)}, Choice(name(40), 0, "there is none yet")),
    ],
)
def test_a_tier_receives_what_is_due(shelves: list[Shelf], facts: dict[str, Any], expected: Choice | None) -> None:
    choice = choose(shelves, len(shelves) - 1, **facts)
    if expected is None:
        assert choice.name is None
    else:
        assert choice == expected


def entry(file: str, size: int) -> FileEntry:
    return FileEntry(name=file, size=size, chunks=(digest(b""),) * -(-size // CHUNK))


def test_ranks_copy_their_own_shards_and_share_the_rest() -> None:
    files = [entry("__0_0.distcp", 10), entry("__1_0.distcp", 500), entry(".metadata", 50), entry("index.json", 60)]
    first, second = share(files, [None, None])
    assert {file.name for file in first} == {"__0_0.distcp", ".metadata", "index.json"}
    assert {file.name for file in second} == {"__1_0.distcp"}


def test_shards_of_ranks_that_are_no_more_are_shared_too() -> None:
    files = [entry(f"__{rank}_0.distcp", 100) for rank in range(6)]
    assert [len(part) for part in share(files, [None, None])] == [3, 3]


def test_a_file_is_copied_by_a_rank_that_sees_it() -> None:
    files = [entry("__0_0.distcp", 10), entry("__1_0.distcp", 10)]
    seen = [frozenset({"__1_0.distcp"}), frozenset({"__0_0.distcp"})]
    assert [[file.name for file in part] for part in share(files, seen)] == [["__1_0.distcp"], ["__0_0.distcp"]]
    with pytest.raises(ValueError, match="__1_0.distcp is on no node"):
        share(files, [frozenset({"__0_0.distcp"}), frozenset()])


@given(st.lists(st.integers(0, 10**9), max_size=12), st.integers(1, 5))
def test_every_file_is_copied_exactly_once(sizes: list[int], ranks: int) -> None:
    files = [entry(f"__{at}_0.distcp" if at % 2 else f"f{at}", size % CHUNK) for at, size in enumerate(sizes)]
    shares = share(files, [None] * ranks)
    assert sorted(file.name for part in shares for file in part) == sorted(file.name for file in files)


# ---- one rank, two tiers


def test_every_commit_reaches_the_slow_tier_and_is_told(tiers: Tiers) -> None:
    tiers.start()
    for step in (10, 20):
        made = tiers.commit(step)
        tiers.idle()
    assert tiers.steps("slow") == [20, 10]
    assert verify(tiers.root / "slow" / made, 2).ok
    assert tiers.kinds() == ["checkpoint.flushed"] * 2
    facts = tiers.told[1][1]
    assert (facts["step"], facts["name"], facts["tier"]) == (20, made, str(tiers.root / "slow"))
    assert facts["bytes"] == sum(map(len, FILES.values()))
    assert facts["seconds"] > 0


def test_the_copy_is_the_very_checkpoint(tiers: Tiers) -> None:
    tiers.start()
    made = tiers.commit(10, extra={"loss": 0.5})
    tiers.idle()
    fast, slow = (tiers.root / tier / made for tier in tiers.names)
    assert {path.name for path in slow.iterdir()} == {path.name for path in fast.iterdir()}
    for path in fast.iterdir():
        assert path.name == "COMMIT" or path.read_bytes() == (slow / path.name).read_bytes()


def test_a_start_goes_on_with_what_was_left(tiers: Tiers) -> None:
    for step in (10, 20):
        made = make(tiers.storages["fast"], step)
    half = tiers.root / "slow" / made
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(FILES["__0_0.distcp"])
    (half / "__1_0.distcp").write_bytes(b"torn")
    tiers.start()
    tiers.idle()
    assert tiers.steps("slow") == [20]
    assert verify(half, 2).ok
    assert tiers.storages["slow"].written < sum(map(len, FILES.values())) + 1000, "the finished shard was kept"


def test_a_slow_tier_gets_every_so_many_steps_and_the_last_one(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, slow={"every": 25})
    tiers.start()
    for step in range(10, 80, 10):
        tiers.commit(step)
        tiers.idle()
    assert tiers.steps("slow") == [70, 40, 10]
    tiers.commit(80)
    assert tiers.drain()
    assert tiers.steps("slow")[0] == 80
    tiers.close()


def test_a_start_brings_the_newest_everywhere_whatever_the_rule(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, slow={"every": 1000})
    make(tiers.storages["slow"], 10)
    make(tiers.storages["fast"], 20)
    tiers.start()
    tiers.idle()
    assert tiers.steps("slow") == [20, 10]
    tiers.close()


def test_remains_of_a_deletion_in_the_slow_tier_make_room(tiers: Tiers) -> None:
    make(tiers.storages["fast"], 10)
    made = make(tiers.storages["slow"], 10)
    (tiers.root / "slow" / made / "DELETED").write_text("")
    (tiers.root / "slow" / made / "__0_0.distcp").unlink()
    tiers.start()
    tiers.idle()
    assert tiers.kinds() == ["checkpoint.flushed"]
    assert verify(tiers.root / "slow" / made, 2).ok


def test_three_tiers_each_with_its_own_rule(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, "fast", "slow", "far", far={"every": 20, "keep": 2}, slow={"keep": 2})
    tiers.start()
    for step in range(10, 80, 10):
        tiers.commit(step)
        tiers.idle()
    assert tiers.steps("slow") == [70, 60]
    assert tiers.steps("far") == [70, 50]
    assert {order.source for order in tiers.writer.orders} == {str(tmp_path / "fast")}
    tiers.close()


def test_each_tier_keeps_to_its_own_retention(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, slow={"keep": 2})
    tiers.start(retention=RetentionConfig(every=30))
    for step in (10, 20, 30, 40, 50, 60):
        tiers.commit(step)
        tiers.idle()
    assert tiers.steps("slow") == [60, 50, 30]
    gone = [data for kind, data in tiers.told if kind == "checkpoint.deleted"]
    assert [(data["step"], data["tier"]) for data in gone] == [(step, str(tmp_path / "slow")) for step in (10, 20, 40)]
    assert tiers.steps("fast") == [60, 50, 40, 30, 20, 10], "the fast tier is the save lane's to tidy"
    tiers.close()


def test_older_ones_are_skipped_when_a_newer_one_waits(tiers: Tiers) -> None:
    gate = threading.Event()
    tiers.writer.before = lambda order: gate.wait(SECONDS) and None
    tiers.start()
    tiers.commit(10)
    deadline = time.monotonic() + SECONDS
    while not tiers.writer.orders and time.monotonic() < deadline:
        time.sleep(0.002)
    for step in (20, 30, 40):
        tiers.commit(step)
    gate.set()
    tiers.idle()
    assert tiers.steps("slow") == [40, 10]


def test_what_is_being_copied_is_held(tiers: Tiers) -> None:
    gate, seen = threading.Event(), []
    tiers.writer.before = lambda order: seen.append(tiers.flushers[0].held) or gate.wait(SECONDS) and None
    tiers.start()
    made = tiers.commit(10)
    gate.set()
    tiers.idle()
    assert seen == [frozenset({made})]
    assert tiers.flushers[0].held == frozenset()


def test_a_bad_source_is_told_with_its_chunk_and_never_passed_on(tiers: Tiers) -> None:
    old = make(tiers.storages["fast"], 10)
    made = make(tiers.storages["fast"], 20)
    (tiers.root / "fast" / made / "__0_0.distcp").write_bytes(b"x" * 999 + b"y")
    tiers.start()
    tiers.idle()
    told = tiers.wait_for("checkpoint.failed")
    assert "the source is damaged: __0_0.distcp chunk 0: digest differs" in told["reason"]
    assert told["tier"] == str(tiers.root / "slow")
    assert tiers.steps("slow") == []
    assert tiers.drain(), "the next older one is good"
    assert Catalog(tiers.root / "slow").names()[-1] == old
    assert tiers.steps("slow") == [10]


def test_a_full_tier_is_told_and_the_next_commit_tries_again(tiers: Tiers) -> None:
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
    assert tiers.wait_for("checkpoint.failed")["tier"] == str(tmp_path / "slow")
    assert not tiers.drain(), "the slow tier has not received it"
    tiers.close()


@pytest.mark.parametrize("operation", ["list", "create", "write", "publish", "delete"])
def test_a_hung_tier_is_told_and_holds_up_nobody(tmp_path: Path, operation: str) -> None:
    tiers = tiers_of(tmp_path, "fast", "slow", "far", slow={"keep": 2})
    hung, slow = threading.Event(), tiers.storages["slow"]
    for step in (1, 2):
        make(slow, step)
    slow.hung = lambda met: hung.is_set() and met.startswith(operation)
    tiers.start(patience=Patience(access=0.3, copy=0.3, look=0.02))
    tiers.idle()
    hung.set()
    start = time.monotonic()
    tiers.commit(10)
    assert time.monotonic() - start < 0.2, "telling the lane does not wait for it"
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


def test_a_copy_that_takes_far_too_long_is_told_while_it_is_under_way(tiers: Tiers) -> None:
    tiers.storages["slow"].hung = lambda met: met.startswith("write")
    tiers.start(patience=Patience(access=0.05, look=0.02))
    tiers.commit(10)
    told = tiers.wait_for("checkpoint.stuck")
    assert (told["tier"], told["step"]) == (str(tiers.root / "slow"), 10)
    assert told["reason"].endswith("still under way (rank 0)")
    time.sleep(0.1)
    assert tiers.kinds().count("checkpoint.stuck") == 1, "once is enough"
    tiers.storages["slow"].healed.set()
    tiers.idle()
    assert tiers.steps("slow") == [10], "it was waited for all the same"


def test_a_tier_that_was_stuck_is_served_after_the_others(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, "fast", "slow", "far", size=2)
    slow = tiers.storages["slow"]
    slow.hung = lambda met: met.startswith("write") and not slow.healed.is_set()
    tiers.start(patience=Patience(access=SECONDS, copy=0.1, look=0.02))
    tiers.commit(10)
    tiers.wait_for("checkpoint.stuck")
    tiers.idle()
    slow.healed.set()
    deadline = time.monotonic() + SECONDS
    while any(flusher._asides[1].stuck for flusher in tiers.flushers) and time.monotonic() < deadline:
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
    (told,) = [data for kind, data in tiers.told if kind == "checkpoint.failed"]
    assert (told["step"], told["tier"]) == (10, str(tmp_path / "far"))
    assert f"no time left to copy it from {tmp_path / 'fast'}" in told["reason"]
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

    tiers.start(patience=Patience(look=0.02, late=0.1))
    slow.broken = lose
    tiers.commit(10)
    assert "__0_0.distcp is not there" in tiers.wait_for("checkpoint.failed")["reason"]
    assert tiers.steps("slow") == []


def test_refused_checkpoints_are_not_passed_on(tiers: Tiers) -> None:
    make(tiers.storages["fast"], 10)
    suspect = make(tiers.storages["fast"], 20)
    tiers.start(refused=lambda tier: {suspect} if tier == str(tiers.root / "fast") else {})
    tiers.idle()
    assert tiers.steps("slow") == [10]


def test_a_copy_that_was_refused_in_one_tier_is_passed_on_from_another(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, "fast", "slow", "far")
    for tier in ("fast", "slow"):
        made = make(tiers.storages[tier], 20)
    tiers.start(refused=lambda tier: {made} if tier == str(tmp_path / "fast") else {})
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


def test_one_tier_alone_needs_no_lane(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, "fast")
    before = threading.active_count()
    tiers.start()
    assert threading.active_count() == before
    tiers.commit(10)
    assert tiers.drain(0.0)
    tiers.close()
    assert tiers.flushers[0]._ranks.closed


@pytest.mark.parametrize("power_loss", [False, True], ids=["crash", "power-loss"])
def test_after_every_prefix_of_a_flush_the_next_start_finishes_it(tmp_path: Path, power_loss: bool) -> None:
    """The flush of one checkpoint and the retention after it, cut short after every single change."""
    first = tiers_of(tmp_path / "first", slow={"keep": 2})
    recording = Recording(tmp_path / "first" / "slow")
    first.storages["slow"] = first.writer.storages[str(recording.root)] = recording
    older = [make(recording, step) for step in (1, 2)]
    made = make(first.storages["fast"], 3)
    before = len(recording.log)
    first.start()
    first.idle()
    first.close()
    assert first.steps("slow") == [3, 2]
    for length in range(before, len(recording.log) + 1):
        again = tiers_of(tmp_path / f"at-{length}", slow={"keep": 2})
        shutil.copytree(tmp_path / "first" / "fast", again.root / "fast")
        (again.root / "slow").mkdir()
        replay(recording.log[:length], again.root / "slow", power_loss=power_loss)
        found = Catalog(again.root / "slow").committed()
        assert all(verify(entry.path, 2).ok for entry in found), f"after {length} operations"
        assert len(found) >= 2, f"after {length} operations"
        again.start()
        again.idle()
        # What the next start finds done already is tidied by the flush after it.
        again.commit(4)
        again.idle()
        again.close()
        assert again.steps("slow") == [4, 3], f"after {length} operations"
        assert all(verify(entry.path, 2).ok for entry in Catalog(again.root / "slow").committed())
        assert {path.name for path in (again.root / "slow").iterdir()} == {made, made.replace("3.001", "4.001")}
    assert older[0] not in first.storages["slow"].list("")


# ---- several ranks


@pytest.mark.parametrize("slowest", [0, 3])
def test_ranks_that_hear_of_commits_at_different_times_stay_in_step(tmp_path: Path, slowest: int) -> None:
    tiers = tiers_of(tmp_path, size=4)
    tiers.start()
    names = [make(tiers.storages["fast"], step, files=FOUR) for step in range(10, 60, 10)]

    def hear(flusher: Flusher, pause: float) -> None:
        for made in names:
            flusher.committed(made)
            time.sleep(pause)

    together([lambda at=at, f=f: hear(f, 0.003 * abs(at + slowest - 3)) for at, f in enumerate(tiers.flushers)])
    assert tiers.drain()
    assert tiers.steps("slow")[0] == 50
    assert verify(tmp_path / "slow" / names[-1], 2).ok
    last = [order for order in tiers.writer.orders if order.folder == names[-1]]
    assert sorted(len(order.files) for order in last) == [1, 1, 2, 2]
    tiers.close()
    assert all(flusher._ranks.closed for flusher in tiers.flushers)


def test_trouble_of_one_rank_is_everybodys_and_told_once(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, size=3)
    tiers.storages["slow"].broken = lambda met, _: errno.EROFS if met.startswith("write") and "__2_0" in met else 0
    tiers.start()
    tiers.commit(10, files=FOUR)
    tiers.idle()
    (told,) = [data for kind, data in tiers.told if kind == "checkpoint.failed"]
    assert "rank 2: " in told["reason"]
    assert "rank 0" not in told["reason"]
    assert tiers.steps("slow") == []
    tiers.close()


def test_disks_of_the_nodes_together_feed_a_shared_tier(tmp_path: Path) -> None:
    """Two nodes with two ranks each: every node's disk has its own ranks' shards and the whole manifest."""
    tiers = tiers_of(tmp_path, "node-0", "node-1", "shared", size=4)
    for node, ranks in (("node-0", "01"), ("node-1", "23")):
        made = make(tiers.storages[node], 10, files=FOUR)
        for file in FOUR:
            if file.startswith("__") and file[2] not in ranks:
                (tmp_path / node / made / file).unlink()
    (tmp_path / "node-1" / made / ".metadata").unlink()
    tiers.changes = {node: {"shared": False} for node in ("node-0", "node-1")}
    tiers.start(lambda rank: [tiers.place(f"node-{rank // 2}"), tiers.place("shared")])
    tiers.idle()
    assert tiers.told[0][0] == "checkpoint.flushed"
    assert verify(tmp_path / "shared" / made, 2).ok
    assert {order.source[-6:]: len(order.files) for order in tiers.writer.orders if len(order.files) > 1}.keys() == {
        "node-0"
    }
    tiers.close()


def test_a_shared_tier_feeds_the_disks_of_the_nodes(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, "shared", "node-0", "node-1", size=4)
    made = make(tiers.storages["shared"], 10, files=FOUR)
    tiers.changes = {node: {"shared": False} for node in ("node-0", "node-1")}
    tiers.hall = Hall(4)
    owner = Owner(1, NONCE, (), lambda: True)
    for member in tiers.hall.members():
        places = [tiers.place("shared"), tiers.place(f"node-{member.rank // 2}")]
        leads = member.rank % 2 == 0
        tiers.flushers.append(
            Flusher(
                places, member, owner, lambda: tiers.writer, tiers.tell, leads_node=leads, patience=Patience(look=0.02)
            )
        )
    tiers.idle()
    manifests = {node: (tmp_path / node / made / "manifest.json").read_bytes() for node in ("node-0", "node-1")}
    assert manifests["node-0"] == manifests["node-1"]
    there = {node: {path.name for path in (tmp_path / node / made).iterdir()} for node in manifests}
    assert {"__0_0.distcp", "__1_0.distcp", "COMMIT"} <= there["node-0"]
    assert {"__2_0.distcp", "__3_0.distcp", "COMMIT"} <= there["node-1"]
    assert there["node-0"] | there["node-1"] >= {entry.name for entry in parse(manifests["node-0"]).files}
    tiers.close()


def test_a_peer_that_dies_ends_the_lane_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = tiers_of(tmp_path, size=2)
    tiers.start()
    tiers.idle()
    tiers.hall.abandon()
    tiers.flushers[0].committed("step-00000010.001-ab12cd34")
    assert not tiers.flushers[0].drain(SECONDS)
    assert "no longer copied" in caplog.text
    tiers.flushers[0].close()
    tiers.flushers[1].close()


@pytest.mark.multi
def test_real_ranks_flush_with_real_writers(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("flush_program.py")), str(rank), "2", str(tmp_path)],
            cwd=root,
            env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in ended)
    assert first["told"][-1] == ["checkpoint.flushed", 20]
    assert second["told"] == [], "only rank 0 tells"
    assert (first["drained"], second["drained"]) == (True, True)
    newest = Catalog(tmp_path / "slow").committed()[0]
    assert newest.step == 20
    assert verify(newest.path, 2).ok
