"""What the next attempt may inherit, over all tiers."""

from dataclasses import replace
from pathlib import Path

import pytest

from checkpointing.config import CheckpointConfig, TierConfig
from checkpointing.tiers.catalog import Entry
from orchestrator.registry.records import Attempt, Checkpoint, CheckpointCopy, Run
from orchestrator.run_dirs.inheritable_checkpoints import (
    RunCheckpoints,
    expected_names,
    find_checkpoints,
    inheritable,
    look,
    of_run,
    shared_places,
)
from orchestrator.states import AttemptState, RunState, Trust
from trainer.protocol.run_dir import RunDir


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
        ([row(30, Trust.DELETED)], [30, 20, 10]),  # told of one tier, seen in another
        ([row(30, Trust.CORRUPT), row(20, Trust.CORRUPT), row(10, Trust.CORRUPT)], []),
        ([row(30, Trust.CORRUPT), row(20, Trust.CORRUPT), row(10, Trust.SUSPECT)], [10]),
    ],
)
def test_a_suspect_is_left_out_as_long_as_an_older_one_exists(rows, left):
    seen = [entry(30), entry(20), entry(10)]
    assert steps(inheritable(seen, rows, 2).checkpoints) == left


def test_a_corrupt_one_is_named_so_that_nothing_begins_from_step_0():
    rows = [row(30, Trust.CORRUPT), row(10, Trust.CORRUPT)]
    assert steps(inheritable([entry(30), entry(10)], rows, 2).corrupt) == [30, 10]
    assert steps(inheritable([entry(30), entry(20), entry(10)], rows, 2).corrupt) == [30, 10]
    assert inheritable([entry(20)], [row(20)], 2).corrupt == ()


def test_only_earlier_attempts_leave_something():
    seen = [entry(30, attempt=3), entry(20, attempt=2), entry(10)]
    assert steps(inheritable(seen, [], 2).checkpoints) == [10]


def test_what_is_out_of_sight_may_be_newer():
    rows = [row(60, Trust.DELETED), row(50), row(45, Trust.SUSPECT), row(40, Trust.CORRUPT), row(30), row(20)]
    found = inheritable([entry(30), entry(20)], rows, 2)
    assert (steps(found.checkpoints), steps(found.perhaps)) == ([30, 20], [50])
    alone = inheritable([], rows, 2)
    assert (steps(alone.checkpoints), steps(alone.perhaps)) == ([], [50, 30, 20])


def test_what_should_be_in_sight_and_is_not_is_no_reason_to_begin_from_nothing():
    rows = [row(50), row(30), row(20, Trust.DELETED)]
    found = inheritable([], rows, 2, {entry(30).name, entry(20).name})
    assert (steps(found.checkpoints), steps(found.perhaps)) == ([30], [50])


def test_what_must_be_in_a_place_is_what_was_committed_or_copied_there(tmp_path):
    folder = RunDir(tmp_path / "r-1")
    places = shared_places(CheckpointConfig(), folder)
    on_disk = [replace(row(step), tier="/disk/r-1/n1") for step in (40, 30, 20)]
    copies = [
        CheckpointCopy(run="r", name=entry(step).name, tier=tier, path="/p", bytes=1, copied_at=1.0)
        for step, tier in ((30, "/disk2/r-1/n1"), (20, str(folder.checkpoints)))
    ]
    assert expected_names(places, [*on_disk, row(10)], copies) == {entry(20).name, entry(10).name}


def test_a_shared_tier_whose_folder_is_gone_is_waited_for(tmp_path: Path) -> None:
    folder, far = RunDir(tmp_path / "runs" / "r"), tmp_path / "far" / "r"
    config = CheckpointConfig(tiers=(TierConfig(path=str(tmp_path / "far")), TierConfig()))
    run = Run(
        name="r", state=RunState.QUEUED, reason="", cluster="local", run_dir="/r", config_digest="d", total_steps=9,
        created_at=1.0, updated_at=1.0,
    )  # fmt: skip
    attempt = Attempt(run="r", number=1, state=AttemptState.ENDED, nonce="0badcafe", job_name="j", epoch=1)
    known = [replace(row(step), tier=str(far)) for step in (30, 10)]
    copies = [
        CheckpointCopy(run="r", name=entry(10).name, tier=str(folder.checkpoints), path="/p", bytes=1, copied_at=1.0)
    ]

    def save(place: Path, step: int) -> None:
        (place / entry(step).name).mkdir(parents=True)
        (place / entry(step).name / "COMMIT").write_text("{}")

    def found() -> RunCheckpoints:
        return find_checkpoints(config, folder, run, [attempt], known, copies)

    save(folder.checkpoints, 10)
    assert found().newest_is_unread
    assert {path: str(error) for path, error in found().unread.items()} == {
        str(far): "[Errno 2] its folder does not exist"
    }
    far.mkdir(parents=True)
    assert not found().newest_is_unread, "an empty folder: its checkpoints were given up"
    save(far, 30)
    assert (found().newest_is_unread, found().unread) == (False, {})
    far.rename(tmp_path / "away")
    save(folder.checkpoints, 30)
    assert not found().newest_is_unread, "another tier has it"


def test_another_run_of_the_same_name_leaves_nothing_to_this_one():
    attempt = Attempt(run="r", number=1, state=AttemptState.ENDED, nonce="0badcafe", job_name="j", epoch=1)
    run = Run(
        name="r", state=RunState.QUEUED, reason="", cluster="local", run_dir="/r", config_digest="d", total_steps=9,
        created_at=1.0, updated_at=1.0,
    )  # fmt: skip
    foreign = replace(entry(90), name="step-00000090.001-feedface", nonce="feedface")
    begun = replace(entry(5), name="step-00000005.000-11111111", nonce="11111111", attempt=0)
    seen = [foreign, entry(30), begun]
    assert of_run(seen, run, [attempt]) == [entry(30)]
    imported = replace(run, identity={"imported": {"checkpoint": f"/somewhere/{begun.name}"}})
    assert of_run(seen, imported, [attempt]) == [entry(30), begun]


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
    seen, _ = look(places)
    assert [item.step for item in seen] == [20, 10, 5]
    assert str(seen[0].path).startswith(str(folder.checkpoints))


def test_a_tier_that_cannot_be_opened_leaves_the_runs_own_folder(tmp_path):
    folder = RunDir(tmp_path / "r-1")
    config = CheckpointConfig(tiers=(TierConfig(path="nosuchprotocol://bucket"),))
    assert [place.path for place in shared_places(config, folder)] == [str(folder.checkpoints)]
