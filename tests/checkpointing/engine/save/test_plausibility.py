"""Implausible states are refused, reported or saved, as configured."""

import errno
import math
import threading
from typing import Any

import pytest
import torch

from checkpointing.config import CheckpointConfig
from checkpointing.engine.state.fingerprints import fingerprint
from checkpointing.engine.state.layout import Share, lay_out
from checkpointing.engine.state.plausibility import Inspection, InspectionReport, differing_reason, nan_reason
from checkpointing.errors import UnsavableState
from checkpointing.format.manifest import FINGERPRINTS, parse_fingerprints
from checkpointing.storage.backends import LocalStorage
from checkpointing.tiers.catalog import Catalog
from checkpointing.writer.arena import BufferRecord
from tests.checkpointing.engine.conftest import Bench, loaded, state
from tests.checkpointing.fake_storages import Faulty
from tests.checkpointing.in_process_writer import InProcessWriter

# ---- the rules


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ([("model/w", 3), ("model/a", 1), ("model/w", 2)], "NaN in trained weights: model/a (1), model/w (5)"),
        ([(f"model/{n}", 1) for n in range(6)], "model/3 (1) and 2 more tensors"),
        ([], ""),
    ],
)
def test_weights_that_are_nan_are_named(broken: list[tuple[str, int]], reason: str) -> None:
    assert nan_reason(broken).endswith(reason)


A, B = b"\0" * 8, b"\1" * 8


@pytest.mark.parametrize(
    ("replicas", "digests", "named"),
    [
        ([("w@0", "v@")], [A + B], ""),
        ([("w@0", "v@"), ("w@0", "v@")], [A + B, A + B], ""),
        ([("w@0", "v@"), ("w@0", "v@")], [A + B, A + A], "v (ranks 0 and 1)"),
        # Stages of a pipeline share other values than all ranks do.
        ([("a@",), ("b@",), ("b@",), ("a@",)], [A, B, A, A], "b (ranks 1 and 2)"),
        # Shards of one tensor differ, replicas of a shard do not.
        ([("w@0",), ("w@4",), ("w@0",), ("w@4",)], [A, B, A, B], ""),
        ([("w@0",), ("w@0",)], [A, b""], ""),
    ],
)
def test_replicas_that_differ_are_named(replicas: Any, digests: list[bytes], named: str) -> None:
    reason = differing_reason(replicas, digests)
    assert named in reason
    assert bool(reason) == bool(named)


# ---- a look at bytes


def findings(tensors: dict[str, torch.Tensor]) -> InspectionReport:
    shares = [
        Share(key, tensor.dtype, tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape), (0,) * tensor.dim())
        for key, tensor in tensors.items()
    ]
    layout = lay_out(shares, 0, 1)
    memory = torch.zeros(layout.buffer_bytes, dtype=torch.uint8)
    for item in layout.items:
        memory[item.place : item.place + item.piece.nbytes].view(item.dtype).view(item.shape).copy_(tensors[item.key])
    inspection = Inspection([key for key in tensors if key.startswith("model/")])
    inspection.inspect(memory, layout.items)
    report = inspection.report()
    numbers = torch.frombuffer(bytearray(report.partials), dtype=torch.int32).view(-1, 2).tolist()
    for item, (rows, columns) in zip(layout.items, numbers, strict=True):
        assert f"{rows % 2**32:08x}{columns % 2**32:08x}" == fingerprint(tensors[item.key]), item.key
    return report


FLOATS = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_bad_value_among_many_tensors_is_found_and_counted(dtype: torch.dtype) -> None:
    tensors = {f"model/{n}": torch.full((40, 30), 0.5).to(dtype) for n in range(20)}
    assert findings(tensors).broken == ()
    tensors["model/7"] = torch.full((40, 30), 0.5)
    tensors["model/7"][3, 4] = math.nan
    tensors["model/7"] = tensors["model/7"].to(dtype)
    assert findings(tensors).broken == (("model/7", 1),)


