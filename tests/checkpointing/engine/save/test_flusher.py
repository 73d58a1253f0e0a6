"""Which checkpoints the flusher copies to the slower tiers, and when."""

import errno
import shutil
import threading
import time
from pathlib import Path

import pytest

from checkpointing.config import CheckpointConfig, RetentionConfig
from checkpointing.engine.save.flusher import Flusher, TransferTimeouts
from checkpointing.format.manifest import parse
from checkpointing.tiers.catalog import Catalog, Owner
from checkpointing.tiers.tier import RunTiers
from checkpointing.verification.verify import verify
from tests.checkpointing.engine.thread_ranks import ThreadGroup, together
from tests.checkpointing.engine.tier_set import FOUR, SECONDS, Tiers, no_waiting_for_disks, tiers, tiers_of
from tests.checkpointing.fake_storages import Recording, replay
from tests.checkpointing.made_checkpoint import FILES, NONCE, make
from tests.warm_programs import WarmPrograms

__all__ = ["no_waiting_for_disks", "tiers"]

pytestmark = pytest.mark.usefixtures("no_waiting_for_disks")


# ---- one rank, two tiers


def test_every_commit_reaches_the_slow_tier_and_is_reported(tiers: Tiers) -> None:
    tiers.start()
    for step in (10, 20):
        made = tiers.commit(step)
        tiers.idle()
    assert tiers.steps("slow") == [20, 10]
    assert verify(tiers.root / "slow" / made, 2).ok
    assert tiers.kinds() == ["checkpoint.flushed"] * 2
    facts = tiers.reported[1][1]
    assert (facts["step"], facts["name"], facts["tier"]) == (20, made, str(tiers.root / "slow"))
    assert facts["bytes"] == sum(map(len, FILES.values()))
    assert facts["seconds"] > 0


def test_the_copy_equals_the_checkpoint(tiers: Tiers) -> None:
    tiers.start()
    made = tiers.commit(10, extra={"loss": 0.5})
    tiers.idle()
    fast, slow = (tiers.root / tier / made for tier in tiers.names)
    assert {path.name for path in slow.iterdir()} == {path.name for path in fast.iterdir()}
    for path in fast.iterdir():
        assert path.name == "COMMIT" or path.read_bytes() == (slow / path.name).read_bytes()


def test_a_start_continues_unfinished_copies(tiers: Tiers) -> None:
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


def test_a_start_copies_the_newest_to_every_tier(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, slow={"every": 1000})
    make(tiers.storages["slow"], 10)
    make(tiers.storages["fast"], 20)
    tiers.start()
    tiers.idle()
    assert tiers.steps("slow") == [20, 10]
    tiers.close()


def test_a_half_deleted_copy_in_the_slow_tier_is_replaced(tiers: Tiers) -> None:
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


def test_each_tier_has_its_own_retention(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, slow={"keep": 2})
    tiers.start(config=CheckpointConfig(retention=RetentionConfig(every=30)))
    for step in (10, 20, 30, 40, 50, 60):
        tiers.commit(step)
        tiers.idle()
    assert tiers.steps("slow") == [60, 50, 30]
    gone = [data for kind, data in tiers.reported if kind == "checkpoint.deleted"]
    assert [(data["step"], data["tier"]) for data in gone] == [(step, str(tmp_path / "slow")) for step in (10, 20, 40)]
    assert tiers.steps("fast") == [60, 50, 40, 30, 20, 10], "the fast tier is the save queue's to clean"
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


def test_the_checkpoint_being_copied_is_held(tiers: Tiers) -> None:
    gate, seen = threading.Event(), []
    tiers.writer.before = lambda order: seen.append(tiers.flushers[0].held) or gate.wait(SECONDS) and None
    tiers.start()
    made = tiers.commit(10)
    gate.set()
    tiers.idle()
    assert seen == [frozenset({made})]
    assert tiers.flushers[0].held == frozenset()


@pytest.mark.parametrize("power_loss", [False, True], ids=["crash", "power-loss"])
def test_the_next_start_finishes_every_prefix_of_a_flush(tmp_path: Path, power_loss: bool) -> None:
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
        found = Catalog(again.root / "slow").committed_entries()
        assert all(verify(entry.path, 2).ok for entry in found), f"after {length} operations"
        assert len(found) >= 2, f"after {length} operations"
        again.start()
        again.idle()
        # What the next start finds done already is tidied by the flush after it.
        again.commit(4)
        again.idle()
        again.close()
        assert again.steps("slow") == [4, 3], f"after {length} operations"
        assert all(verify(entry.path, 2).ok for entry in Catalog(again.root / "slow").committed_entries())
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
            flusher.record_commit(made)
            time.sleep(pause)

    together([lambda at=at, f=f: hear(f, 0.003 * abs(at + slowest - 3)) for at, f in enumerate(tiers.flushers)])
    assert tiers.drain()
    assert tiers.steps("slow")[0] == 50
    assert verify(tmp_path / "slow" / names[-1], 2).ok
    last = [order for order in tiers.writer.orders if order.folder == names[-1]]
    assert sorted(len(order.files) for order in last) == [1, 1, 2, 2]
    tiers.close()
    assert all(flusher._ranks.closed for flusher in tiers.flushers)


