"""What the next attempt may inherit, over all tiers."""

from pathlib import Path

import pytest

from checkpointing.catalog import Entry
from checkpointing.config import CheckpointConfig, TierConfig
from orchestrator.controller.places import committed, inheritable, shared_places
from orchestrator.registry.records import Checkpoint
from orchestrator.states import Trust
from trainer.contract.run_dir import RunDir

PLAIN = CheckpointConfig()
WITH_DISKS = CheckpointConfig(tiers=(TierConfig(path="/disk", shared=False), TierConfig()))


def entry(step: int, attempt: int = 1) -> Entry:
    name = f"step-{step:08d}.{attempt:03d}-0badcafe"
    return Entry(name=name, path=Path(name), step=step, attempt=attempt, nonce="0badcafe", bytes=1, committed_at=1.0)


def row(step: int, trust: Trust = Trust.COMMITTED, attempt: int = 1) -> Checkpoint:
    return Checkpoint(
        run="r", name=entry(step, attempt).name, step=step, attempt=attempt, trust=trust, bytes=1, path="/p",
        committed_at=1.0,
    )  # fmt: skip


def steps(names: tuple[str, ...]) -> list[int]:
    return [int(name[5:13]) for name in names]


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        ([], [30, 20, 10]),
        ([row(30, Trust.CORRUPT)], [20, 10]),
        ([row(30, Trust.SUSPECT)], [20, 10]),
        ([row(20, Trust.SUSPECT)], [30, 10]),
        ([row(10, Trust.SUSPECT)], [30, 20, 10]),  # there is no older one
        ([row(30, Trust.SUSPECT), row(20, Trust.SUSPECT), row(10, Trust.CORRUPT)], [30, 20]),
        ([row(30, Trust.SUSPECT), row(20, Trust.SUSPECT)], [10]),
    ],
)
def test_a_suspect_is_left_out_as_long_as_an_older_one_exists(rows, left):
    seen = [entry(30), entry(20), entry(10)]
    assert steps(inheritable(PLAIN, seen, rows, 2)) == left


def test_only_earlier_attempts_leave_something():
    seen = [entry(30, attempt=3), entry(20, attempt=2), entry(10)]
    assert steps(inheritable(PLAIN, seen, [], 2)) == [10]


def test_what_lies_on_the_nodes_own_disks_may_be_newer():
    rows = [row(50), row(40, Trust.CORRUPT), row(30), row(20)]
    assert steps(inheritable(WITH_DISKS, [entry(30), entry(20)], rows, 2)) == [50, 30, 20]
    assert steps(inheritable(PLAIN, [entry(30), entry(20)], rows, 2)) == [30, 20]
    assert inheritable(WITH_DISKS, [], rows, 2) == ()  # with nothing else to fall back to, nobody waits for them


def test_every_shared_tier_is_looked_at_and_each_checkpoint_counts_once(tmp_path):
    folder = RunDir(tmp_path / "runs" / "r-1")
    config = CheckpointConfig(
        tiers=(
            TierConfig(path=str(tmp_path / "disk"), shared=False),
            TierConfig(),
            TierConfig(path=str(tmp_path / "far")),
        )
    )
    places = shared_places(config, folder)
    assert [place.path for place in places] == [str(folder.checkpoints), str(tmp_path / "far" / "r-1")]
    for place, found in zip(places, ((10, 20), (20, 5)), strict=True):
        for step in found:
            commit = Path(place.path) / entry(step).name / "COMMIT"
            commit.parent.mkdir(parents=True)
            commit.write_text("{}")
    seen = committed(config, folder)
    assert [item.step for item in seen] == [20, 10, 5]
    assert str(seen[0].path).startswith(str(folder.checkpoints))


def test_a_tier_that_cannot_be_opened_leaves_the_runs_own_folder(tmp_path):
    folder = RunDir(tmp_path / "r-1")
    config = CheckpointConfig(tiers=(TierConfig(path="nosuchprotocol://bucket"),))
    assert [place.path for place in shared_places(config, folder)] == [str(folder.checkpoints)]
