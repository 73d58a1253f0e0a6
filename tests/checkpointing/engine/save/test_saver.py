"""The save queue: disks that fail, hang and recover, a writer that dies, and training that never waits for them."""

import concurrent.futures
import errno
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpointing.engine.collectives.group import Failed, RankGroup
from checkpointing.engine.save import saver as saver_module
from checkpointing.engine.save.save_queue import RETRY_PAUSES, SaveQueue
from checkpointing.engine.save.saver import CheckpointSaver
from checkpointing.engine.state.save_plan import agree_on_plan, layout_for_budget
from checkpointing.format.manifest import INDEX, METADATA
from checkpointing.tiers.catalog import Catalog
from checkpointing.writer.link import WriterLink
from tests.checkpointing.engine.conftest import Bench, blank, loaded, same, state
from tests.checkpointing.fake_storages import Faulty
from tests.checkpointing.in_process_writer import InProcessWriter
from tests.checkpointing.proofs.mounts import small_tmpfs


def gated(bench: Bench) -> Faulty:
    """A disk that hangs until `healed`."""
    return Faulty(bench.root, hung=lambda operation: operation.startswith("create"))


def failing(bench: Bench, times: int, number: int = errno.EIO) -> Faulty:
    """A storage whose shard files cannot be made for the first `times` times."""
    left = [times]

    def broken(operation: str, written: int) -> int:
        if operation.startswith("create") and operation.endswith(".distcp") and left[0] > 0:
            left[0] -= 1
            return number
        return 0

    return Faulty(bench.root, broken)


def test_the_two_descriptions_are_the_same_for_every_save(bench: Bench) -> None:
    bench.saved(1, 2)
    for file in (METADATA, INDEX):
        assert (bench.folder(1) / file).read_bytes() == (bench.folder(2) / file).read_bytes()


def test_the_same_state_gives_the_same_plan(bench: Bench) -> None:
    plans = [
        agree_on_plan(RankGroup(None), tensors, layout_for_budget(1, 0))
        for tensors in (state(1), dict(reversed(state(2).items())))
    ]
    assert plans[0].hash == plans[1].hash
    assert plans[0].hash != agree_on_plan(RankGroup(None), {"x": torch.ones(1)}, layout_for_budget(1, 0)).hash


# ---- tried again


def test_a_failed_save_is_reported_and_retried_from_its_copy(bench: Bench) -> None:
    made = bench.checkpointer(storage=failing(bench, 2), pauses=(0.0, 0.0))
    tensors = state(1)
    made.save(1, tensors, {})
    for tensor in tensors.values():
        tensor.zero_()
    made.wait()
    assert bench.kinds() == [
        "checkpoint.saving", "checkpoint.retried", "checkpoint.saving", "checkpoint.retried", "checkpoint.saving",
        "checkpoint.committed",
    ]  # fmt: skip
    assert "Input/output error" in bench.reported("checkpoint.retried")[0]["reason"]
    assert made.failure is None
    target = blank()
    assert bench.checkpointer().restore(target) is not None
    assert same(target, state(1))


def test_a_save_is_given_up_after_the_last_pause(bench: Bench) -> None:
    made = bench.checkpointer(storage=failing(bench, 9), pauses=(0.0,))
    made.save(1, state(1), {})
    made.wait()
    assert bench.kinds()[-3:] == ["checkpoint.retried", "checkpoint.saving", "checkpoint.failed"]
    assert list(bench.root.iterdir()) == []


