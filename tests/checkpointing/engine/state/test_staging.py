"""Copies of a state are never torn, whatever the trainer does and however little memory there is."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpointing.config import CheckpointConfig, StagingConfig
from checkpointing.engine.collectives.group import RankGroup
from checkpointing.engine.state import staging
from checkpointing.engine.state.save_plan import agree_on_plan, layout_for_budget
from checkpointing.engine.state.staging import Stager, Structure
from checkpointing.tiers.catalog import Catalog
from checkpointing.writer.arena import Arena
from tests.checkpointing.engine.conftest import Bench, blank, same, state
from tests.checkpointing.fake_storages import Faulty
from tests.checkpointing.in_process_writer import InProcessWriter

LAZY = CheckpointConfig(staging=StagingConfig(mode="lazy"))
ALONE = "ignore:torch.distributed is disabled:UserWarning"


def loaded(bench: Bench, step: int, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint as plain DCP reads it."""
    target = {key: torch.zeros_like(tensor) for key, tensor in like.items()}
    dcp.load(target, checkpoint_id=str(bench.folder(step)))
    return target


# ---- recognizing a state


def test_the_same_structure_is_recognized_by_other_tensors() -> None:
    structure = Structure(state(1))
    again = state(2)
    parts = structure.match(again)
    assert parts is not None
    assert structure.fits(parts)
    assert all(part is tensor for part, tensor in zip(parts, again.values(), strict=True))


@pytest.mark.parametrize(
    "change",
    [
        {"model.weight": torch.zeros(33, 64)},
        {"model.weight": torch.zeros(64, 33, dtype=torch.float64)},
        {"model.new": torch.zeros(1)},
        {"model.weight": 5},
        {"model.weight": torch.zeros(64, 33).to_sparse()},
    ],
)
def test_another_structure_is_noticed(change: dict[str, Any]) -> None:
    assert Structure(state(1)).match({**state(1), **change}) is None


@pytest.mark.parametrize("other", [torch.zeros(9), torch.zeros(4, dtype=torch.float64), torch.zeros(4).bfloat16()])
def test_replaced_memory_of_a_tensor_is_noticed(other: torch.Tensor) -> None:
    tensor = torch.zeros(4)
    structure = Structure({"x": tensor})
    tensor.data = other
    parts = structure.match({"x": tensor})
    assert parts is not None
    assert not structure.fits(parts)
    assert structure.match({"x": tensor}) is None


@pytest.mark.filterwarnings(ALONE)
@pytest.mark.parametrize("config", [None, LAZY], ids=["block", "lazy"])
def test_values_in_new_memory_are_saved(bench: Bench, config: CheckpointConfig | None) -> None:
    made = bench.checkpointer(config=config)
    weight = torch.nn.Parameter(torch.zeros(50))
    for step in (1, 2, 3):
        weight.data = torch.full((50,), float(step))
        assert made.save(step, {"w": weight}, {})
        made.wait()
        assert torch.equal(loaded(bench, step, {"w": torch.zeros(50)})["w"], torch.full((50,), float(step)))


@pytest.mark.parametrize("config", [None, LAZY], ids=["block", "lazy"])
@pytest.mark.parametrize(
    "other", [torch.ones(9), torch.ones(2), torch.ones(1), torch.ones(4).double(), torch.ones(2, 4).bfloat16()], ids=str
)
def test_memory_of_another_form_fails_one_save_and_the_next_is_replanned(
    bench: Bench, config: CheckpointConfig | None, other: torch.Tensor
) -> None:
    made = bench.checkpointer(config=config, pauses=(0.0,))
    weight = torch.zeros(4)
    made.save(1, {"w": weight}, {})
    made.wait()
    weight.data = other
    made.save(2, {"w": weight}, {})
    made.wait()
    assert made.failure == "rank 0: tensors have been given different memory since the last save"
    assert bench.reported("checkpoint.retried") == []
    assert made.save(3, {"w": weight}, {})
    made.wait()
    assert [entry.step for entry in Catalog(bench.root).committed_entries()] == [3, 1]
    target = {"w": torch.zeros_like(other)}
    assert bench.checkpointer().restore(target) is not None
    assert torch.equal(target["w"], other)


