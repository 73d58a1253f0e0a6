"""Saves of several ranks (threads here): one outcome for all, whichever rank fails."""

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointing.engine.collectives.group import Failed, result_or
from checkpointing.engine.save.save_queue import SaveQueue, agree_on_save
from checkpointing.engine.save.saver import CheckpointSaver, SavedCheckpoint, SaveJob
from checkpointing.engine.state.save_plan import agree_on_plan, layout_for_budget
from checkpointing.engine.state.staging import Stager, Structure
from checkpointing.errors import SaveFailed
from checkpointing.verification.verify import verify
from tests.checkpointing.engine.thread_ranks import Member, ThreadGroup, together
from tests.checkpointing.fake_storages import Faulty
from tests.checkpointing.in_process_writer import InProcessWriter
from tests.checkpointing.made_checkpoint import OWNER, tier_at

Events = list[tuple[str, dict[str, Any]]]


@dataclass
class Rank:
    """One of two ranks, each on a node with a disk of its own."""

    root: Path
    member: Member
    reported: Events
    shared: bool = False
    by_node: bool = False
    storage: Faulty = field(init=False)

    def __post_init__(self) -> None:
        self.storage = Faulty(self.root)

    def job(self) -> SaveJob:
        state = {f"model/{self.member.rank}": torch.full((40, 3), float(self.member.rank)), "model/all": torch.ones(9)}
        self.plan = agree_on_plan(self.member, state, layout_for_budget(1, 0), by_node=self.by_node)  # type: ignore[arg-type]
        self.writer = InProcessWriter(None if self.by_node else self.storage)
        self.writer.arena.shape(self.plan.layout.buffer_bytes, 1, self.plan.hash)
        structure = Structure(state)
        stager = Stager(self.writer.arena, self.plan, structure, "block")
        parts = stager.match(state)
        assert parts is not None
        return SaveJob(step=7, plan=self.plan, staged=stager.stage(parts), extra={}, world={})

    def saver(self) -> CheckpointSaver:
        tier = tier_at(self.root, self.storage, shared=self.shared)
        emit = lambda kind, data: self.reported.append((kind, data))  # noqa: E731
        return CheckpointSaver(tier, self.member, OWNER, self.writer, "refuse", emit)  # type: ignore[arg-type]

    def save(self, change: Callable[["Rank", SaveJob], None] = lambda *_: None) -> SavedCheckpoint | str:
        job = self.job()
        change(self, job)
        try:
            return self.saver().run(job)
        except SaveFailed as failed:
            return f"{type(failed).__name__}: {failed}"
        finally:
            self.writer.close()


def two(tmp_path: Path, **options: Any) -> list[Rank]:
    reported: Events = []
    members = ThreadGroup(2).members()
    return [
        Rank(tmp_path / ("shared" if options.get("shared") else f"node-{member.rank}"), member, reported, **options)
        for member in members
    ]


def saved(ranks: list[Rank], change: Callable[[Rank, SaveJob], None] = lambda *_: None) -> list[Any]:
    return together([lambda rank=rank: rank.save(change) for rank in ranks])