def test_pauses_before_further_tries_grow(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(SaveQueue, "_pause", lambda _, seconds: pauses.append(seconds) or True)
    made = bench.checkpointer(storage=failing(bench, 9), pauses=RETRY_PAUSES)
    made.save(1, state(1), {})
    while made.failure is None:  # without a waiting caller, which would make it give up earlier
        time.sleep(0.001)
    assert pauses == [1.0, 2.0, 5.0, 10.0, 20.0, 30.0]


def test_a_newer_save_replaces_a_retry(bench: Bench) -> None:
    made = bench.checkpointer(storage=failing(bench, 1), pauses=(60.0,))
    made.save(1, state(1), {})
    while "checkpoint.retried" not in bench.kinds():
        time.sleep(0.001)
    assert made.save(2, state(2), {})
    made.wait()
    assert [data["step"] for data in bench.reported("checkpoint.failed")] == [1]
    assert made.committed_step == 2


def test_a_caller_that_waits_does_not_wait_through_long_pauses(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpointing.engine.save.save_queue._WAITED_PAUSE", 0.01)
    made = bench.checkpointer(storage=failing(bench, 99), pauses=(600.0,) * 9)
    made.save(1, state(1), {})
    made.wait()
    assert len(bench.reported("checkpoint.retried")) == 2
    assert bench.kinds()[-1] == "checkpoint.failed"


def test_an_earlier_failure_is_not_held_against_the_save_that_was_begun_since(bench: Bench) -> None:
    storage = gated(bench)
    made = bench.checkpointer(storage=storage)
    storage.broken = lambda operation, _: errno.ENOSPC if operation.startswith("create") else 0
    storage.healed.set()
    made.save(1, state(1), {})
    made.wait()
    assert made.failure is not None
    storage.healed.clear()
    made.save(2, state(2), {})
    made.save(3, state(3), {})
    assert made.failure is None
    storage.healed.set()
    while len(bench.reported("checkpoint.failed")) < 2:
        time.sleep(0.001)
    storage.broken = lambda *_: 0
    made.wait()
    assert [data["step"] for data in bench.reported("checkpoint.failed")][:2] == [1, 2]


def test_too_little_memory_for_a_new_plan_is_reported_once_with_its_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = InProcessWriter()
    made = bench.saved(1, link=link)
    made.stall_seconds = 0.0

    def none_left(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(link.arena, "shape", none_left)
        assert not made.save(2, {"other": torch.ones(5)}, {})
    assert made.failure == "rank 0: [Errno 12] Cannot allocate memory"
    assert bench.reported("checkpoint.failed") == [{"step": 2, "reason": made.failure}]
    assert made.stall_seconds > 0
    assert made.save(3, {"other": torch.ones(5)}, {})
    made.wait()
    assert (made.committed_step, made.failure) == (3, None)


# ---- a disk that hangs


def test_a_hung_disk_never_delays_training(bench: Bench) -> None:
    storage = gated(bench)
    made = bench.checkpointer(storage=storage)
    start = time.monotonic()
    assert [made.save(step, state(step), {}) for step in (1, 2, 3, 4)] == [True, True, False, False]
    assert time.monotonic() - start < 5
    assert [data["step"] for data in bench.reported("checkpoint.skipped")] == [3, 4]
    assert made.committed_step is None
    storage.healed.set()
    made.wait()
    assert made.save(5, state(5), {})
    assert made.committed_step == 2
    made.wait()
    assert [entry.step for entry in Catalog(bench.root).committed_entries()] == [5, 2, 1]
    for step in (1, 2):
        reader, target = bench.checkpointer(attempt=2, nonce="22222222", inherit=(bench.folder(step).name,)), blank()
        assert reader.restore(target) is not None
        assert same(target, state(step)), "a later save must not reach into an earlier copy"


def test_a_new_structure_does_not_wait_for_a_disk(bench: Bench) -> None:
    storage = gated(bench)
    made = bench.checkpointer(storage=storage)
    made.save(1, {"a": torch.ones(3)}, {})
    assert not made.save(2, {"a": torch.ones(3), "b": torch.ones(3)}, {})
    (skipped,) = bench.reported("checkpoint.skipped")
    assert "structure of the state has changed" in skipped["reason"]
    storage.healed.set()
    made.wait()
    assert made.save(3, {"a": torch.ones(3), "b": torch.ones(3)}, {})
    made.wait()
    assert made.committed_step == 3


@pytest.mark.parametrize("ends", [1, 2])
def test_a_write_that_exceeds_its_time_is_reported_once(monkeypatch: pytest.MonkeyPatch, ends: int) -> None:
    """Half a minute beyond the time of a disk that takes 32 MiB in a second."""
    asked, reported, mib = list[float | None](), list[Any](), 1 << 20

    def wait(futures: list[Any], timeout: float | None = None) -> SimpleNamespace:
        asked.append(timeout)
        return SimpleNamespace(done=futures if len(asked) == ends else ())

    monkeypatch.setattr(saver_module, "concurrent", SimpleNamespace(futures=SimpleNamespace(wait=wait)))
    place: Any = SimpleNamespace(path="/tier", storage=None, shared=True)
    unused: Any = None
    saver = CheckpointSaver(place, RankGroup(None), unused, unused, unused, lambda *what: reported.append(what))
    files = (("a", 0, 32 * mib), ("b", 32 * mib, 64 * mib))
    job: Any = SimpleNamespace(step=7)
    bucket: Any = SimpleNamespace(part=SimpleNamespace(files=files))
    saver._await_write(Future(), job, bucket)
    reason = "rank 0: 100663296 bytes are still not written to /tier"
    assert (asked, reported) == (
        ([33.0], []) if ends == 1 else ([33.0, None], [("checkpoint.stuck", {"step": 7, "reason": reason})])
    )


# ---- the writer process


def test_a_real_writer_process_writes_what_is_read_back(bench: Bench) -> None:
    made = bench.saved(1, 2, link=WriterLink.start())
    assert made.committed_step == 2
    target = blank()
    assert bench.checkpointer().restore(target) is not None
    assert same(target, state(2))


def writer_pid(link: WriterLink) -> int:
    assert link._process is not None
    return link._process.pid


def test_a_killed_writer_is_replaced_and_the_save_tried_again(bench: Bench) -> None:
    link = WriterLink.start()
    made = bench.saved(1, link=link, pauses=(0.0,))
    os.kill(writer_pid(link), signal.SIGSTOP)
    made.save(2, state(2), {})
    give_up = time.monotonic() + 30
    while not link._waiting and time.monotonic() < give_up:  # the order is to be with a writer that does not answer
        time.sleep(0.001)
    os.kill(writer_pid(link), signal.SIGKILL)
    made.wait()
    assert "writer is gone" in bench.reported("checkpoint.retried")[0]["reason"]
    assert made.committed_step == 2
    target = blank()
    assert loaded(bench.checkpointer().restore(target)).step == 2
    assert same(target, state(2))


def test_a_writer_that_died_between_saves_is_replaced(bench: Bench) -> None:
    link = WriterLink.start()
    made = bench.saved(1, link=link)
    os.kill(writer_pid(link), signal.SIGKILL)
    with pytest.raises(ConnectionError):
        link.ping().result(20)
    assert made.save(2, state(2), {})
    made.wait()
    assert bench.reported("checkpoint.failed") == []
    assert made.committed_step == 2


def test_a_writer_that_cannot_be_restarted_fails_only_the_save(bench: Bench) -> None:
    class Starved(InProcessWriter):
        alive, starts = True, 0

        def replacement(self) -> "Starved":
            self.starts += 1
            if self.starts <= 2:
                raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
            self.alive = True
            return self

    link = Starved()
    made = bench.saved(1, link=link, pauses=(0.0,))
    link.alive = False
    assert made.save(2, state(2), {})
    made.wait()
    assert made.failure == "rank 0: [Errno 11] Resource temporarily unavailable"
    assert bench.kinds()[-4:] == ["checkpoint.saving", "checkpoint.retried", "checkpoint.saving", "checkpoint.failed"]
    assert made.save(3, state(3), {})
    made.wait()
    assert made.committed_step == 3


def test_prepare_plans_what_the_first_save_uses(bench: Bench) -> None:
    link = InProcessWriter()
    made = bench.checkpointer(link=link)
    made.prepare(state(0))
    stamp = link.arena.stamp
    assert stamp
    made.save(1, state(1), {})
    made.wait()
    assert link.arena.stamp == stamp
    made.prepare(state(0))
    assert link.arena.stamp == stamp
    assert link.arena.record(0) or link.arena.record(1)
    assert len(made.save_seconds) == 1
    assert made.stall_seconds > 0


def test_a_restart_with_the_same_memory_restores_from_it(bench: Bench) -> None:
    """What a restart in place does: the arena outlives the rank, the disk's copy is older."""
    arena = InProcessWriter().arena
    first = bench.checkpointer(link=InProcessWriter(arena=arena))
    first.prepare(state(0))
    first.save(1, state(1), {"position": 8})
    first.wait()
    (bench.folder(1) / "COMMIT").unlink()
    again, target = bench.checkpointer(link=InProcessWriter(arena=arena)), blank()
    again.prepare(target)
    restored = loaded(again.restore(target))
    assert (restored.step, restored.tier, restored.extra) == (1, "memory", {"position": 8})
    assert same(target, state(1))
    assert again.committed_step is None, "no disk has it"
    concurrent.futures.wait([again._link.ping()], 5)  # type: ignore[union-attr]


def test_failures_of_many_ranks_become_one_that_names_two_of_them() -> None:
    failed = [None, *(Failed(f"no space left on rank {rank}", stuck=rank == 9) for rank in range(1, 64))]
    reason = "rank 1: no space left on rank 1; rank 2: no space left on rank 2; and 61 more rank(s)"
    assert Failed.combine(failed) == Failed(reason, stuck=True)
    assert Failed.combine([None, None]) is None


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Bench]:
    with small_tmpfs(tmp_path / "tiny", "1m") as folder:
        bench = Bench(folder)
        yield bench
        for made in bench.made:
            made.close()


def test_training_goes_on_and_the_next_save_works(tiny: Bench) -> None:
    made = tiny.checkpointer(keep=2)
    small, large = {"x": torch.ones(1000)}, {"x": torch.ones(1 << 19)}
    for step, tensors in ((1, small), (2, large), (3, small)):
        made.save(step, tensors, {})
        made.wait()
    (failure,) = tiny.reported("checkpoint.failed")
    assert failure["step"] == 2
    assert "disk full ([Errno 28] No space left on device" in failure["reason"]
    assert sorted(path.name for path in tiny.root.iterdir()) == [tiny.folder(1).name, tiny.folder(3).name]
    target = {"x": torch.zeros(1000)}
    assert loaded(made.restore(target)).step == 3
    assert torch.equal(target["x"], small["x"])
