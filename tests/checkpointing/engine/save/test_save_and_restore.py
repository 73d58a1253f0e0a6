"""A single rank saves, restores, falls back, cleans up and reports."""

import errno
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpointing.engine.restore.source import OptionalKeys
from checkpointing.errors import NothingFits, NothingVerifies
from checkpointing.format.commit import read_commit
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.digests import digest
from checkpointing.storage.durable import number
from checkpointing.tiers.catalog import Catalog
from tests.checkpointing.engine.conftest import Bench, blank, loaded, same, state
from tests.checkpointing.fake_storages import Faulty, full_after


def test_saved_tensors_are_restored_bit_by_bit(bench: Bench) -> None:
    made = bench.saved(5)
    target = blank()
    restored = loaded(made.restore(target))
    assert (restored.step, restored.extra, restored.name) == (5, {"position": 40}, bench.folder(5).name)
    assert same(target, state(5))
    assert bench.kinds() == ["checkpoint.saving", "checkpoint.committed", "checkpoint.restored"]
    assert made.committed_step == 5


def test_events_carry_the_agreed_keys(bench: Bench) -> None:
    bench.saved(1, 2, 3, keep=2)
    bench.checkpointer().restore(blank())
    keys = {kind: set(data) for kind, data in bench.events}
    assert keys == {
        "checkpoint.saving": {"step", "name"},
        "checkpoint.committed": {"step", "name", "bytes", "seconds", "manifest"},
        "checkpoint.deleted": {"step", "name", "tier"},
        "checkpoint.restored": {"step", "name", "seconds", "tier"},
    }


def test_a_commit_is_reported_with_the_digest_of_its_manifest(bench: Bench) -> None:
    """The digest tells later whether a folder of this name is still the same checkpoint."""
    bench.saved(1, 2)
    reported = {data["name"]: data["manifest"] for data in bench.reported("checkpoint.committed")}
    storage = LocalStorage(bench.root)
    assert reported == {
        bench.folder(step).name: read_commit(storage, bench.folder(step).name).manifest for step in (1, 2)
    }
    assert reported[bench.folder(1).name] == digest((bench.folder(1) / "manifest.json").read_bytes())


def test_the_newest_checkpoint_is_restored(bench: Bench) -> None:
    target = blank()
    assert loaded(bench.saved(5, 10, 15).restore(target)).step == 15
    assert same(target, state(15))


def test_an_empty_folder_is_no_error(bench: Bench) -> None:
    assert bench.checkpointer().restore(blank()) is None
    assert bench.events == []


def test_nan_infinity_and_negative_zero_survive(bench: Bench) -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.0])
    made = bench.checkpointer()
    made.save(1, {"x": values}, {"loss": math.nan, "lr": 0.1 + 0.2})
    target = {"x": torch.zeros(6)}
    restored = loaded(made.restore(target))
    assert target["x"].view(torch.int32).tolist() == values.view(torch.int32).tolist()
    assert math.isnan(number(restored.extra["loss"]))
    assert restored.extra["lr"] == 0.1 + 0.2


def test_tensors_with_unusual_memory_are_saved_by_value(bench: Bench) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    odd = {"t": base.t(), "slice": base[1:3, ::2], "wide": torch.ones(1).expand(5), "param": torch.nn.Parameter(base)}
    made = bench.checkpointer()
    made.save(1, odd, {})
    target = {key: torch.zeros(tensor.shape) for key, tensor in odd.items()}
    target["param"] = torch.nn.Parameter(torch.zeros(4, 6))
    made.restore(target)
    assert all(torch.equal(target[key], odd[key]) for key in odd)
    assert target["param"].requires_grad
    assert sum(file.stat().st_size for file in bench.folder(1).glob("*.distcp")) <= 8192, "whole storages were written"


def test_a_save_keeps_the_values_of_its_moment(bench: Bench) -> None:
    """Training goes on, and the next save is asked for, while the writer has not even begun."""
    storage = Faulty(bench.root, hung=lambda operation: operation.startswith("create"))
    made = bench.checkpointer(storage=storage)
    weights = {"w": torch.zeros(1000)}
    extra = {"position": [1]}
    made.save(1, weights, extra)
    weights["w"].fill_(7.0)
    extra["position"].append(2)
    storage.healed.set()
    made.save(2, weights, extra)
    weights["w"].fill_(9.0)
    made.wait()
    for step, value, position in ((2, 7.0, [1, 2]), (1, 0.0, [1])):
        target = {"w": torch.full((1000,), -1.0)}
        restored = loaded(bench.checkpointer().restore(target))
        assert (restored.step, restored.extra) == (step, {"position": position})
        assert torch.equal(target["w"], torch.full((1000,), value))
        (bench.folder(step) / "COMMIT").unlink()