# ---- torn states


class SlowCopy:
    """A copy that takes long: ends when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        true_copy = torch._foreach_copy_

        def copy(views: list[torch.Tensor], sources: list[torch.Tensor], **options: Any) -> Any:
            half = len(views) // 2
            true_copy(views[:half], sources[:half], **options)
            self.begun.set()
            self.go_on.wait(20)
            return true_copy(views[half:], sources[half:], **options)

        monkeypatch.setattr(staging.torch, "_foreach_copy_", copy)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.full((1000,), value) for n in range(8)}


def test_lazy_saves_return_immediately_and_delay_the_next_update(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made, tensors = bench.checkpointer(config=LAZY), weights(1.0)
    made.prepare(tensors)
    slow = SlowCopy(monkeypatch)
    assert made.save(1, tensors, {})
    assert slow.begun.wait(10)
    order: list[str] = []

    def trainer() -> None:
        made.before_optimizer_step()
        order.append("update")
        for tensor in tensors.values():
            tensor.fill_(2.0)

    thread = threading.Thread(target=trainer)
    thread.start()
    thread.join(0.05)
    order.append("copied")
    slow.go_on.set()
    thread.join(20)
    assert order == ["copied", "update"]
    made.wait()
    target = weights(0.0)
    assert bench.checkpointer().restore(target).step == 1  # type: ignore[union-attr]
    assert same(target, weights(1.0))


def test_a_trainer_that_does_not_wait_gets_no_torn_checkpoint(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made, tensors = bench.checkpointer(config=LAZY, pauses=(0.0,)), weights(1.0)
    made.prepare(tensors)
    slow = SlowCopy(monkeypatch)
    made.save(1, tensors, {})
    assert slow.begun.wait(10)
    for tensor in tensors.values():
        tensor.fill_(2.0)
    slow.go_on.set()
    made.wait()
    assert made.failure is not None
    assert made.failure.startswith("rank 0: torn: tensors were changed while they were copied")
    assert Catalog(bench.root).committed_entries() == []
    assert bench.checkpointer().restore(weights(0.0)) is None
    assert made.restore(weights(0.0)) is None, "nor is it in memory"
    assert made.save(2, tensors, {})
    made.wait()
    assert made.committed_step == 2


def test_a_change_at_any_moment_gives_a_complete_state_or_none(bench: Bench) -> None:
    """A real race: every tensor of a checkpoint must hold the same value."""
    made = bench.checkpointer(config=LAZY, keep=50)
    tensors = {f"w{n}": torch.zeros(100_000) for n in range(20)}
    for step in range(1, 16):
        made.save(step, tensors, {})
        if step % 3:
            made.before_optimizer_step()
        for tensor in tensors.values():
            tensor.add_(1.0)
        made.wait()
    for entry in Catalog(bench.root).committed_entries():
        target = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
        reader = bench.checkpointer(attempt=2, nonce="22222222", inherit=(entry.name,))
        assert reader.restore(target).step == entry.step  # type: ignore[union-attr]
        assert {float(value) for tensor in target.values() for value in tensor.unique()} == {float(entry.step - 1)}
    committed = {entry.step for entry in Catalog(bench.root).committed_entries()}
    assert {step for step in range(1, 16) if step % 3} <= committed


def test_a_buffer_that_is_being_filled_holds_no_checkpoint(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is killed now leaves no record of this buffer; the other buffer's stays."""
    link = InProcessWriter()
    made, tensors = bench.checkpointer(config=LAZY, link=link), weights(1.0)
    for step in (1, 2):
        assert made.save(step, tensors, {})
        made.wait()
    slow = SlowCopy(monkeypatch)
    made.save(3, tensors, {})
    assert slow.begun.wait(10)
    seen = Arena(link.arena.descriptor)  # mapped as by a later process
    records = [seen.record(at) for at in range(2)]
    slow.go_on.set()
    made.wait()
    assert sorted(record.step if record else 0 for record in records) == [0, 2]


