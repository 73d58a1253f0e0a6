"""Several real ranks over gloo: resharding, and agreement when only one of them has trouble."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing.tiers.catalog import Catalog
from checkpointing.verification.verify import verify
from tests.checkpointing.engine.conftest import Bench, loaded
from tests.warm_programs import WarmPrograms

PROGRAM = "tests.checkpointing.engine.restore.rank_program"
Run = Callable[..., list[dict[str, Any]]]
Pair = tuple[dict[tuple[str, str], list[dict[str, Any]]], Path]

pytestmark = pytest.mark.multi


PAIR = (
    ("save", "saved"), ("disk_full_on_one_rank", "full"), ("save", "rot"), ("one_rank_reads_damage", "rot"),
    ("agreement", "agreement"), ("buckets_on_one_rank", "buckets"), ("a_lane_dies", "lane"),
    ("disks_of_their_own", "disks"), ("save", "blind"), ("one_rank_cannot_read", "blind"),
)  # fmt: skip
"""Scenarios of one pair of ranks, one after the other, each in its folder."""


@pytest.fixture(scope="module")
def run(programs: WarmPrograms) -> Run:
    """Runs a scenario of so many ranks to its end; one result per surviving rank."""

    def of(scenario: str, size: int, folder: Path, dies: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        jobs = json.dumps([(scenario, folder.name)])
        results = programs.results(PROGRAM, [(rank, size, folder.parent, jobs) for rank in range(size)], dies)
        return [result for (result,) in results]

    return of


@pytest.fixture(scope="module")
def pair(programs: WarmPrograms, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """What both ranks of a pair found in each scenario and folder, and where the folders are."""
    root, size = tmp_path_factory.mktemp("pair"), 2
    found = programs.results(PROGRAM, [(rank, size, root, json.dumps(PAIR)) for rank in range(size)])
    return dict(zip(PAIR, map(list, zip(*found, strict=True)), strict=True)), root


def kinds(result: dict[str, Any]) -> list[str]:
    return [kind for kind, _ in result["reported"]]


def test_two_ranks_save_and_any_number_restores(pair: Pair, run: Run) -> None:
    found, root = pair
    folder, (first, second) = root / "saved", found["save", "saved"]
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


def test_a_single_process_continues_a_run_of_ranks_and_vice_versa(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run("save", 1, folder)
    bench = Bench(folder)
    made = bench.checkpointer()
    target = {"rows": torch.zeros(8, 6), "uneven": torch.zeros(7, 5), "columns": torch.zeros(6, 9),
              "tiny": torch.zeros(1, 3), "replicated": torch.zeros(11), "step": torch.tensor(0.0)}  # fmt: skip
    loaded(made.restore(target))
    assert float(target["step"]) == 2.0
    made.save(3, target, {"seed": 2})
    made.close()
    results = run("load", 2, folder)
    assert [(result["step"], result["exact"]) for result in results] == [(3, True), (3, True)]
    assert results[0]["absent"] == ["rng/rank-00000"]


def test_a_full_disk_on_one_rank_fails_the_save_on_all(pair: Pair) -> None:
    found, root = pair
    folder = root / "full"
    results = found["disk_full_on_one_rank", "full"]
    assert [result["committed"] for result in results] == [[1, 1, 3], [1, 1, 3]]
    (failure,) = [data for kind, data in results[0]["reported"] if kind == "checkpoint.failed"]
    assert failure["step"] == 2
    assert failure["reason"].startswith("rank 1: disk full ([Errno 28] No space left on device")
    assert [entry.step for entry in Catalog(folder).committed_entries()] == [3, 1]
    assert len(list(folder.iterdir())) == 2, "the half-written folder is gone"


def test_all_ranks_agree_on_a_checkpoint_that_one_cannot_read(pair: Pair) -> None:
    found, _ = pair
    results = found["one_rank_cannot_read", "blind"]
    assert results[0]["error"] == results[1]["error"]
    assert "no older checkpoint is loaded" in results[0]["error"]
    assert [result["untouched"] for result in results] == [True, True]
    (refusal,) = [data for kind, data in results[0]["reported"] if kind == "checkpoint.refused"]
    assert refusal["step"] == 2
    assert "Input/output error" in refusal["reason"]


def test_all_ranks_refuse_a_checkpoint_that_one_finds_damaged(pair: Pair) -> None:
    found, _ = pair
    results = found["one_rank_reads_damage", "rot"]
    assert [(result["step"], result["exact"]) for result in results] == [(1, True), (1, True)]
    (refusal,) = [data for kind, data in results[0]["reported"] if kind == "checkpoint.refused"]
    assert refusal["step"] == 2
    assert "digest differs" in refusal["reason"]


def test_the_survivor_reports_a_save_whose_peer_died(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (survivor,) = run("a_peer_dies_in_mid_save", 2, folder, dies=(1,))
    assert survivor["committed"] is None
    assert kinds(survivor)[-1] == "checkpoint.failed"
    assert survivor["reported"][-1][1]["reason"].startswith("rank 0: ")
    assert Catalog(folder).committed_entries() == []


def test_a_peer_that_dies_while_writing_fails_the_save(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (survivor,) = run("a_peer_dies_while_it_writes", 2, folder, dies=(1,))
    assert (survivor["begun"], survivor["committed"]) == (True, None)
    assert kinds(survivor)[-1] == "checkpoint.failed"
    assert Catalog(folder).committed_entries() == []


def test_all_ranks_agree_on_what_one_rank_sees(pair: Pair) -> None:
    found, root = pair
    folder = root / "agreement"
    first, second = found["agreement", "agreement"]
    for result in (first, second):
        assert result["unsavable"] == "rank 1: ValueError: x: a int is not a tensor; put it in `extra`"
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


def test_ranks_stay_in_step_when_one_has_too_little_memory(pair: Pair) -> None:
    found, root = pair
    folder = root / "buckets"
    for result in found["buckets_on_one_rank", "buckets"]:
        assert result["failures"][0].startswith("rank 0: ")
        assert result["failures"][1] is None
        assert (result["committed"], result["step"], result["exact"]) == (2, 2, True)
        assert "checkpoint.retried" not in kinds(result), "rank 1's first buckets are gone"
    assert [entry.step for entry in Catalog(folder).committed_entries()] == [2]


def test_a_rank_whose_saves_have_ended_blocks_no_other(pair: Pair) -> None:
    found, root = pair
    folder = root / "lane"
    first, second = found["a_lane_dies", "lane"]
    for result in (first, second):
        assert (result["begun"], result["committed"]) == ([True, False], None)
        assert "checkpoint.failed" in kinds(result)
    assert second["reported"][0][1]["reason"] == "rank 1: Odd: what is this?"
    assert Catalog(folder).committed_entries() == []


def test_nodes_with_own_disks_keep_their_own_part(pair: Pair) -> None:
    found, root = pair
    folder = root / "disks"
    first, second = found["disks_of_their_own", "disks"]
    assert first["manifest"] == second["manifest"]
    for result in (first, second):
        assert (result["step"], result["exact"], result["committed"]) == (3, True, 3)
        assert result["folders"] == [f"step-0000000{step}.001-ab12cd34" for step in (2, 3)]
    files = [{file.name for file in folder.glob(f"node{n}/step-00000003*/*.distcp")} for n in (0, 1)]
    assert files == [{"__0_0.distcp"}, {"__1_0.distcp"}]
