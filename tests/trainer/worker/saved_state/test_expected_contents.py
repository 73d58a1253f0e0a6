"""Expected contents of a run's checkpoint: real ones have them, and missing ones are reported."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing.engine.audit.audit import audit_checkpoint
from checkpointing.format.manifest import FileEntry, Index, Manifest, TensorInfo
from checkpointing.storage.backends import LocalStorage
from checkpointing.tiers.catalog import Catalog
from tests.checkpointing.engine.built_checkpoint import build
from trainer.worker.saved_state.checkpoint_contents import expected_entries
from trainer.worker.saved_state.rng_state import generators_fault, pack_rng, rng_name, set_origin

FACTS = {"step": 4, "consumed": 32, "loss": 1.0, "config_digest": "f00d", "seed": 7, "fingerprint": None}


def manifest(**extra: Any) -> Manifest:
    return Manifest(
        name="step-00000004.001-ab12cd34", step=4, attempt=1, nonce="ab12cd34", created_at=0.0, torch="2.13.0",
        world={"ranks": 2}, files=(FileEntry(name=".metadata", size=0, chunks=()),), extra={**FACTS, **extra},
    )  # fmt: skip


def test_the_generators_of_every_rank_must_be_there() -> None:
    assert expected_entries(manifest()).required == ("rng/rank-00000", "rng/rank-00001")
    assert expected_entries(replace(manifest(), extra={"epoch": 3})).required == (), "no rank of ours wrote it"
    assert expected_entries(replace(manifest(), world={})).required == (), "an unknown number of ranks"


def test_what_trains_is_what_the_optimizer_holds_state_of() -> None:
    keys = ("model/a", "model/frozen", "optimizer/a/exp_avg", "optimizer/a/nested/x", "buffers/rank-00000/mask")
    index = Index({key: TensorInfo("float32", (1,)) for key in keys}, ())
    assert expected_entries(manifest()).trained(index) == {"model/a"}


@pytest.mark.parametrize("steps", [1.0, 8.0, 1000.0, None])
@pytest.mark.parametrize("consumed", [0, 48, None])
def test_step_counts_and_data_positions_are_not_judged(tmp_path: Path, steps: float | None, consumed: object) -> None:
    row = pack_rng(torch.device("cpu"))
    set_origin(row, 0, 4)
    counter = {} if steps is None else {"optimizer/w/step": torch.tensor(steps)}
    built = build({rng_name(0): row, **counter})
    built.extra, built.world = {**FACTS, "consumed": consumed}, {"ranks": 1}
    path = built.write(tmp_path, step=4)
    assert audit_checkpoint(LocalStorage(tmp_path), path.name, 4, None, expected_entries).faults == ()


def test_states_of_generators_are_read_and_none_is_touched() -> None:
    packed = pack_rng(torch.device("cpu"))
    before = torch.get_rng_state()
    assert generators_fault(packed) == ""
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [(0, 0, "0 of the 5 generator states"), (7, 1, "ends before"), (0, 7, "cannot be loaded")],
)
def test_states_that_no_generator_takes(place: int, value: int, words: str) -> None:
    packed = pack_rng(torch.device("cpu"))
    packed[place] = value
    if (place, value) == (0, 0):
        packed[:8] = 0
    assert words in generators_fault(packed)
    assert "not a row of bytes" in generators_fault(packed.view(2, -1))


def saved_generators(folder: Path, origins: list[tuple[int, int]]) -> list[str]:
    """Return the faults of a checkpoint of step 4 whose ranks saved generators of these origins."""
    rows = {rng_name(rank): pack_rng(torch.device("cpu")) for rank in range(len(origins))}
    for row, origin in zip(rows.values(), origins, strict=True):
        set_origin(row, *origin)
    built = build({**rows, "optimizer/w/step": torch.tensor(4.0)})
    built.extra, built.world = dict(FACTS), {"ranks": len(origins)}
    path = built.write(folder, step=4)
    report = audit_checkpoint(LocalStorage(folder), path.name, 4, None, expected_entries)
    return [f"{fault.tensor}: {fault.reason}" for fault in report.faults]


def test_generators_of_another_rank_or_step_are_told(tmp_path: Path) -> None:
    assert saved_generators(tmp_path / "right", [(0, 4), (1, 4)]) == []
    assert saved_generators(tmp_path / "swapped", [(1, 4), (0, 4)]) == [
        "rng/rank-00000: is the state of rank 1 at step 4, in a checkpoint of step 4",
        "rng/rank-00001: is the state of rank 0 at step 4, in a checkpoint of step 4",
    ]
    assert saved_generators(tmp_path / "stale", [(0, 4), (1, 2)]) == [
        "rng/rank-00001: is the state of rank 1 at step 2, in a checkpoint of step 4"
    ]


@pytest.mark.multi
def test_what_a_run_saves_is_what_is_expected(make_run: Any) -> None:
    world = 2
    run = make_run(world, train={"steps": 4}, checkpoint={"every": 2})
    assert run.train()["codes"] == [0] * world, run.log()
    entries = Catalog(run.dir.checkpoints).committed_entries()
    assert len(entries) >= 2
    for entry in entries:
        storage = Catalog(run.dir.checkpoints).storage
        report = audit_checkpoint(storage, entry.name, 4, None, expected_entries)
        assert report.faults == ()
        report = audit_checkpoint(storage, entry.name, 4, None, lambda told: expected_entries(replace(told, step=99)))
        wrong = {fault.tensor: fault.reason for fault in report.faults if str(fault.tensor).startswith("rng/")}
        assert wrong == {
            rng_name(rank): f"is the state of rank {rank} at step {entry.step}, in a checkpoint of step 99"
            for rank in range(world)
        }