@pytest.mark.parametrize(
    ("tensors", "extra", "error"),
    [
        ({"x": 5}, {}, "is not a tensor"),
        ({"x": torch.ones(3).to_sparse()}, {}, "only dense"),
        ({}, {"x": object()}, "must be plain JSON"),
        ({}, {"x": {1, 2}}, "must be plain JSON"),
        ({}, {"x": "caf\udce9.txt"}, "`extra` must be plain JSON: .* surrogates not allowed"),
    ],
)
def test_the_caller_learns_what_cannot_be_saved(bench: Bench, tensors: Any, extra: Any, error: str) -> None:
    made = bench.checkpointer()
    with pytest.raises((TypeError, ValueError), match=error):
        made.save(1, tensors, extra)
    assert list(bench.root.iterdir()) == []


# ---- what a checkpoint must have


def test_process_local_keys_may_be_absent(bench: Bench) -> None:
    made = bench.saved(5)
    target = {**blank(), "rng/rank-00007": torch.full((3,), 4.0)}
    assert loaded(made.restore(target)).absent == ("rng/rank-00007",)
    assert torch.equal(target.pop("rng/rank-00007"), torch.full((3,), 4.0))
    assert same(target, state(5))


def test_other_prefixes_can_be_made_optional(bench: Bench) -> None:
    made = bench.saved(5)
    restored = loaded(made.restore({"ema.weight": torch.zeros(2)}, OptionalKeys(alone=("ema.",))))
    assert restored.absent == ("ema.weight",)


def test_a_folder_of_keys_may_only_be_absent_completely(bench: Bench) -> None:
    made = bench.checkpointer()
    made.save(1, {"optim/a/m": torch.ones(2), "optim/a/v": torch.ones(2)}, {})
    whole = {"optim/a/m": torch.zeros(2), "optim/b/m": torch.zeros(2), "optim/b/v": torch.zeros(2)}
    assert loaded(made.restore(whole, OptionalKeys(together=("optim/",)))).absent == ("optim/b/m", "optim/b/v")
    with pytest.raises(NothingVerifies, match="has no tensor optim/a/w"):
        made.restore({"optim/a/m": torch.zeros(2), "optim/a/w": torch.zeros(2)}, OptionalKeys(together=("optim/",)))
    with pytest.raises(NothingVerifies, match="has no tensor other/a/m"):
        made.restore({"other/a/m": torch.zeros(2)}, OptionalKeys(together=("other/",)))


def test_no_shard_is_ever_unpickled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> torch.Tensor:
        raise pickle.UnpicklingError("a shard reached an unpickler")

    bench.saved(5)
    monkeypatch.setattr(torch, "load", load)
    target = blank()
    assert loaded(bench.checkpointer().restore(target)).step == 5
    assert same(target, state(5))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model.extra": torch.zeros(2)}, "has no tensor model.extra"),
        ({"model.weight": torch.zeros(33, 64)}, "model.weight has shape (64, 33), (33, 64) here"),
        ({"model.half": torch.zeros(17)}, "model.half is torch.bfloat16, torch.float32 here"),
    ],
)
def test_a_misfit_is_refused_before_anything_is_touched(bench: Bench, change: dict[str, Any], reason: str) -> None:
    bench.saved(5)
    target = {**blank(), **change}
    with pytest.raises(NothingFits, match="none of which can be loaded") as raised:
        bench.checkpointer().restore(target)
    assert reason in str(raised.value)
    reported = {"step": 5, "name": bench.folder(5).name, "reason": reason, "damaged": False}
    assert bench.reported("checkpoint.refused") == [reported]
    assert all(not tensor.any() for tensor in target.values())


# ---- attempts, generations, retention


def test_a_new_attempt_inherits_what_its_token_lists(bench: Bench) -> None:
    bench.saved(5, 10)
    later = bench.checkpointer(attempt=2, nonce="22222222", inherit=(bench.folder(5).name,))
    assert loaded(later.restore(blank())).step == 5


def test_a_restart_in_place_never_writes_into_an_old_folder(bench: Bench) -> None:
    bench.saved(5, 10)
    half = bench.folder(10)
    (half / "COMMIT").unlink()  # the first generation was killed in mid-save
    (half / "notes").mkdir()  # it cannot be collected: it has a foreign folder in it
    (half / "notes" / "mine").write_text("keep me")
    again = bench.checkpointer()
    assert loaded(again.restore(blank())).step == 5
    again.save(10, state(11), {})
    again.wait()
    target = blank()
    assert loaded(again.restore(target)).name == f"{half.name}-2"
    assert same(target, state(11))
    assert (half / "notes" / "mine").exists()


def test_retention_keeps_the_newest(bench: Bench) -> None:
    bench.saved(1, 2, 3, 4, 5, keep=2)
    assert [entry.step for entry in Catalog(bench.root).committed_entries()] == [5, 4]
    assert [data["step"] for data in bench.reported("checkpoint.deleted")] == [1, 2, 3]


def test_retention_leaves_alone_what_is_not_its_own(bench: Bench) -> None:
    bench.saved(1, 2, 3, keep=9)
    (bench.root / "notes").mkdir()
    later = bench.checkpointer(attempt=2, nonce="22222222", inherit=(bench.folder(3).name,), keep=2)
    for step in (4, 5):
        later.save(step, state(step), {})
    later.wait()
    assert sorted(path.name[:13] for path in bench.root.iterdir()) == [
        "notes", "step-00000001", "step-00000002", "step-00000004", "step-00000005",
    ]  # fmt: skip


