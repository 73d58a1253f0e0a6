"""What an earlier generation left in the arena: restored before any disk, after verification."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from checkpointing.engine.collectives.group import RankGroup
from checkpointing.engine.restore.own_layout import Memory
from checkpointing.engine.restore.restorer import Restored, RestoreOptions, Restorer
from checkpointing.engine.restore.source import OptionalKeys
from checkpointing.engine.state.save_plan import AgreedPlan, agree_on_plan, layout_for_budget
from checkpointing.errors import NothingVerifies
from checkpointing.format.manifest import FileEntry
from checkpointing.writer.arena import Arena, BufferRecord
from tests.checkpointing.engine.conftest import Bench, blank, loaded, same, state
from tests.checkpointing.made_checkpoint import OWNER, tier_at


class Generation:
    """An arena as the writer leaves it behind, and the restorer of the next generation."""

    def __init__(self, bench: Bench, arena: Arena) -> None:
        self.bench, self.arena = bench, arena
        self.plan: AgreedPlan = agree_on_plan(RankGroup(None), state(0), layout_for_budget(1, 0))
        arena.shape(self.plan.layout.buffer_bytes, 2, self.plan.hash, 4096)

    def hold(self, buffer: int, step: int) -> None:
        """Write `state(step)` into a buffer and publish its record."""
        memory = torch.frombuffer(self.arena.buffer(buffer), dtype=torch.uint8)
        for item in self.plan.layout.items:
            size = math.prod(item.shape) * item.dtype.itemsize
            memory[item.place : item.place + size].view(item.dtype).view(item.shape).copy_(state(step)[item.key])
        files = []
        for name, offset, size in self.plan.layout.files:
            files.append(FileEntry.from_bytes(name, self.arena.buffer(buffer)[offset : offset + size]))
        record = BufferRecord(
            step=step,
            plan=self.plan.hash,
            name=self.bench.folder(step).name,
            extra={"position": step * 8},
            files=tuple(files),
            places=tuple(offset for _, offset, _ in self.plan.layout.files),
        )
        self.arena.publish(buffer, record)

    def restore(self, target: dict[str, torch.Tensor], write_templates: Any = None, **options: Any) -> Restored | None:
        emit = lambda kind, data: self.bench.events.append((kind, data))  # noqa: E731
        memory = Memory(self.arena, options.pop("plan", self.plan), write_templates)
        place, choice = tier_at(self.bench.root), RestoreOptions(**options)
        restorer = Restorer([place], RankGroup(None), OWNER, emit, memory, choice)
        return restorer.run(target, OptionalKeys())


@pytest.fixture
def held(bench: Bench) -> Iterator[Generation]:
    arena = Arena.create()
    yield Generation(bench, arena)
    arena.close()


def test_the_newest_in_memory_is_restored_without_a_disk(held: Generation) -> None:
    held.hold(0, 5)
    held.hold(1, 6)
    target = blank()
    restored = loaded(held.restore(target))
    assert (restored.step, restored.tier, restored.extra) == (6, "memory", {"position": 48})
    assert (restored.name, restored.bytes_read) == (held.bench.folder(6).name, 0)
    assert same(target, state(6))
    assert held.bench.reported("checkpoint.restored")[0]["tier"] == "memory"


def test_at_the_same_step_memory_comes_before_disk_and_newer_disk_before_memory(held: Generation) -> None:
    held.bench.saved(5)
    held.hold(0, 5)
    assert held.restore(blank()).tier == "memory"  # type: ignore[union-attr]
    held.bench.saved(7)
    target = blank()
    restored = loaded(held.restore(target))
    assert (restored.step, restored.tier) == (7, str(held.bench.root))
    assert same(target, state(7))


@pytest.mark.parametrize("where", [0, 700, -1])
def test_a_flipped_bit_in_memory_is_refused_and_the_disk_used(held: Generation, where: int) -> None:
    held.bench.saved(4)
    held.hold(0, 5)
    _, offset, size = held.plan.layout.files[-1]
    held.arena.buffer(0)[offset + where % size] ^= 16
    target = blank()
    restored = loaded(held.restore(target))
    assert (restored.step, restored.tier) == (4, str(held.bench.root))
    assert same(target, state(4))
    (refusal,) = held.bench.reported("checkpoint.refused")
    assert (refusal["step"], refusal["tier"]) == (5, "memory")
    assert "digest differs" in refusal["reason"]
    assert held.arena.record(0) is None, "it is not offered again"


def test_when_memory_is_damaged_and_there_is_nothing_else_no_tensor_changes(held: Generation) -> None:
    held.hold(0, 5)
    held.arena.buffer(0)[1000] ^= 1
    target = blank()
    with pytest.raises(NothingVerifies, match="digest differs"):
        held.restore(target)
    assert all(not tensor.any() for tensor in target.values())


@pytest.mark.parametrize("where", [0, 700, 5000, -1])
def test_a_checkpoint_of_the_own_layout_is_verified_too_before_any_tensor_changes(held: Generation, where: int) -> None:
    held.bench.saved(5)
    shard = held.bench.folder(5) / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[where] ^= 2
    shard.write_bytes(data)
    target, laid = blank(), list[int]()
    with pytest.raises(NothingVerifies, match="__0_0.distcp chunk 0: digest differs"):
        held.restore(target, laid.append)
    assert all(not tensor.any() for tensor in target.values())
    assert laid == [0], "what landed there is no frame"


def test_the_own_layout_is_known_by_its_index(held: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    """No index is read then; a checkpoint of another layout has to be planned for."""
    monkeypatch.setattr("checkpointing.engine.restore.restorer.read_index", lambda *_: pytest.fail("read the index"))
    held.bench.saved(5)
    target = blank()
    loaded(held.restore(target))
    assert same(target, state(5))
    monkeypatch.undo()
    made = held.bench.checkpointer()
    made.save(6, {**state(6), "model.more": torch.ones(3)}, {})
    made.wait()
    target = blank()
    assert loaded(held.restore(target)).step == 6
    assert same(target, state(6))


def test_an_index_of_equal_length_is_not_mistaken_for_the_own_one(held: Generation) -> None:
    other = {key.replace("model.mask", "model.mosk"): tensor for key, tensor in state(5).items()}
    made = held.bench.checkpointer()
    made.save(5, other, {})
    made.wait()
    with pytest.raises(NothingVerifies, match=r"has no tensor model\.mask"):
        held.restore(blank())


def test_other_tensors_than_were_planned_for_are_looked_up(held: Generation) -> None:
    held.bench.saved(5)
    some = {"model.weight": torch.zeros(64, 33), "rng/rank-00007": torch.ones(2)}
    assert loaded(held.restore(some)).absent == ("rng/rank-00007",)
    assert torch.equal(some["model.weight"], state(5)["model.weight"])


def test_a_record_that_is_torn_or_of_another_layout_is_ignored(held: Generation) -> None:
    held.hold(0, 5)
    assert held.restore(blank(), plan=replace(held.plan, hash="0" * 32)) is None
    held.arena.clear(0)
    assert held.restore(blank()) is None


def test_a_target_that_does_not_fit_is_refused(held: Generation) -> None:
    held.hold(0, 5)
    target = {**blank(), "model.weight": torch.zeros(33, 64)}
    with pytest.raises(NothingVerifies, match="model.weight has shape"):
        held.restore(target)


def test_suspects_are_skipped_while_another_exists(held: Generation) -> None:
    held.hold(0, 5)
    held.hold(1, 6)
    assert loaded(held.restore(blank(), suspects={6})).step == 5
    (reported,) = held.bench.reported("checkpoint.suspect")
    assert reported["step"] == 6
    last = held.restore(blank(), suspects={5, 6})
    assert last is not None
    assert last.step == 6, "better a suspect than nothing"


def test_buffers_are_lent_to_land_in_unless_they_hold_a_candidate(held: Generation) -> None:
    held.bench.saved(8)
    held.hold(0, 5)
    laid: list[int] = []
    before_it = bytes(held.arena.buffer(0))
    target = blank()
    assert loaded(held.restore(target, laid.append)).step == 8
    assert same(target, state(8))
    assert laid == [1]
    assert bytes(held.arena.buffer(0)) == before_it
    assert held.arena.record(0) is not None


def test_a_lent_buffer_is_cleaned_between_its_records(held: Generation) -> None:
    """The padding of a file is written with every checkpoint from the buffer."""
    made = held.bench.checkpointer()
    made.save(6, {**state(6), "model.more": torch.ones(3)}, {})
    made.wait()
    memory = torch.frombuffer(held.arena.buffer(0), dtype=torch.uint8)
    memory.fill_(255)
    assert loaded(held.restore(blank(), lambda _: None)).step == 6
    for item in held.plan.layout.items:
        start = item.place - (item.piece.data - item.piece.start)
        memory[start : start + item.piece.length] = 0
    assert not memory[: sum(size for *_, size in held.plan.layout.files)].any()


def test_nothing_is_lent_where_frames_cannot_be_rewritten(held: Generation) -> None:
    held.bench.saved(8)
    before_it = [bytes(held.arena.buffer(at)) for at in (0, 1)]
    assert loaded(held.restore(blank())).step == 8
    assert [bytes(held.arena.buffer(at)) for at in (0, 1)] == before_it
