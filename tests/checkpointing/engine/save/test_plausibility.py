"""A state that cannot be right is not saved as if it were."""

import errno
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing.config import CheckpointConfig
from checkpointing.engine.state.fingerprints import fingerprint
from checkpointing.engine.state.inspection import Findings, Inspection, TrainedKeys
from checkpointing.engine.state.layout import Share, lay_out
from checkpointing.engine.state.plausibility import StateSummary, highest, implausible_reasons
from checkpointing.format.index import FINGERPRINTS, parse_fingerprints
from checkpointing.storage.backends import LocalStorage
from checkpointing.tiers.catalog import Catalog
from checkpointing.writer.arena import Record
from checkpointing.writer.link import InProcessWriter
from tests.checkpointing.engine.conftest import Bench, state


def summary(step: int, optimizer: float | None = None, left_out: int = 0, **fingerprints: str) -> StateSummary:
    return StateSummary(step=step, left_out=left_out, optimizer_step=optimizer, fingerprints=fingerprints)


# ---- the rules


@pytest.mark.parametrize(
    ("now", "before", "broken", "reason"),
    [
        (summary(2), summary(1), [("model/w", 3), ("model/a", 1), ("model/w", 2)], "infinite in model/a (1), model/w (5)"),  # noqa: E501
        (summary(2), summary(1), [(f"model/{n}", 1) for n in range(6)], "model/3 (1) and 2 more tensors"),
        (summary(9, 5.0), summary(6, 3.0), [], "since step 6 the trainer counts 3 steps, the optimizer 2"),
        (summary(9, 3.0), summary(6, 3.0), [], "since step 6 the trainer counts 3 steps, the optimizer 0"),
        (summary(2, w="a", v="b"), summary(1, w="a", v="b"), [], "all 2 tensors that train are the same as at step 1"),
        (summary(9, 4.0, 2), summary(6, 4.0, 1), [], "trainer counts 2 steps and 1 that it left out, the optimizer 0"),
        (summary(9, 5.0, 4), summary(6, 4.0, 1), [], "trainer counts 0 steps and 3 that it left out, the optimizer 1"),
        (summary(9, left_out=3, w="a"), summary(6, left_out=1, w="a"), [], "tensors that train are the same"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_named(
    now: StateSummary, before: StateSummary, broken: list[tuple[str, int]], reason: str
) -> None:
    (told,) = implausible_reasons(now, before, broken)
    assert reason in told


@pytest.mark.parametrize(
    ("now", "before"),
    [
        (summary(9, 6.0, w="b"), summary(6, 3.0, w="a")),
        (summary(9, 100.0), None),
        (summary(9, 3.0), summary(6)),
        (summary(6, 3.0, w="a"), summary(6, 3.0, w="a")),
        (summary(9, w="a"), summary(6, w="b")),
        (summary(9), summary(6)),
        (summary(9, 4.0, 2, w="b"), summary(6, 2.0, 1, w="a")),
        (summary(9, 4.0, 5, w="a"), summary(6, 4.0, 2, w="a")),
    ],
)
def test_what_may_be_right_is_not_doubted(now: StateSummary, before: StateSummary | None) -> None:
    assert implausible_reasons(now, before, []) == []


def test_the_highest_count_of_all_ranks_counts() -> None:
    assert highest([None, 3.0, 5.0]) == 5.0
    assert highest([None, None]) is None


# ---- a look at bytes


def findings(tensors: dict[str, torch.Tensor], watched: TrainedKeys | None = None) -> Findings:
    shares = [
        Share(key, tensor.dtype, tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape), (0,) * tensor.dim())
        for key, tensor in tensors.items()
    ]
    layout = lay_out(shares, 0, 1)
    memory = torch.zeros(layout.buffer_bytes, dtype=torch.uint8)
    for item in layout.items:
        memory[item.place : item.place + item.piece.nbytes].view(item.dtype).view(item.shape).copy_(tensors[item.key])
    inspection = Inspection(watched or TrainedKeys())
    inspection.inspect(memory, layout.items)
    report = inspection.report()
    numbers = torch.frombuffer(bytearray(report.partials), dtype=torch.int32).view(-1, 2).tolist()
    for item, (rows, columns) in zip(layout.items, numbers, strict=True):
        assert f"{rows % 2**32:08x}{columns % 2**32:08x}" == fingerprint(tensors[item.key]), item.key
    return report.findings


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


def test_infinities_that_cancel_out_are_found() -> None:
    tensor = torch.ones(1000)
    tensor[3], tensor[900] = math.inf, -math.inf
    assert findings({"optimizer/w/exp_avg": tensor}).broken == (("optimizer/w/exp_avg", 2),)


def test_large_finite_values_and_other_keys_are_no_fault() -> None:
    huge = {"model/a": torch.full((1000,), 3e38), "model/h": torch.full((1000,), 6e4, dtype=torch.float16)}
    assert (
        findings({**huge, "rng/x": torch.tensor([math.nan]), "model/n": torch.ones(3, dtype=torch.int64)}).broken == ()
    )


def test_the_optimizers_steps_are_read_from_the_bytes() -> None:
    steps = {f"optimizer/p{n}/step": torch.tensor(float(n)) for n in range(5)}
    assert findings({**steps, "model/step": torch.tensor(99.0)}).optimizer_step == 4.0
    assert findings({"optimizer/p/step": torch.tensor(7)}).optimizer_step == 7.0
    assert findings({"optimizer/p/exp": torch.ones(3)}).optimizer_step is None


def test_an_empty_tensor_is_nothing_to_look_at() -> None:
    assert findings({"model/none": torch.empty(0, 4), "model/x": torch.ones(2)}).broken == ()


# ---- whole saves


def training(step: int) -> dict[str, torch.Tensor]:
    return {"model/w": torch.full((40, 3), float(step)), "optimizer/w/step": torch.tensor(float(step))}


def saved(made: Any, step: int, tensors: dict[str, torch.Tensor], left_out: int = 0) -> str | None:
    assert made.save(step, tensors, {}, left_out=left_out)
    made.wait()
    return made.failure


def test_fingerprints_are_written_with_every_checkpoint(bench: Bench) -> None:
    bench.saved(5)
    told = parse_fingerprints((bench.folder(5) / FINGERPRINTS).read_bytes())
    assert told == {key: fingerprint(tensor) for key, tensor in state(5).items()}


def test_a_nan_is_refused_with_its_tensor_and_the_next_good_state_is_saved(bench: Bench) -> None:
    made = bench.checkpointer(pauses=(0.0,))
    assert saved(made, 1, training(1)) is None
    bad = training(2)
    bad["model/w"][5, 1] = math.nan
    assert saved(made, 2, bad) == "implausible: values that are NaN or infinite in model/w (1)"
    assert bench.kinds()[-1] == "checkpoint.failed", "trying again cannot help"
    assert not bench.folder(2).exists()
    assert saved(made, 3, training(3)) is None
    assert [entry.step for entry in Catalog(bench.root).committed()] == [3, 1]


def test_an_implausible_state_is_not_left_in_memory_either(bench: Bench) -> None:
    made = bench.checkpointer()
    saved(made, 1, training(1))
    bad = training(2)
    bad["model/w"][5, 1] = math.inf
    saved(made, 2, bad)
    target = {key: torch.zeros_like(tensor) for key, tensor in bad.items()}
    restored = made.restore(target)
    assert restored is not None
    assert (restored.step, restored.tier) == (1, "memory")


class LateOnOneFile(LocalStorage):
    """A disk that keeps the data waiting until the test lets go, and may then be full."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate, self.full = threading.Event(), False
        self.gate.set()

    def create(self, path: str) -> Any:
        if path.endswith(".distcp"):
            self.gate.wait(20)
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(path)


def test_it_leaves_memory_before_the_disk_is_done(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is restarted while a slow disk still writes it must not find it."""
    storage = LateOnOneFile(bench.root)
    link, cleared = InProcessWriter(storage), threading.Event()
    made = bench.checkpointer(storage=storage, link=link)
    saved(made, 1, training(1))
    bad, clear = {**training(2), "model/w": torch.full((40, 3), math.nan)}, link.arena.clear
    made.prepare(bad)
    storage.gate.clear()

    def noted(at: int) -> None:
        clear(at)
        if threading.current_thread().name == "checkpoint-saves":  # not the writer, which clears what it publishes
            cleared.set()

    monkeypatch.setattr(link.arena, "clear", noted)
    assert made.save(2, bad, {})
    try:
        assert cleared.wait(10), "the disk has not answered yet"
    finally:
        storage.gate.set()
    made.wait()
    assert [record.step for at in range(2) if (record := link.arena.record(at))] == [1]


def test_it_leaves_memory_although_the_writer_vouches_for_it_late(
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

    def late(at: int, record: Record) -> None:
        assert cleared.wait(10)
        publish(at, record)

    monkeypatch.setattr(link.arena, "clear", noted)
    monkeypatch.setattr(link.arena, "publish", late)
    assert made.save(2, bad, {})
    made.wait()
    assert [record.step for at in range(2) if (record := link.arena.record(at))] == [1]


def test_a_full_disk_does_not_hide_that_it_is_implausible(bench: Bench) -> None:
    storage = LateOnOneFile(bench.root)
    link = InProcessWriter(storage)
    made = bench.checkpointer(storage=storage, link=link, pauses=(0.0,))
    storage.full = True
    bad = {**training(2), "model/w": torch.full((40, 3), math.nan)}
    assert saved(made, 2, bad) == "implausible: values that are NaN or infinite in model/w (120)"
    assert bench.told("checkpoint.retried") == []
    assert [link.arena.record(at) for at in range(2)] == [None, None]


def test_stale_weights_are_refused(bench: Bench) -> None:
    made = bench.checkpointer()
    same = {"model/w": torch.ones(40)}
    assert saved(made, 1, same) is None
    assert saved(made, 2, same) == "implausible: all 1 tensors that train are the same as at step 1"
    assert saved(made, 3, {"model/w": torch.zeros(40)}) is None


def test_an_optimizer_that_counts_otherwise_is_refused_across_a_restore(bench: Bench) -> None:
    assert saved(bench.checkpointer(), 10, training(10)) is None
    later = bench.checkpointer()
    target = {key: torch.zeros_like(tensor) for key, tensor in training(10).items()}
    later.restore(target)
    late = {**training(12), "optimizer/w/step": torch.tensor(10.0)}
    assert saved(later, 12, late) == "implausible: since step 10 the trainer counts 2 steps, the optimizer 0"
    early = {**training(13), "optimizer/w/step": torch.tensor(15.0)}
    assert saved(later, 13, early) == "implausible: since step 12 the trainer counts 1 steps, the optimizer 5"
    counted = {**training(14), "optimizer/w/step": torch.tensor(16.0)}
    assert saved(later, 14, counted) is None, "one save is lost, not all that follow"


def test_a_state_in_which_every_step_was_left_out_is_saved_across_a_restore(bench: Bench) -> None:
    """float16: all gradients since the last save have overflowed."""
    made, same = bench.checkpointer(), training(10)
    assert saved(made, 10, same, left_out=4) is None
    assert saved(made, 12, same, left_out=6) is None
    later = bench.checkpointer()
    later.restore({key: torch.zeros_like(tensor) for key, tensor in same.items()})
    assert saved(later, 13, same, left_out=1) is None, "counted from the restore on"
    assert bench.told("checkpoint.doubted") == []
    assert saved(later, 14, same, left_out=1) == (
        "implausible: since step 13 the trainer counts 1 steps, the optimizer 0; "
        "all 2 tensors that train are the same as at step 13"
    )


def test_after_a_refused_count_left_out_steps_are_counted_anew(bench: Bench) -> None:
    made = bench.checkpointer()
    assert saved(made, 10, training(10)) is None
    ahead = {**training(12), "optimizer/w/step": torch.tensor(15.0)}
    assert "the optimizer 5" in (saved(made, 12, ahead, left_out=1) or "")
    assert saved(made, 14, {**training(14), "optimizer/w/step": torch.tensor(16.0)}, left_out=2) is None
    assert bench.told("checkpoint.doubted") == []


def test_steps_that_the_optimizer_skips_are_told_of_and_saved(bench: Bench) -> None:
    made = bench.checkpointer()
    for step, count in ((10, 10.0), (20, 19.0), (30, 28.0), (40, 38.0)):
        assert saved(made, step, {**training(step), "optimizer/w/step": torch.tensor(count)}) is None
    assert bench.told("checkpoint.doubted") == [
        {"step": 20, "reason": "since step 10 the trainer counts 10 steps, the optimizer 9"},
        {"step": 30, "reason": "since step 20 the trainer counts 10 steps, the optimizer 9"},
    ]


def test_a_state_that_is_worse_than_miscounted_is_no_measure_for_the_next(bench: Bench) -> None:
    made = bench.checkpointer()
    assert saved(made, 10, training(10)) is None
    broken = {"model/w": torch.full((40, 3), math.nan), "optimizer/w/step": torch.tensor(500.0)}
    assert "NaN" in (saved(made, 20, broken) or "")
    assert saved(made, 30, training(30)) is None


def test_a_stale_part_passes(bench: Bench) -> None:
    assert saved(bench.checkpointer(), 10, training(10)) is None
    later = bench.checkpointer()
    target = {key: torch.zeros_like(tensor) for key, tensor in training(10).items()}
    later.restore(target)
    stale = {**training(12), "model/w": target["model/w"], "optimizer/w/step": torch.tensor(12.0)}
    assert saved(later, 12, stale) is None, "not all of it is the same"


def test_a_stale_copy_is_noticed_across_a_restore(bench: Bench) -> None:
    assert saved(bench.checkpointer(), 10, {"model/w": torch.ones(40)}) is None
    later = bench.checkpointer()
    target = {"model/w": torch.zeros(40)}
    later.restore(target)
    assert saved(later, 12, target) == "implausible: all 1 tensors that train are the same as at step 10"


def test_warn_saves_it_and_says_so(bench: Bench) -> None:
    made = bench.checkpointer(config=CheckpointConfig(plausibility="warn"))
    assert saved(made, 1, {"model/w": torch.tensor([math.nan])}) is None
    assert bench.kinds() == ["checkpoint.saving", "checkpoint.committed", "checkpoint.doubted"]
    assert bench.told("checkpoint.doubted") == [{"step": 1, "reason": "values that are NaN or infinite in model/w (1)"}]


def test_off_looks_for_nothing(bench: Bench) -> None:
    made = bench.checkpointer(config=CheckpointConfig(plausibility="off"))
    assert saved(made, 1, {"model/w": torch.tensor([math.nan])}) is None
    assert bench.kinds() == ["checkpoint.saving", "checkpoint.committed"]
