"""DCP checkpoints of other programs: loaded only when trusted, and even then no code in them runs."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpointing.engine.collectives.group import RankGroup
from checkpointing.engine.restore.metadata_reader import foreign_names, open_foreign, parse_step
from checkpointing.engine.restore.restorer import Restored, RestoreOptions, Restorer
from checkpointing.engine.restore.source import OptionalKeys
from checkpointing.errors import CheckpointRefused, NothingVerifies, UnsafePickle
from checkpointing.storage.backends import LocalStorage
from checkpointing.tiers.catalog import Owner
from checkpointing.tiers.tier import RunTiers
from tests.checkpointing.engine.conftest import NONCE, Bench, blank, loaded, same, state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def foreign(root: Path, name: str, tensors: dict[str, Any]) -> Path:
    """A checkpoint as plain DCP writes it, with a path in its metadata as some versions leave it there."""
    dcp.save(tensors, checkpoint_id=root / name)
    return root / name


def restore(bench: Bench, target: dict[str, torch.Tensor], *, trust: bool = True, **lack: Any) -> Restored | None:
    owner = Owner(1, NONCE, (), lambda: True)

    def emit(kind: str, data: dict[str, Any]) -> None:
        bench.events.append((kind, data))

    tiers, options = RunTiers.single(bench.root).tiers, RestoreOptions(trust_foreign=trust)
    restorer = Restorer(tiers, RankGroup(None), owner, emit, options=options)
    return restorer.run(target, OptionalKeys(**lack))


def test_a_foreign_checkpoint_is_not_opened_without_trust(bench: Bench) -> None:
    foreign(bench.root, "step-100", state(3))
    target = blank()
    assert restore(bench, target, trust=False) is None
    assert all(not tensor.any() for tensor in target.values())
    assert bench.events == []


def test_with_trust_values_are_loaded_and_reported_as_unverified(bench: Bench) -> None:
    foreign(bench.root, "step-90", state(2))
    foreign(bench.root, "step-100", state(3))
    target = blank()
    restored = loaded(restore(bench, target))
    assert (restored.step, restored.name, restored.verified, restored.extra) == (100, "step-100", False, {})
    assert same(target, state(3))
    (reported,) = bench.reported("checkpoint.restored")
    assert reported["verified"] is False


def test_own_checkpoints_come_before_foreign_ones(bench: Bench) -> None:
    foreign(bench.root, "step-100", state(3))
    bench.saved(5)
    restored = loaded(restore(bench, blank()))
    assert (restored.step, restored.verified) == (5, True)


def test_a_half_written_checkpoint_of_orch_is_not_foreign(bench: Bench) -> None:
    bench.saved(5)
    (bench.folder(5) / "COMMIT").unlink()
    (bench.folder(5) / "manifest.json").unlink()
    assert foreign_names(LocalStorage(bench.root)) == []
    assert restore(bench, blank()) is None


def test_views_and_transposed_tensors_come_out_right(bench: Bench) -> None:
    base = torch.arange(40.0).reshape(5, 8)
    odd = {"t": base.t(), "slice": base[1:4, ::3], "whole": base, "p": torch.nn.Parameter(base.clone())}
    foreign(bench.root, "x-1", odd)
    target = {key: torch.zeros(tensor.shape) for key, tensor in odd.items()}
    assert restore(bench, target) is not None
    assert all(torch.equal(target[key], odd[key]) for key in odd)
    storage = LocalStorage(bench.root)
    source = open_foreign(storage, "x-1")
    assert {source.index.pieces[number].key for number in source.odd} == {"t"}


def test_items_that_are_no_tensors_are_ignored_and_missed_when_wanted(bench: Bench) -> None:
    foreign(bench.root, "x-1", {**state(3), "scheduler": {"lr": 0.1}, "epoch": 7})
    target = blank()
    assert restore(bench, target) is not None
    assert same(target, state(3))
    with pytest.raises(NothingVerifies, match="has no tensor epoch"):
        restore(bench, {**blank(), "epoch": torch.tensor(0)})


def test_values_of_another_type_than_in_metadata_are_refused(bench: Bench) -> None:
    """Read bit for bit, the integer one would be 1.4e-45."""
    folder = foreign(bench.root, "x-1", {"w": torch.ones(3, dtype=torch.int32)})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].properties.dtype = torch.float32
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    target = {"w": torch.zeros(3)}
    with pytest.raises(NothingVerifies, match="does not match .metadata"):
        restore(bench, target)
    assert target["w"].tolist() == [0.0, 0.0, 0.0]


class Canary:
    sung: list[str] = []  # noqa: RUF012

    def __reduce__(self) -> tuple[Any, ...]:
        return Canary.sung.append, ("unpickled",)


@pytest.mark.parametrize("payload", [Canary(), {"x": Canary()}, os.system])
def test_a_malicious_metadata_runs_nothing(bench: Bench, payload: Any) -> None:
    folder = foreign(bench.root, "x-1", state(3))
    (folder / ".metadata").write_bytes(pickle.dumps(payload))
    with pytest.raises(NothingVerifies, match="requests"):
        restore(bench, blank())
    with pytest.raises(UnsafePickle):
        open_foreign(LocalStorage(bench.root), "x-1")
    assert Canary.sung == []


def test_a_malicious_shard_runs_nothing(bench: Bench) -> None:
    folder = foreign(bench.root, "x-1", {"w": torch.zeros(3)})
    shard = folder / "__0_0.distcp"
    stream = io.BytesIO()
    torch.save({"w": Canary()}, stream)
    data = stream.getvalue()
    shard.write_bytes(data + bytes(max(0, shard.stat().st_size - len(data))))
    target = {"w": torch.ones(3)}
    with pytest.raises(NothingVerifies):
        restore(bench, target)
    assert Canary.sung == []
    assert target["w"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("size", "reason"), [(0, "has no bytes"), (None, "which is missing")])
def test_files_that_are_short_or_gone_are_refused(bench: Bench, size: int | None, reason: str) -> None:
    shard = foreign(bench.root, "x-1", state(3)) / "__0_0.distcp"
    shard.unlink()
    if size is not None:
        shard.write_bytes(bytes(size))
    with pytest.raises(CheckpointRefused, match=reason):
        open_foreign(LocalStorage(bench.root), "x-1")
    with pytest.raises(NothingVerifies, match=reason):
        restore(bench, blank())


@pytest.mark.parametrize(("name", "step"), [("step-1000", 1000), ("iter_0000020", 20), ("final", 0), ("", 0)])
def test_the_number_at_the_end_is_the_step(name: str, step: int) -> None:
    assert parse_step(name) == step
