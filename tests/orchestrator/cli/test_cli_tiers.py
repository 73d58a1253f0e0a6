"""`orch ckpt` with several tiers: what is being copied, what cannot be reached, and what only nodes have."""

import time
from pathlib import Path

import pytest

from checkpointing import collect
from checkpointing.durable import dump_line
from checkpointing.storage import LocalStorage, Storage
from orchestrator.states import AttemptState, RunState, Trust
from tests.checkpointing.made import make
from tests.orchestrator.cli.conftest import Seeds, Type

NONCE = "0123abcd"
NAME = f"step-00000050.001-{NONCE}"


@pytest.fixture
def run(seeds: Seeds) -> str:
    """A run with a committed checkpoint of step 50 in its own folder."""
    name = seeds.run()
    folder(seeds, name).mkdir(parents=True)
    make(LocalStorage(folder(seeds, name)), 50, nonce=NONCE, now=time.time())
    return name


def folder(seeds: Seeds, run: str) -> Path:
    return seeds.root / run / "checkpoints"


def tiered(seeds: Seeds, run: str, *tiers: dict[str, object]) -> None:
    (seeds.root / run / "config.json").write_text(dump_line({"checkpoint": {"tiers": list(tiers)}}))


def half_written(root: Path, name: str = NAME) -> Path:
    (root / name).mkdir(parents=True)
    (root / name / "__0_0.distcp").write_bytes(b"x" * 100)
    return root / name


def over(seeds: Seeds, run: str, state: AttemptState = AttemptState.ENDED) -> None:
    """The newest attempt is over."""
    number = seeds.store.attempts(run)[-1].number
    seeds.store.move_attempt(run, number, state, "over", epoch=seeds.epoch, now=time.time())


def next_attempt(seeds: Seeds, run: str) -> None:
    seeds.store.add_attempt(run, nonce="89ab4567", excluded=(), epoch=seeds.epoch, now=time.time())


def left(orch: Type, run: str, *words: str) -> dict[str, tuple[str, str]]:
    """What `orch ckpt gc` did with what, and why, by tier."""
    rows = orch("ckpt", "gc", run, "--json", *words).data
    return {row["tier"]: (row["done"], row["reason"]) for row in rows}


# -- what is being copied


def test_gc_leaves_what_a_later_attempt_may_be_copying(orch: Type, seeds: Seeds, run: str, tmp_path: Path) -> None:
    """It copies what earlier attempts have committed, under their names: half-written there, and somebody's."""
    tiered(seeds, run, {"path": "run"}, {"path": str(tmp_path / "slow")})
    copied = half_written(tmp_path / "slow" / run)
    debris = half_written(folder(seeds, run), f"step-00000070.001-{NONCE}")
    over(seeds, run)
    next_attempt(seeds, run)
    assert left(orch, run) == {
        "run": ("deleted", f"half-written by attempt 1 ({NONCE}), which has ended"),
        str(tmp_path / "slow"): ("left", "attempt 2 has not ended, and may be copying it"),
    }
    assert (copied.exists(), debris.exists()) == (True, False)
    over(seeds, run)
    assert left(orch, run)[str(tmp_path / "slow")][0] == "deleted"
    assert not copied.exists()


def test_the_run_s_folder_is_copied_to_when_it_is_not_the_first_tier(
    orch: Type, seeds: Seeds, run: str, tmp_path: Path
) -> None:
    tiered(seeds, run, {"path": str(tmp_path / "fast")}, {"path": "run"})
    half_written(folder(seeds, run), f"step-00000070.001-{NONCE}")
    half_written(tmp_path / "fast" / run, f"step-00000070.001-{NONCE}")
    over(seeds, run)
    next_attempt(seeds, run)
    assert {tier: done for tier, (done, _) in left(orch, run).items()} == {
        "run": "left", str(tmp_path / "fast"): "deleted",
    }  # fmt: skip


def test_gc_stops_when_an_attempt_begins_meanwhile(
    orch: Type, seeds: Seeds, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiered(seeds, run, {"path": "run"}, {"path": str(tmp_path / "slow")})
    copied = half_written(tmp_path / "slow" / run)
    over(seeds, run)
    delete = collect.delete

    def begun(storage: Storage, name: str, fence: collect.Callable[[], bool]) -> bool:
        next_attempt(seeds, run)
        return delete(storage, name, fence)

    monkeypatch.setattr(collect, "delete", begun)
    done = orch("ckpt", "gc", run, "--json")
    assert (done.code, [row["done"] for row in done.data]) == (4, ["left"])
    assert (copied / "__0_0.distcp").exists()


def test_what_a_lost_attempt_left_is_nobody_s(orch: Type, seeds: Seeds, run: str) -> None:
    debris = half_written(folder(seeds, run), f"step-00000070.001-{NONCE}")
    over(seeds, run, AttemptState.LOST)
    assert left(orch, run)["run"][0] == "deleted"
    assert not debris.exists()


@pytest.mark.parametrize("end", ["the run is over", "a later attempt was allowed"])
def test_refused_checkpoints_of_a_lost_attempt_go_in_the_end(orch: Type, seeds: Seeds, run: str, end: str) -> None:
    seeds.checkpoint(run, 50, Trust.COMMITTED)
    seeds.store.trust(run, NAME, Trust.CORRUPT, "digest differs", epoch=seeds.epoch, now=time.time())
    over(seeds, run, AttemptState.LOST)
    assert left(orch, run)["run"] == ("left", "an attempt of the run has not ended")
    if end == "the run is over":
        seeds.store.move_run(run, RunState.FAILED, "a bug", epoch=seeds.epoch, now=time.time())
    else:
        next_attempt(seeds, run)
        over(seeds, run)
    assert left(orch, run)["run"] == ("left", "evidence, until --refused: digest differs")