def test_infinities_and_untrained_nan_are_plausible() -> None:
    """A mask is -inf, an optimizer may begin with a smallest loss of inf, and a counter may be anything."""
    mask = torch.tensor([-math.inf, 0.0, math.inf])
    huge = {"model/a": torch.full((1000,), 3e38), "model/h": torch.full((1000,), 6e4, dtype=torch.float16)}
    others = {"rng/x": torch.tensor([math.nan]), "optimizer/w/least": torch.tensor([math.nan, math.inf])}
    assert findings({**huge, **others, "model/mask": mask, "model/n": torch.ones(3, dtype=torch.int64)}).broken == ()


def test_an_empty_tensor_is_plausible() -> None:
    assert findings({"model/none": torch.empty(0, 4), "model/x": torch.ones(2)}).broken == ()


# ---- whole saves


def training(step: int) -> dict[str, torch.Tensor]:
    return {"model/w": torch.full((40, 3), float(step)), "optimizer/w/step": torch.tensor(float(step))}


def saved(
    made: Any, step: int, tensors: dict[str, torch.Tensor], trained: tuple[str, ...] = ("model/w",)
) -> str | None:
    assert made.save(step, tensors, {}, trained=trained)
    made.wait()
    return made.failure


def test_fingerprints_are_written_with_every_checkpoint(bench: Bench) -> None:
    bench.saved(5)
    reported = parse_fingerprints((bench.folder(5) / FINGERPRINTS).read_bytes())
    assert reported == {key: fingerprint(tensor) for key, tensor in state(5).items()}


def test_a_nan_is_refused_with_its_tensor_and_the_next_good_state_is_saved(bench: Bench) -> None:
    made = bench.checkpointer(pauses=(0.0,))
    assert saved(made, 1, training(1)) is None
    bad = training(2)
    bad["model/w"][5, 1] = math.nan
    assert saved(made, 2, bad) == "NaN in trained weights: model/w (1)"
    assert bench.kinds()[-1] == "checkpoint.failed", "trying again cannot help"
    assert isinstance(made.lasting, UnsavableState)
    assert not bench.folder(2).exists()
    assert saved(made, 3, training(3)) is None
    assert [entry.step for entry in Catalog(bench.root).committed_entries()] == [3, 1]


def test_an_implausible_state_is_not_left_in_memory_either(bench: Bench) -> None:
    made = bench.checkpointer()
    saved(made, 1, training(1))
    bad = training(2)
    bad["model/w"][5, 1] = math.nan
    saved(made, 2, bad)
    target = {key: torch.zeros_like(tensor) for key, tensor in bad.items()}
    restored = loaded(made.restore(target))
    assert (restored.step, restored.tier) == (1, "memory")


def is_data(operation: str) -> bool:
    return operation.startswith("create") and operation.endswith(".distcp")


