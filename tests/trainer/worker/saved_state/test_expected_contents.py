"""What a checkpoint of a run must hold: real ones have it, and what lacks it is told."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing.engine.verification.audit import audit_in, fact_faults
from checkpointing.format.manifest import FileEntry, Manifest
from checkpointing.storage.backends import LocalStorage
from checkpointing.tiers.catalog import Catalog
from tests.checkpointing.engine.built_checkpoint import build
from trainer.contract import config as job_config
from trainer.worker.saved_state.expected_contents import expected
from trainer.worker.saved_state.rng_state import generators_fault, pack_rng, rng_name, set_origin

FACTS = {"step": 4, "consumed": 32, "loss": 1.0, "config_digest": "f00d", "seed": 7, "fingerprint": None}


def manifest(**extra: Any) -> Manifest:
    return Manifest(
        name="step-00000004.001-ab12cd34", step=4, attempt=1, nonce="ab12cd34", created_at=0.0, torch="2.13.0",
        world={"ranks": 2}, files=(FileEntry(name=".metadata", size=0, chunks=()),), extra={**FACTS, **extra},
    )  # fmt: skip


def config(**over: Any) -> job_config.JobConfig:
    made = job_config.build(job_config.JobConfig, {"train": {"batch_size": 8}, **over})
    assert isinstance(made, job_config.JobConfig)
    return made


def complaints(told: Manifest, known: job_config.JobConfig | None) -> list[str]:
    return [fault.reason for fault in fact_faults(told, expected(told, known))]


def test_facts_that_fit() -> None:
    assert complaints(manifest(), config()) == []
    assert complaints(manifest(consumed=99), None) == []
    assert complaints(manifest(consumed=48, left_out=2), config()) == []
    own = config(workload={"target": "mine:Mine"})
    assert complaints(manifest(consumed=99), own) == []
    assert expected(manifest(), config()).required == ("rng/rank-00000", "rng/rank-00001")


def test_masks_among_the_buffers_may_hold_infinities_what_trains_may_not() -> None:
    finite = expected(manifest(), config()).finite
    assert "model/layer/weight".startswith(finite)
    assert "optimizer/layer/weight/exp_avg".startswith(finite)
    assert not "buffers/rank-00000/mask".startswith(finite)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"consumed": 24}, "`consumed` is 24, where step 4 should have 32"),
        ({"left_out": 1}, "`consumed` is 32, where step 4 should have 40"),
        ({"step": 3}, "`step` is 3, where step 4 should have 4"),
        ({"consumed": "32"}, "`consumed` is '32', not a whole number"),
        ({"consumed": -8}, "not a whole number"),
        ({"consumed": None}, "`consumed` is None, not a whole number"),
    ],
)
def test_facts_that_do_not_fit(extra: dict[str, Any], words: str) -> None:
    assert words in " ".join(complaints(manifest(**extra), config()))


def test_of_a_checkpoint_that_no_rank_of_ours_wrote_nothing_is_expected() -> None:
    foreign = replace(manifest(), extra={"epoch": 3})
    assert expected(foreign, None).required == ()
    assert complaints(foreign, None) == []


def test_states_of_generators_are_read_and_none_is_touched() -> None:
    packed = pack_rng(torch.device("cpu"))
    before = torch.get_rng_state()
    assert generators_fault(packed) == ""
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [(0, 0, "0 of the 3 states"), (7, 1, "ends before"), (0, 7, "cannot be taken up")],
)
def test_states_that_no_generator_takes(place: int, value: int, words: str) -> None:
    packed = pack_rng(torch.device("cpu"))
    packed[place] = value
    if (place, value) == (0, 0):
        packed[:8] = 0
    assert words in generators_fault(packed)
    assert "not a row of bytes" in generators_fault(packed.view(2, -1))


def saved_generators(folder: Path, origins: list[tuple[int, int] | None]) -> list[str]:
    """What level 4 says of a checkpoint of step 4 whose ranks have saved generators of these origins."""
    rows = {rng_name(rank): pack_rng(torch.device("cpu")) for rank in range(len(origins))}
    for row, origin in zip(rows.values(), origins, strict=True):
        if origin is not None:
            set_origin(row, *origin)
    built = build({**rows, "optimizer/w/step": torch.tensor(4.0)})
    built.extra, built.world = dict(FACTS), {"ranks": len(origins)}
    path = built.write(folder, step=4)
    report = audit_in(LocalStorage(folder), path.name, 4, None, lambda told: expected(told, None))
    return [f"{fault.tensor}: {fault.reason}" for fault in report.faults]


def test_generators_of_another_rank_or_step_are_told(tmp_path: Path) -> None:
    assert saved_generators(tmp_path / "right", [(0, 4), (1, 4)]) == []
    assert saved_generators(tmp_path / "old", [None, None]) == [], "an older orch has saved no origins"
    assert saved_generators(tmp_path / "swapped", [(1, 4), (0, 4)]) == [
        "rng/rank-00000: is the state of rank 1 at step 4, in a checkpoint of step 4",
        "rng/rank-00001: is the state of rank 0 at step 4, in a checkpoint of step 4",
    ]
    assert saved_generators(tmp_path / "stale", [(0, 4), (1, 2)]) == [
        "rng/rank-00001: is the state of rank 1 at step 2, in a checkpoint of step 4"
    ]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.multi)])
def test_what_a_run_saves_is_what_is_expected(make_run: Any, world: int) -> None:
    run = make_run(world)
    assert run.train()["codes"] == [0] * world, run.log()
    entries = Catalog(run.dir.checkpoints).committed()
    assert len(entries) >= 2
    known = job_config.load(run.dir, 0)
    for entry in entries:
        storage = Catalog(run.dir.checkpoints).storage
        report = audit_in(storage, entry.name, 4, None, lambda told: expected(told, known))
        assert report.faults == ()
        report = audit_in(storage, entry.name, 4, None, lambda told: expected(replace(told, step=99), None))
        wrong = {fault.tensor: fault.reason for fault in report.faults if str(fault.tensor).startswith("rng/")}
        assert wrong == {
            rng_name(rank): f"is the state of rank {rank} at step {entry.step}, in a checkpoint of step 99"
            for rank in range(world)
        }