def test_a_failure_of_one_rank_fails_all_and_is_reported_once(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, size=3)
    tiers.storages["slow"].broken = lambda met, _: errno.EROFS if met.startswith("write") and "__2_0" in met else 0
    tiers.start()
    tiers.commit(10, files=FOUR)
    tiers.idle()
    (reported,) = [data for kind, data in tiers.reported if kind == "checkpoint.failed"]
    assert "rank 2: " in reported["reason"]
    assert "rank 0" not in reported["reason"]
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
    assert tiers.reported[0][0] == "checkpoint.flushed"
    assert verify(tmp_path / "shared" / made, 2).ok
    assert {order.source[-6:]: len(order.files) for order in tiers.writer.orders if len(order.files) > 1}.keys() == {
        "node-0"
    }
    tiers.close()


def test_a_rank_without_files_waits_for_the_others_and_a_file_of_no_node_is_named(tmp_path: Path) -> None:
    """The second node has only the names of the first checkpoint's files; no node has one file of the second."""
    tiers = tiers_of(tmp_path, "node-0", "node-1", "shared", size=2)
    for storage in ("node-0", "node-1"):
        made = make(tiers.storages[storage], 10)
    for file in FILES:
        (tmp_path / "node-1" / made / file).unlink()
    tiers.changes = {node: {"shared": False} for node in ("node-0", "node-1")}
    tiers.start(lambda rank: [tiers.place(f"node-{rank}"), tiers.place("shared")])
    assert tiers.kinds() == ["checkpoint.flushed"]
    assert verify(tmp_path / "shared" / made, 2).ok
    assert [Path(order.source).name for order in tiers.writer.orders] == ["node-0"]
    for storage in ("node-0", "node-1"):
        lost = make(tiers.storages[storage], 20)
        (tmp_path / storage / lost / "__1_0.distcp").unlink()
    for flusher in tiers.flushers:
        flusher.record_commit(lost)
    assert tiers.wait_for("checkpoint.failed")["reason"].endswith(
        ": ValueError: no participating node has __1_0.distcp"
    )
    tiers.idle()
    tiers.storages["node-1"].broken = lambda met, _: errno.EIO if met == f"list {lost}" else 0
    for flusher in tiers.flushers:
        flusher.record_commit(lost)
    tiers.idle()
    assert len(tiers.kinds()) == 3
    assert "Input/output error" in tiers.reported[-1][1]["reason"]
    tiers.close()


def test_a_shared_tier_feeds_the_disks_of_the_nodes(tmp_path: Path) -> None:
    tiers = tiers_of(tmp_path, "shared", "node-0", "node-1", size=4)
    made = make(tiers.storages["shared"], 10, files=FOUR)
    tiers.changes = {node: {"shared": False} for node in ("node-0", "node-1")}
    tiers.thread_group = ThreadGroup(4)
    owner = Owner(1, NONCE, (), lambda: True)
    for member in tiers.thread_group.members():
        shared, own = tiers.place("shared"), tiers.place(f"node-{member.rank // 2}")
        member.leads_node = member.rank % 2 == 0
        timeouts = TransferTimeouts(look=0.02)
        both = RunTiers((shared, own), shared.storage)
        tiers.flushers.append(Flusher(both, member, owner, lambda: tiers.writer, tiers.emit, timeouts=timeouts))
    tiers.idle()
    manifests = {node: (tmp_path / node / made / "manifest.json").read_bytes() for node in ("node-0", "node-1")}
    assert manifests["node-0"] == manifests["node-1"]
    there = {node: {path.name for path in (tmp_path / node / made).iterdir()} for node in manifests}
    assert {"__0_0.distcp", "__1_0.distcp", "COMMIT"} <= there["node-0"]
    assert {"__2_0.distcp", "__3_0.distcp", "COMMIT"} <= there["node-1"]
    assert there["node-0"] | there["node-1"] >= {entry.name for entry in parse(manifests["node-0"]).files}
    tiers.close()


def test_a_dead_peer_ends_the_flusher_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = tiers_of(tmp_path, size=2)
    tiers.start()
    tiers.idle()
    tiers.thread_group.abandon()
    tiers.flushers[0].record_commit("step-00000010.001-ab12cd34")
    assert not tiers.flushers[0].drain(SECONDS)
    assert "no longer copied" in caplog.text
    tiers.flushers[0].close()
    tiers.flushers[1].close()


@pytest.mark.multi
def test_real_ranks_flush_with_real_writers(programs: WarmPrograms, tmp_path: Path) -> None:
    rows = [(rank, 2, tmp_path) for rank in range(2)]
    first, second = programs.results("tests.checkpointing.engine.save.flush_program", rows)
    assert first["reported"][-1] == ["checkpoint.flushed", 20]
    assert second["reported"] == [], "only rank 0 tells"
    assert (first["drained"], second["drained"]) == (True, True)
    newest = Catalog(tmp_path / "slow").committed_entries()[0]
    assert newest.step == 20
    assert verify(newest.path, 2).ok