def test_an_implausible_state_leaves_memory_before_the_disk_is_done(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart while a slow disk still writes it must not find it."""
    storage = Faulty(bench.root, hung=is_data)
    storage.healed.set()
    link, cleared = InProcessWriter(storage), threading.Event()
    made = bench.checkpointer(storage=storage, link=link)
    saved(made, 1, training(1))
    bad, clear = {**training(2), "model/w": torch.full((40, 3), math.nan)}, link.arena.clear
    made.prepare(bad)
    storage.healed.clear()

    def noted(at: int) -> None:
        clear(at)
        if threading.current_thread().name == "checkpoint-saves":  # not the writer, which clears what it publishes
            cleared.set()

    monkeypatch.setattr(link.arena, "clear", noted)
    assert made.save(2, bad, {}, trained=["model/w"])
    try:
        assert cleared.wait(10), "the disk has not answered yet"
    finally:
        storage.healed.set()
    made.wait()
    assert [record.step for at in range(2) if (record := link.arena.record(at))] == [1]


def test_an_implausible_state_leaves_memory_although_its_record_comes_late(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, cleared = InProcessWriter(LocalStorage(bench.root)), threading.Event()
    made = bench.checkpointer(link=link)
    saved(made, 1, training(1))
    bad, clear, publish = (
        {**training(2), "model/w": torch.full((40, 3), math.nan)},
        link.arena.clear,
        link.arena.publish,
    )
    made.prepare(bad)

    def noted(at: int) -> None:
        clear(at)
        if threading.current_thread().name == "checkpoint-saves":
            cleared.set()

    def late(at: int, record: BufferRecord) -> None:
        assert cleared.wait(10)
        publish(at, record)

    monkeypatch.setattr(link.arena, "clear", noted)
    monkeypatch.setattr(link.arena, "publish", late)
    assert made.save(2, bad, {}, trained=["model/w"])
    made.wait()
    assert [record.step for at in range(2) if (record := link.arena.record(at))] == [1]


def test_a_full_disk_does_not_hide_an_implausible_state(bench: Bench) -> None:
    storage = Faulty(bench.root, lambda operation, _: errno.ENOSPC if is_data(operation) else 0)
    link = InProcessWriter(storage)
    made = bench.checkpointer(storage=storage, link=link, pauses=(0.0,))
    bad = {**training(2), "model/w": torch.full((40, 3), math.nan)}
    assert saved(made, 2, bad) == "NaN in trained weights: model/w (120)"
    assert bench.reported("checkpoint.retried") == []
    assert [link.arena.record(at) for at in range(2)] == [None, None]


@pytest.mark.parametrize("steps", [(10.0, 30.0, 31.0, 31.0, 5.0), (0.0, 0.0, 0.0, 0.0, 0.0)])
def test_what_a_healthy_program_may_do_is_saved(bench: Bench, steps: tuple[float, ...]) -> None:
    """Two updates in a step, none at all, a count that begins anew, weights that stay as they are."""
    made = bench.checkpointer()
    for number, count in enumerate(steps):
        state = {"model/w": torch.full((40,), float(number // 2)), "optimizer/w/step": torch.tensor(count)}
        assert saved(made, 10 * number + 1, state) is None
    made.restore({key: torch.zeros_like(tensor) for key, tensor in state.items()})
    assert saved(made, 100, state) is None, "nor across a restore"
    assert "checkpoint.doubted" not in bench.kinds()


def test_a_state_that_nothing_can_copy_is_named_and_lasts(bench: Bench) -> None:
    made = bench.checkpointer()
    for odd in (torch.ones(3, device="meta"), torch.ones(3).to_sparse()):
        with pytest.raises(ValueError, match="workload:odd"):
            made.save(1, {**training(1), "workload:odd": odd}, {})
    assert saved(made, 2, training(2)) is None


class Broken(InProcessWriter):
    """A writer with a bug."""

    def write(self, order: Any) -> Any:
        raise KeyError("buffer")


def test_only_disk_failures_are_retried(bench: Bench) -> None:
    made = bench.checkpointer(link=Broken(LocalStorage(bench.root)), pauses=(0.0,))
    assert "KeyError: 'buffer'" in (saved(made, 1, training(1)) or "")
    assert isinstance(made.lasting, UnsavableState)
    assert bench.reported("checkpoint.retried") == []


def test_warn_saves_an_implausible_state_and_reports_it(bench: Bench) -> None:
    made = bench.checkpointer(config=CheckpointConfig(plausibility="warn"))
    assert saved(made, 1, {"model/w": torch.tensor([math.nan])}) is None
    assert bench.kinds() == ["checkpoint.saving", "checkpoint.committed", "checkpoint.doubted"]
    assert bench.reported("checkpoint.doubted") == [{"step": 1, "reason": "NaN in trained weights: model/w (1)"}]


def test_off_checks_nothing(bench: Bench) -> None:
    made = bench.checkpointer(config=CheckpointConfig(plausibility="off"))
    assert saved(made, 1, {"model/w": torch.tensor([math.nan])}) is None
    assert bench.kinds() == ["checkpoint.saving", "checkpoint.committed"]
