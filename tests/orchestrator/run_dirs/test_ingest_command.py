"""Checkpoints that a user's own program wrote, as rows."""

from pathlib import Path

from orchestrator.states import AttemptState, Trust
from tests.orchestrator.run_dirs.test_ingest import begun, read
from trainer.protocol.events import EventKind, EventLog


def test_checkpoints_of_a_command_count_as_what_its_attempt_saved(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    for step, new in ((10, False), (20, True)):
        log.write(EventKind.CHECKPOINT_SEEN, step=step, name=f"c-{step}.1f", path=f"/out/c-{step}", bytes=7, new=new)
    read(world)
    rows = {item.step: item for item in world.store.checkpoints(world.name)}
    assert {(row.trust, row.tier) for row in rows.values()} == {(Trust.COMMITTED, "/out")}
    assert world.attempts[0].saved_step == 20
    aside = {"reason": "it lacks a file", "path": "/out/.orch-set-aside.20.001-002"}
    log.write(EventKind.CHECKPOINT_SET_ASIDE, step=20, name="c-20.1f", damaged=True, **aside)
    log.write(EventKind.CHECKPOINT_SET_ASIDE, step=10, name="c-10.1f", damaged=False, **aside)
    # It is set aside before anybody has told of it.
    log.write(EventKind.CHECKPOINT_SET_ASIDE, step=30, name="c-30.1f", damaged=True, **aside)
    read(world)
    rows = {item.step: item for item in world.store.checkpoints(world.name)}
    corrupt = Trust.CORRUPT
    assert {step: row.trust for step, row in rows.items()} == {30: corrupt, 20: corrupt, 10: Trust.SUSPECT}
    assert rows[20].reason == "set aside as /out/.orch-set-aside.20.001-002: it lacks a file"
    assert {row.path for row in rows.values()} == {aside["path"]}, "where it is now"
    for step, damage in ((20, "is empty"), (10, "")):
        log.write(
            EventKind.CHECKPOINT_SEEN, step=step, name=f"c-{step}.1f.back", path=f"/out/c-{step}", bytes=7, new=False,
            was=f"c-{step}.1f", damage=damage,
        )  # fmt: skip
    read(world)
    known = {item.name: (item.trust, item.path) for item in world.store.checkpoints(world.name)}
    assert known["c-20.1f.back"] == (corrupt, "/out/c-20"), "it has its place again, and is no better for that"
    assert known["c-10.1f.back"] == (Trust.COMMITTED, "/out/c-10")
    assert {known["c-20.1f"][0], known["c-10.1f"][0]} == {Trust.DELETED}


def test_a_checkpoint_of_a_command_may_be_moved_away_and_back_again_and_again(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    log.write(EventKind.CHECKPOINT_SEEN, step=20, name="c-20.1f", path="/out/c-20", bytes=7, new=True)

    def live() -> list[tuple[Trust, str]]:
        read(world)
        rows = world.store.checkpoints(world.name)
        return [(item.trust, item.path) for item in rows if item.trust is not Trust.DELETED]

    for generation in (2, 4, 6):
        aside = f"/aside/20.001-{generation:03d}"
        log.write(EventKind.CHECKPOINT_SET_ASIDE, step=20, name="c-20.1f", damaged=False, path=aside, reason="failed")
        assert live() == [(Trust.SUSPECT, aside)]
        log.write(
            EventKind.CHECKPOINT_SEEN, step=20, name=f"c-20.1f.20.001-{generation:03d}.back", path="/out/c-20", bytes=7,
            new=False, was="c-20.1f", damage="",
        )  # fmt: skip
        log.write(EventKind.CHECKPOINT_SEEN, step=20, name="c-20.1f", path="/out/c-20", bytes=7, new=False)
        assert live() == [(Trust.COMMITTED, "/out/c-20")]
    log.write(EventKind.CHECKPOINT_DELETED, step=20, name="c-20.1f")
    assert live() == []


def test_a_checkpoint_of_a_command_with_a_sign_of_damage_counts_and_its_row_shows_the_sign(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    seen = {"step": 20, "name": "c-20.1f", "path": "/out/c-20", "bytes": 7, "new": True}
    log.write(EventKind.CHECKPOINT_SEEN, **seen, damage="is damaged: a.pt is empty")
    read(world)
    (row,) = world.store.checkpoints(world.name)
    assert (row.trust, row.reason) == (Trust.COMMITTED, "attempt 1 saw that it is damaged: a.pt is empty")
    assert world.attempts[0].saved_step == 20


def test_what_a_command_saved_just_before_its_attempt_ended_counts_for_that_attempt(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    world.store.move_attempt(
        world.name, 1, AttemptState.ENDED, "preempted", epoch=world.lease.epoch, now=world.clock.now
    )
    world.store.add_attempt(world.name, nonce="b", excluded=(), epoch=world.lease.epoch, now=world.clock.now)
    world.folder.attempt(2).make()
    log = EventLog(world.folder.attempt(2).event_file("coordinator"), "coordinator", 2, clock=world.clock)
    log.write(EventKind.CHECKPOINT_SEEN, step=30, name="c-30.1f", path="/out/c-30", bytes=7, new=False)
    log.write(EventKind.CHECKPOINT_SEEN, step=30, name="c-30.1f", path="/out/c-30", bytes=7, new=False)
    read(world)
    assert [attempt.saved_step for attempt in world.attempts] == [30, None]


def test_what_was_there_before_a_run_is_saved_by_no_attempt_of_it(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    world.store.move_attempt(world.name, 1, AttemptState.ENDED, "gone", epoch=world.lease.epoch, now=world.clock.now)
    world.store.add_attempt(world.name, nonce="b", excluded=(), epoch=world.lease.epoch, now=world.clock.now)
    world.folder.attempt(2).make()
    log = EventLog(world.folder.attempt(2).event_file("coordinator"), "coordinator", 2, clock=world.clock)
    seen = {"step": 5000, "name": "c-5000.1f", "path": "/out/c-5000", "bytes": 7, "new": False}
    log.write(EventKind.CHECKPOINT_SEEN, **seen, before_run=True)
    read(world)
    assert [attempt.saved_step for attempt in world.attempts] == [None, None]
    assert [item.step for item in world.store.checkpoints(world.name)] == [5000]