def test_disks_of_two_nodes_commit_one_checkpoint(tmp_path: Path) -> None:
    ranks = two(tmp_path)
    first, second = saved(ranks)
    assert isinstance(first, SavedCheckpoint)
    assert (first.name, first.size, first.manifest) == (second.name, second.size, second.manifest)
    assert 0 < first.seconds < 60
    assert [kind for kind, _ in ranks[0].reported] == ["checkpoint.saving", "checkpoint.committed"]
    manifests = [(rank.root / first.name / "manifest.json").read_bytes() for rank in ranks]
    assert manifests[0] == manifests[1]
    described = {".metadata", "index.json", "fingerprints.json"}
    for rank, own in zip(ranks, (described, set()), strict=True):
        there = {path.name for path in (rank.root / first.name).iterdir()}
        assert there == own | {f"__{rank.member.rank}_0.distcp", "manifest.json", "COMMIT"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_whose_disk_does_not_take_the_marker_fails_the_save_of_all(tmp_path: Path, rank: int) -> None:
    ranks = two(tmp_path)
    ranks[rank].storage.broken = lambda operation, _: errno.EROFS if operation.startswith("publish") else 0
    ends = saved(ranks)
    assert ends == [f"SaveFailed: step 7: rank {rank}: [Errno 30] Read-only file system: '{ranks[rank].root}'"] * 2
    assert [list(one.root.iterdir()) for one in ranks] == [[], []], "nothing of it is left"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_whose_disk_cannot_be_listed_fails_it_before_a_byte_is_written(tmp_path: Path, rank: int) -> None:
    ranks = two(tmp_path)
    ranks[rank].storage.broken = lambda operation, _: errno.EIO if operation.startswith("list") else 0
    ends = saved(ranks)
    assert ends == [f"SaveFailed: step 7: rank {rank}: [Errno 5] Input/output error: '{ranks[rank].root}'"] * 2
    assert ranks[0].reported == []


def test_one_file_of_a_node_holds_the_regions_of_its_ranks(tmp_path: Path) -> None:
    ranks = two(tmp_path, shared=True, by_node=True)
    ranks[1].member.leads_node = False
    first, second = saved(ranks)
    assert (first.name, first.manifest) == (second.name, second.manifest)
    folder = ranks[0].root / first.name
    assert [path.name for path in folder.glob("*.distcp")] == ["__node0.distcp"]
    assert verify(folder, 2).ok


@pytest.mark.parametrize("is_late", [False, True])
def test_a_copy_that_failed_on_one_rank_fails_the_save_of_all(tmp_path: Path, is_late: bool) -> None:
    """The failure is known when the state is handed over, or only when its copy is certified."""

    def fail(rank: Rank, job: SaveJob) -> None:
        if rank.member.rank == 1:
            (bucket,) = job.staged.buckets()
            if is_late:
                bucket.copy.certify = lambda: setattr(bucket.copy, "failure", Failed("torn"))  # type: ignore[method-assign]
            else:
                bucket.copy.failure = Failed("torn")

    ends = saved(two(tmp_path, shared=True), fail)
    assert ends == ["SaveFailed: step 7: rank 1: torn"] * 2


# ---- before a save and after it


def test_ranks_agree_on_what_all_can_do() -> None:
    def agree(member: Member, mine: dict[str, Any]) -> Any:
        ready = {"plan": 3, "step": 6, "has_room": True, "idle": True, "rank_state": 1} | mine
        return result_or(lambda: agree_on_save(member, **ready), str)  # type: ignore[arg-type]

    def agreed(*ranks: dict[str, Any]) -> Any:
        members = ThreadGroup(len(ranks)).members()
        first, second = together([lambda at=at: agree(members[at], ranks[at]) for at in range(len(ranks))])
        assert first == second
        return first

    same = agreed({}, {})
    assert (same.same, same.has_room, same.idle, same.alike) == (True, True, True, True)
    assert not agreed({"plan": 0}, {"plan": 0}).same
    assert not agreed({}, {"plan": 4}).same
    assert not agreed({}, {"has_room": False}).has_room
    assert not agreed({"idle": False}, {}).idle
    assert not agreed({}, {"rank_state": 2}).alike
    assert agreed({"step": 8}, {}) == "the ranks save different steps, from 6 to 8: they must call save together"


@pytest.mark.parametrize("fails", ["save", "decision"])
def test_a_group_that_breaks_during_a_save_fails_it_on_every_rank_that_is_left(fails: str) -> None:
    group, reported, ends, over = ThreadGroup(2), list[Any](), list[Any](), threading.Event()

    class Saver:
        def run(self, job: Any) -> Any:
            group.abandon()
            raise RuntimeError("connection reset\nby peer") if fails == "save" else SaveFailed(job.step, "disk full")

    member, job = group.members()[1], SimpleNamespace(step=4, staged=SimpleNamespace(drain=lambda: None))
    queue = SaveQueue(
        Saver(), member, lambda *what: reported.append(what), lambda _, end: (ends.append(end), over.set())  # type: ignore[arg-type]
    )  # fmt: skip
    queue.submit(job)  # type: ignore[arg-type]
    assert over.wait(20)
    reason = f"rank 1: RuntimeError: {'connection reset' if fails == 'save' else 'the group is broken'}"
    assert reported == [("checkpoint.failed", {"step": 4, "reason": reason})]
    assert [(type(end), end.step, end.reason) for end in ends] == [(SaveFailed, 4, reason)]
    assert queue.alive
    queue.close()
