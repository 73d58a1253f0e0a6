"""Read-only restores of one named checkpoint, and the comparison of what was loaded with what was saved."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from checkpointing.engine.collectives.group import World
from checkpointing.engine.restore import restorer
from checkpointing.engine.restore.read_only import ReadOnlyCheckpoint
from checkpointing.errors import CheckpointRefused, NothingVerifies
from checkpointing.event_sink import emit_nothing
from checkpointing.format.manifest import FINGERPRINTS
from tests.checkpointing.engine.built_checkpoint import build
from tests.checkpointing.engine.conftest import Bench, blank, same, state
from tests.checkpointing.engine.restore.layout_program import LAYOUTS
from tests.checkpointing.engine.restore.read_only_program import tree
from tests.warm_programs import WarmPrograms

PROGRAM = "tests.checkpointing.engine.restore.read_only_program"


def opened(folder: Path, on_event: Callable[[str, dict[str, Any]], None] = emit_nothing) -> ReadOnlyCheckpoint:
    return ReadOnlyCheckpoint(str(folder.parent), folder.name, on_event, World())


# ---- one rank


def test_the_named_checkpoint_is_loaded_and_no_newer_one(bench: Bench) -> None:
    bench.saved(5, 10, 15)
    reported: list[tuple[str, dict[str, Any]]] = []
    made, target = opened(bench.folder(10), lambda kind, data: reported.append((kind, data))), blank()
    restored = made.restore(target)
    assert (restored.step, restored.name, restored.extra) == (10, bench.folder(10).name, {"position": 80})
    assert same(target, state(10))
    assert (made.restore_result, made.committed_step) == (restored, 10)
    assert [(kind, data["step"]) for kind, data in reported] == [("checkpoint.restored", 10)]
    made.close()


def test_the_folder_of_the_checkpoint_is_not_changed(bench: Bench) -> None:
    """Half-written folders of this and other attempts beside it stay as they are."""
    bench.saved(5, 10)
    shutil.copytree(bench.folder(10), bench.folder(20))
    (bench.folder(20) / "COMMIT").unlink()
    before, processes, threads = tree(bench.root), psutil.Process().children(), threading.active_count()
    segments = set(os.listdir("/dev/shm"))
    for path in sorted(bench.root.rglob("*"), reverse=True):
        path.chmod(0o500 if path.is_dir() else 0o400)
    bench.root.chmod(0o500)
    try:
        made, target = opened(bench.folder(5)), blank()
        made.prepare(target)
        made.restore(target)
        assert made.fingerprint_faults() == []
        made.before_optimizer_step()
        made.wait()
        assert (psutil.Process().children(), set(os.listdir("/dev/shm"))) == (processes, segments)
        made.close()
    finally:
        for path in (bench.root, *bench.root.rglob("*")):
            path.chmod(0o700)
    assert same(target, state(5))
    assert tree(bench.root) == before
    assert threading.active_count() == threads


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restorer, "LATE_S", 0.0)
    made = opened(tmp_path / "nowhere" / "step-00000005.001-ab12cd34")
    with pytest.raises(NothingVerifies, match="missing"):
        made.restore(blank())
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_checkpoint_is_an_error_although_others_exist(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restorer, "LATE_S", 0.0)
    bench.saved(5, 15)
    made, target = opened(bench.folder(10)), blank()
    with pytest.raises(NothingVerifies, match=r"step-00000010\S*: missing"):
        made.restore(target)
    assert same(target, blank())
    assert (made.restore_result, made.committed_step, made.fingerprint_faults()) == (None, None, [])
    made.close()


def test_a_damaged_checkpoint_is_an_immediate_error(bench: Bench) -> None:
    """Only missing checkpoints are waited for."""
    bench.saved(5, 10)
    (bench.folder(10) / "__0_0.distcp").unlink()
    made = opened(bench.folder(10))
    with pytest.raises(NothingVerifies, match="__0_0.distcp: missing"):
        made.restore(blank())
    made.close()


def test_a_read_only_restore_never_saves(bench: Bench) -> None:
    bench.saved(5)
    made = opened(bench.folder(5))
    with pytest.raises(RuntimeError, match="read-only"):
        made.save(6, state(6), {})
    made.close()
    with pytest.raises(ValueError, match="'latest' is not the name of a checkpoint"):
        opened(bench.root / "latest")


def test_tensors_changed_in_memory_are_named(bench: Bench) -> None:
    bench.saved(5)
    made, target = opened(bench.folder(5)), {**blank(), "rng/rank-00007": torch.ones(3)}
    made.restore(target)
    assert made.has_fingerprints
    assert made.fingerprint_faults() == []
    target["model.weight"][3, 4] += 1
    target["model.mask"][8] ^= True
    target["rng/rank-00007"] += 1  # the checkpoint has none
    changed = made.fingerprint_faults()
    assert [line.partition(": ")[0] for line in changed] == ["model.mask", "model.weight"]
    assert "on rank 0, but was " in changed[0]
    made.close()


def test_tensors_that_are_not_loaded_are_not_compared(bench: Bench) -> None:
    bench.saved(5)
    made = opened(bench.folder(5))
    made.restore({"model.weight": torch.zeros(64, 33)})
    assert made.fingerprint_faults() == []
    made.close()


def test_a_fingerprint_that_disagrees_with_the_values_is_found(tmp_path: Path) -> None:
    """Its digest matches: the state was wrong before it was written."""
    built = build({"model/a": torch.arange(6.0), "model/b": torch.ones(3)})
    assert built.fingerprints is not None
    built.fingerprints["model/a"] = "0" * 16
    made = opened(built.write(tmp_path))
    made.restore({"model/a": torch.zeros(6), "model/b": torch.zeros(3)})
    (line,) = made.fingerprint_faults()
    assert line.startswith("model/a: fingerprint is ")
    assert line.endswith("but was 0000000000000000 when saved")
    made.close()


def test_a_checkpoint_without_fingerprints_is_reported(tmp_path: Path) -> None:
    built = build({"model/a": torch.arange(6.0)})
    built.fingerprints = None
    made = opened(built.write(tmp_path))
    made.restore({"model/a": torch.zeros(6)})
    assert not made.has_fingerprints
    assert made.fingerprint_faults() == []
    made.close()


def test_unreadable_fingerprints_are_not_treated_as_absent(tmp_path: Path) -> None:
    built = build({"model/a": torch.arange(6.0)})
    built.fingerprints, built.files[FINGERPRINTS] = None, b"{}"
    made = opened(built.write(tmp_path))
    with pytest.raises(CheckpointRefused, match="fingerprints.json is malformed"):
        made.restore({"model/a": torch.zeros(6)})
    made.close()


# ---- several ranks, in other layouts than the one that was saved


JOBS: dict[int, list[tuple[Any, ...]]] = {
    2: [("save", "dp2"), ("save_ranks", "")],
    4: [("of_layout", "dp2xtp2", "saved-dp2", 7), ("of_layout", "hsdp", "saved-dp2", 7)],
    1: [("of_layout", "1", "saved-dp2", 7), ("of_ranks", "1", "ranks", 1)],
    3: [("of_ranks", "3", "ranks", 1)],
}
"""Of so many ranks: one state, and one with keys of single ranks, of which a newer one lies beside."""


@pytest.fixture(scope="module")
def restored(programs: WarmPrograms, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], dict[str, Any]]:
    """What every rank found, the same on all; the files are as they were."""
    folder, every = tmp_path_factory.mktemp("saved"), dict[tuple[Any, ...], dict[str, Any]]()
    for size, jobs in JOBS.items():
        ranks = programs.results(PROGRAM, [(rank, size, folder, json.dumps(jobs)) for rank in range(size)])
        for job, results in zip(jobs, map(list, zip(*ranks, strict=True)), strict=True):
            if job[0].startswith("save"):
                continue
            reported = [result.pop("reported") for result in results]
            assert reported == [["checkpoint.restored"], *[[]] * (size - 1)]
            assert all(result == results[0] for result in results)
            found = every[job] = results[0]
            assert (found["step"], found["exact"], found["faults"], found["again"]) == (job[-1], True, [], [])
            assert found["untouched"]
    return every


@pytest.mark.multi
@pytest.mark.parametrize("layout", ["1", "dp2xtp2", "hsdp"])
def test_another_layout_holds_the_same_values(restored: Any, layout: str) -> None:
    found = restored["of_layout", layout, "saved-dp2", 7]
    for what, key in (("sharded", "large.weight"), ("norm", "norm.weight"), ("plain", "step")):
        assert [line.partition(": ")[0] for line in found[what]] == [key]
    assert f"on rank {LAYOUTS[layout] - 1}, but" in found["plain"][0]
    mesh = {"1": "on rank 0", "dp2xtp2": "over the mesh of rank 0", "hsdp": "ranks with the same shard"}
    assert mesh[layout] in found["sharded"][0]
    if layout == "dp2xtp2":
        assert "over the mesh of rank 1, but was" in found["norm"][0], "each tensor-parallel rank has it whole"


@pytest.mark.multi
@pytest.mark.parametrize("size", [1, 3])
def test_keys_of_single_ranks_are_compared_by_those_that_have_them(restored: Any, size: int) -> None:
    """The older of two: rank 2 has no state of its own in a checkpoint of two ranks, so nothing of it is compared."""
    found = restored["of_ranks", str(size), "ranks", 1]
    assert [line.partition(": ")[0] for line in found["sharded"]] == ["rows"]
    assert [line.partition(": ")[0] for line in found["plain"]] == (["rng/rank-00000"] if size == 1 else [])
    (line,) = found["replicated"]
    assert line.startswith("replicated: fingerprint" if size == 1 else "replicated: ranks with the same shard")