def test_a_refused_checkpoint_is_no_substitute_for_a_healthy_one(bench: Bench) -> None:
    bench.saved(1, 2, 9)
    (bench.folder(9) / "__0_0.distcp").write_bytes(b"rot")
    again = bench.checkpointer(keep=2)
    assert loaded(again.restore(blank())).step == 2
    for step in (3, 4):
        again.save(step, state(step), {})
    again.wait()
    assert [entry.step for entry in Catalog(bench.root).committed_entries()] == [9, 4, 3]


def test_without_the_fence_nothing_is_committed_or_deleted(bench: Bench) -> None:
    holds = [True]
    made = bench.checkpointer(fence=lambda: holds[0], keep=2)
    for step in (1, 2):
        made.save(step, state(step), {})
    made.wait()
    holds[0] = False
    made.save(3, state(3), {})
    made.wait()
    assert [entry.step for entry in Catalog(bench.root).committed_entries()] == [2, 1]
    assert bench.kinds()[-1] == "checkpoint.failed"
    assert bench.events[-1][1]["reason"].startswith("fenced off: the launch token")
    assert bench.folder(3).exists(), "who lost the fence must not even tidy up"
    assert made.committed_step == 2


# ---- failures


FAILING = [
    *((act, file) for act in ("create", "write", "fsync") for file in ("__0_0.distcp", ".metadata", "index.json")),
    ("publish", "manifest.json"),
    ("publish", "COMMIT"),
]


@pytest.mark.parametrize(("operation", "file"), FAILING)
def test_a_failed_save_is_reported_and_cleaned_up_and_the_next_one_works(
    bench: Bench, operation: str, file: str
) -> None:
    storage = Faulty(bench.root)
    made = bench.saved(1, storage=storage)
    storage.broken = lambda at, written: errno.ENOSPC if at.startswith(operation) and at.endswith(file) else 0
    made.save(2, state(2), {})
    made.wait()
    storage.broken = lambda at, written: 0
    assert bench.kinds()[-2:] == ["checkpoint.saving", "checkpoint.failed"]
    failure = bench.events[-1][1]
    assert failure["step"] == 2
    assert "disk full ([Errno 28] No space left on device" in failure["reason"]
    assert not bench.folder(2).exists()
    assert made.committed_step == 1
    made.save(3, state(3), {})
    target = blank()
    assert loaded(made.restore(target)).step == 3
    assert same(target, state(3))


def test_a_disk_that_fills_up_within_a_tensor_is_reported_as_full(bench: Bench) -> None:
    made = bench.checkpointer(storage=Faulty(bench.root, full_after(1 << 20)))
    made.save(1, {"big": torch.ones(1 << 20)}, {})
    made.wait()
    (failure,) = bench.reported("checkpoint.failed")
    assert failure["reason"].startswith("rank 0: disk full ([Errno 28]")
    assert list(bench.root.iterdir()) == []


def test_an_event_that_cannot_be_written_is_reported_later(bench: Bench) -> None:
    full = [True]

    def emit(kind: str, data: dict[str, Any]) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        bench.events.append((kind, data))

    made = bench.saved(1, emit=emit)
    assert bench.events == []
    assert made.committed_step == 1
    full[0] = False
    made.wait()
    assert bench.kinds() == ["checkpoint.saving", "checkpoint.committed"]


def test_an_unreadable_folder_is_not_a_fresh_start(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench.saved(1)

    def listing(path: str) -> dict[str, int | None]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Catalog(bench.root).storage.__class__, "list", lambda self, path: listing(path))
    with pytest.raises(NothingVerifies, match="Input/output error"):
        made.restore(blank())


# ---- others can read it


# Plain DCP warns when no process group is there; that is its note about itself.
ALONE = "ignore:torch.distributed is disabled:UserWarning"


@pytest.mark.filterwarnings(ALONE)
def test_plain_dcp_reads_a_checkpoint(bench: Bench) -> None:
    bench.saved(5)
    target = blank()
    dcp.load(target, checkpoint_id=str(bench.folder(5)))
    assert same(target, state(5))


@pytest.mark.filterwarnings(ALONE)
def test_a_nested_state_dict_reads_dotted_names(bench: Bench) -> None:
    bench.saved(5)
    target = {"model": {"weight": torch.zeros(64, 33)}}
    dcp.load(target, checkpoint_id=str(bench.folder(5)))
    assert torch.equal(target["model"]["weight"], state(5)["model.weight"])


def test_the_converter_of_torch_reads_a_checkpoint(bench: Bench, tmp_path: Path) -> None:
    bench.saved(5)
    dcp_to_torch_save(bench.folder(5), tmp_path / "whole.pt")
    assert same(torch.load(tmp_path / "whole.pt", weights_only=True), state(5))
