"""Several real ranks over gloo: resharding, and agreement when only one of them has trouble."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing.tiers.catalog import Catalog
from checkpointing.verification.verify import verify
from tests.checkpointing.engine.conftest import Bench
from tests.warm_programs import WarmPrograms

PROGRAM = "tests.checkpointing.engine.restore.rank_program"
Run = Callable[..., list[dict[str, Any]]]

pytestmark = pytest.mark.multi


@pytest.fixture
def run(programs: WarmPrograms) -> Run:
    """Runs a scenario of so many ranks to its end; one result per surviving rank."""

    def of(scenario: str, size: int, folder: Path, dies: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        folder.mkdir(exist_ok=True)
        return programs.results(PROGRAM, [(scenario, rank, size, folder) for rank in range(size)], dies)

    return of


def kinds(result: dict[str, Any]) -> list[str]:
    return [kind for kind, _ in result["told"]]


def test_two_ranks_save_and_any_number_restores(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    first, second = run("save", 2, folder)
    assert (first["committed"], second["committed"]) == (2, 2)
    assert kinds(first) == ["checkpoint.saving", "checkpoint.committed"] * 2
    assert kinds(second) == [], "only rank 0 tells"
    for entry in Catalog(folder).committed_entries():
        assert verify(entry.path, 2).ok
        assert len(list(entry.path.glob("*.distcp"))) == 2
    for size in (1, 3):
        for rank, result in enumerate(run("load", size, folder)):
            assert (result["step"], result["exact"]) == (2, True), f"rank {rank} of {size}"
            assert result["rng"] == [rank + 1.0 if rank < 2 else 0.0] * 4
            assert result["absent"] == ([] if rank < 2 else [f"rng/rank-{rank:05d}"])


def test_a_lone_process_without_a_group_takes_over_and_hands_back(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run("save", 1, folder)
    bench = Bench(folder)
    made = bench.checkpointer()
    target = {"rows": torch.zeros(8, 6), "uneven": torch.zeros(7, 5), "columns": torch.zeros(6, 9),
              "tiny": torch.zeros(1, 3), "replicated": torch.zeros(11), "step": torch.tensor(0.0)}  # fmt: skip
    restored = made.restore(target)
    assert restored is not None
    assert float(target["step"]) == 2.0
    made.save(3, target, {"seed": 2})
    made.close()
    results = run("load", 2, folder)
    assert [(result["step"], result["exact"]) for result in results] == [(3, True), (3, True)]
    assert results[0]["absent"] == ["rng/rank-00000"]


def test_a_full_disk_on_one_rank_fails_the_save_on_all(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    results = run("disk_full_on_one_rank", 2, folder)
    assert [result["committed"] for result in results] == [[1, 1, 3], [1, 1, 3]]
    (failure,) = [data for kind, data in results[0]["told"] if kind == "checkpoint.failed"]
    assert failure["step"] == 2
    assert failure["reason"].startswith("rank 1: disk full ([Errno 28] No space left on device")
    assert [entry.step for entry in Catalog(folder).committed_entries()] == [3, 1]
    assert len(list(folder.iterdir())) == 2, "the half-written folder is gone"


def test_all_ranks_end_alike_at_a_checkpoint_that_one_of_them_cannot_read(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run("save", 2, folder)
    results = run("one_rank_cannot_read", 2, folder)
    assert results[0]["error"] == results[1]["error"]
    assert "no older checkpoint is loaded" in results[0]["error"]
    assert [result["untouched"] for result in results] == [True, True]
    (refusal,) = [data for kind, data in results[0]["told"] if kind == "checkpoint.refused"]
    assert refusal["step"] == 2
    assert "Input/output error" in refusal["reason"]


def test_all_ranks_leave_a_checkpoint_that_one_of_them_finds_damaged(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run("save", 2, folder)
    results = run("one_rank_reads_damage", 2, folder)
    assert [(result["step"], result["exact"]) for result in results] == [(1, True), (1, True)]
    (refusal,) = [data for kind, data in results[0]["told"] if kind == "checkpoint.refused"]
    assert refusal["step"] == 2
    assert "digest differs" in refusal["reason"]


def test_a_save_whose_peer_died_is_told_by_the_survivor(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (survivor,) = run("a_peer_dies_in_mid_save", 2, folder, dies=(1,))
    assert survivor["committed"] is None
    assert kinds(survivor)[-1] == "checkpoint.failed"
    assert survivor["told"][-1][1]["reason"].startswith("rank 0: ")
    assert Catalog(folder).committed_entries() == []


def test_a_peer_that_dies_while_it_writes_takes_the_save_along(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (survivor,) = run("a_peer_dies_while_it_writes", 2, folder, dies=(1,))
    assert (survivor["begun"], survivor["committed"]) == (True, None)
    assert kinds(survivor)[-1] == "checkpoint.failed"
    assert Catalog(folder).committed_entries() == []


def test_what_one_rank_sees_is_agreed_by_all(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    first, second = run("agreement", 2, folder)
    for result in (first, second):
        assert result["unsavable"] == "rank 1: ValueError: x: a int is no tensor; put it into `extra`"
        assert "the ranks save different steps, from 7 to 8" in result["steps"]
        assert result["saved"] == [True, True]
        assert result["refused"] == "NaN in trained weights: model/1 (1)"
        reason, lasts = result["differing"]
        assert "different values of groups/1/order (ranks 0 and 1): keep them equal" in reason
        assert lasts
        assert result["hung"] == [True, True, False]
        assert result["committed"] == 5
    assert "checkpoint.skipped" in kinds(first)
    assert [entry.step for entry in Catalog(folder).committed_entries()] == [5, 4, 2]


def test_ranks_of_which_one_has_too_little_memory_stay_in_step(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for result in run("buckets_on_one_rank", 2, folder):
        assert result["failures"][0].startswith("rank 0: ")
        assert result["failures"][1] is None
        assert (result["committed"], result["step"], result["exact"]) == (2, 2, True)
        assert "checkpoint.retried" not in kinds(result), "rank 1's first buckets are gone"
    assert [entry.step for entry in Catalog(folder).committed_entries()] == [2]


def test_saves_that_end_on_one_rank_for_good_keep_no_other_waiting(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    first, second = run("a_lane_dies", 2, folder)
    for result in (first, second):
        assert (result["begun"], result["committed"]) == ([True, False], None)
        assert "checkpoint.failed" in kinds(result)
    assert second["told"][0][1]["reason"] == "rank 1: Odd: what is this?"
    assert Catalog(folder).committed_entries() == []


def test_nodes_with_disks_of_their_own_each_keep_their_part(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    first, second = run("disks_of_their_own", 2, folder)
    assert first["manifest"] == second["manifest"]
    for result in (first, second):
        assert (result["step"], result["exact"], result["committed"]) == (3, True, 3)
        assert result["folders"] == [f"step-0000000{step}.001-ab12cd34" for step in (2, 3)]
    files = [{file.name for file in folder.glob(f"node{n}/step-00000003*/*.distcp")} for n in (0, 1)]
    assert files == [{"__0_0.distcp"}, {"__1_0.distcp"}]


def test_fsdp_over_tensor_parallel_restores_and_reshards(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for result in run("fsdp_and_tensor_parallel", 4, folder):
        assert (result["step"], result["exact"]) == (1, True)
    torch.manual_seed(5)
    reference = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.ReLU(), torch.nn.Linear(20, 12))
    target = {key: torch.zeros_like(value) for key, value in reference.named_parameters()}
    Bench(folder).checkpointer().restore(target)
    assert all(torch.equal(target[key], value) for key, value in reference.named_parameters())