def test_the_newest_copy_of_an_earlier_generation_is_overwritten_last(bench: Bench) -> None:
    arena = Arena.create()
    plan = agree_on_plan(RankGroup(None), state(0), layout_for_budget(1, 0))
    arena.shape(plan.layout.buffer_bytes, 2, plan.hash, 1 << 12)
    made = bench.checkpointer(link=InProcessWriter(arena=arena))
    for step in (1, 2, 3):
        made.save(step, state(step), {})
        made.wait()
    again = Stager(arena, plan, Structure(state(0)), "block")
    newest = max(range(2), key=lambda at: arena.record(at).step)  # type: ignore[union-attr]
    assert again.free.get() != newest
    again.close()


# ---- little memory


def capped(gib: float, files: int = 1) -> CheckpointConfig:
    return CheckpointConfig(staging=StagingConfig(host_memory=gib, files=files))


def test_one_copy_instead_of_two_when_two_do_not_fit(bench: Bench) -> None:
    tensors = {"w": torch.arange(1 << 20, dtype=torch.float32)}
    link = InProcessWriter()
    made = bench.checkpointer(link=link, config=capped(6 / 1024))
    assert made.save(1, tensors, {})
    made.wait()
    assert link.arena.buffers == 1
    assert link.arena.record(0) is not None


@pytest.mark.filterwarnings(ALONE)
def test_buckets_write_a_whole_checkpoint_that_plain_dcp_reads(bench: Bench) -> None:
    """Two windows of 512 KiB for 5 MiB of state, one tensor of it larger than a window."""
    draw = torch.Generator().manual_seed(1)
    tensors = {**state(3), "big": torch.randn(1000, 1024, generator=draw), "model/w/step": torch.tensor(1.0)}
    link = InProcessWriter()
    made = bench.checkpointer(link=link, config=capped(1 / 1024))
    assert made.save(1, tensors, {})
    for tensor in tensors.values():
        tensor.zero_()  # save has copied everything by now
    made.wait()
    assert made.failure is None
    draw = torch.Generator().manual_seed(1)
    expected = {**state(3), "big": torch.randn(1000, 1024, generator=draw), "model/w/step": torch.tensor(1.0)}
    assert link.arena.buffer_bytes * link.arena.buffers <= 1 << 20
    assert len(list(bench.folder(1).glob("*.distcp"))) > 5
    assert same(loaded(bench, 1, expected), expected)
    target = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    assert made.restore(target).tier == str(bench.root)  # type: ignore[union-attr]
    assert same(target, expected)


def test_a_failed_save_with_buckets_releases_its_caller(bench: Bench) -> None:
    storage = Faulty(bench.root, lambda act, _: 28 if act.startswith("create") and act.endswith("_3.distcp") else 0)
    made = bench.checkpointer(storage=storage, config=capped(1 / 1024), pauses=(0.0,))
    tensors = {"big": torch.ones(1000, 1024)}
    assert made.save(1, tensors, {})
    made.wait()
    assert made.failure is not None
    assert "disk full" in made.failure
    assert bench.reported("checkpoint.retried") == [], "the first buckets are gone"
    storage.broken = lambda *_: 0
    assert made.save(2, tensors, {})
    made.wait()
    assert made.committed_step == 2


@pytest.mark.filterwarnings(ALONE)
def test_several_files_for_one_rank(bench: Bench) -> None:
    made = bench.checkpointer(config=capped(0, files=3))
    assert made.save(5, state(5), {})
    made.wait()
    assert len(list(bench.folder(5).glob("*.distcp"))) == 3
    assert same(loaded(bench, 5, state(5)), state(5))
    target = blank()
    assert bench.checkpointer().restore(target) is not None
    assert same(target, state(5))


def test_the_thread_count_of_training_is_unchanged(bench: Bench) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        made = bench.checkpointer(config=LAZY)
        made.save(1, state(1), {})
        made.wait()
        assert torch.get_num_threads() == 2
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert found == [2]
    finally:
        torch.set_num_threads(before)
