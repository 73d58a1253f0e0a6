"""Event files become rows: once each, whenever the controller dies, whatever a killed writer left behind."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from checkpointing.retention.garbage import pin, read_all_pins
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.durable import dump_line
from orchestrator.registry.lease import this_process
from orchestrator.run_dirs.ingest import UNREADABLE_EVENT, ingest
from orchestrator.states import RunState, Trust
from tests.orchestrator.registry.test_lease import dead_pid
from tests.scenarios.world import World, config, training
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.user_code.code_record import CodeFile, CodeRecord


def begun(tmp_path: Path) -> tuple[World, EventLog]:
    world = World(tmp_path)
    return world, world.open_events("rank-00000")


def read(world: World) -> bool:
    return ingest(world.store, world.view, epoch=world.lease.epoch, now=world.clock.now)


def test_an_event_counts_once_and_a_torn_line_later(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    log.write(EventKind.ATTEMPT_STARTED, job_id="1", nodes=["n1", "n2"], world=4)
    path = world.folder.attempt(1).event_file("rank-00000")
    with path.open("ab") as stream:
        stream.write(b'{"time": 1.0, "sour')
    assert read(world)
    assert not read(world)
    assert [(node.name, node.attempts) for node in world.store.nodes()] == [("n1", 1), ("n2", 1)]
    with path.open("ab") as stream:
        stream.write(b"\n")
    log.write(EventKind.GENERATION_STARTED, world=4, nodes=["n1"])
    assert read(world)
    assert [node.attempts for node in world.store.nodes()] == [1, 1]


def test_a_commit_takes_the_pins_of_dead_readers_out_of_the_way_of_retention(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    storage, name = LocalStorage(world.folder.checkpoints), "step-00000010.001-0badcafe"
    dead = replace(this_process(), pid=dead_pid())
    pin(storage, name, "being read", 1.0, holder="dead", process=str(dead))
    pin(storage, name, "being read", 1.0, holder="living", process=str(this_process()))
    log.write(EventKind.CHECKPOINT_COMMITTED, step=20, name="step-00000020.001-0badcafe", bytes=1)
    read(world)
    assert list(read_all_pins(storage)) == [(name, "living")]


@pytest.mark.parametrize("began", [990.0, None])
def test_an_attempt_begins_with_its_first_process(tmp_path: Path, began: float | None) -> None:
    world, log = begun(tmp_path)
    log.write(
        EventKind.ATTEMPT_STARTED, job_id="1", nodes=["n1"], world=2, **({} if began is None else {"began": began})
    )
    read(world)
    started = world.store.attempts(world.name)[-1].started_at
    assert started == began if began is not None else started == world.clock.now


def test_an_attempt_on_a_node_whose_clock_is_ahead_began_when_it_was_seen_at_the_latest(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    log.write(EventKind.ATTEMPT_STARTED, job_id="1", nodes=["n1"], world=2, began=world.clock.now + 7200)
    read(world)
    assert world.store.attempts(world.name)[-1].started_at == world.clock.now


def test_events_of_many_ranks_in_one_file_count_once_each(tmp_path: Path) -> None:
    world, _ = begun(tmp_path)
    attempt = world.folder.attempt(1)
    logs = [EventLog(attempt.rank_events("n1"), f"rank-{rank:05d}", 1, clock=world.clock) for rank in range(8)]
    for step in (1, 2):  # every rank counts its events from 1 on
        for rank, log in enumerate(logs):
            log.write(EventKind.DRILL, kind="slow-rank", rank=rank, step=step)
            if rank == 3:
                with attempt.rank_events("n1").open("ab") as stream:
                    stream.write(b'{"time": 1.0, "sour')  # this one was killed; the next one goes on
                assert read(world)
        read(world)
        assert not read(world)
    noted = [(notice.data["rank"], notice.data["step"]) for notice in world.store.notices(world.name)]
    assert sorted(noted) == [(rank, step) for rank in range(8) for step in (1, 2)]


def test_generations_keep_what_each_event_adds(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    for number in (1, 2):
        log.generation = number
        log.write(EventKind.GENERATION_STARTED, world=4, nodes=["n1"])
        log.write(EventKind.CHECKPOINT_RESTORED, step=10 * number, name="step-x", seconds=0.1)
        log.write(EventKind.GENERATION_FIRST_STEP, step=10 * number + 1, seconds=0.5)
        log.write(EventKind.GENERATION_ENDED, reason="rank 1 died", step=10 * number + 5, failure=None)
    read(world)
    first, second = world.store.generations(world.name, 1)
    assert (first.resumed_from, first.last_step, first.reason) == (10, 15, "rank 1 died")
    assert (second.resumed_from, second.last_step) == (20, 25)
    attempt = world.attempts[0]
    assert (attempt.generations, attempt.first_step, attempt.resumed_from) == (2, 11, 10)


def test_what_a_later_generation_resumed_from_is_not_where_the_attempt_began(tmp_path: Path) -> None:
    for late in (False, True):
        world, ranks = begun(tmp_path / str(late))
        name = "zone" if late else "coordinator"
        coordinator = EventLog(world.folder.attempt(1).event_file(name), name, 1, clock=world.clock)
        for log in (ranks, coordinator):
            log.generation = 1
        coordinator.write(EventKind.GENERATION_STARTED, world=4, nodes=1)
        coordinator.write(EventKind.GENERATION_FIRST_STEP, step=1, seconds=0.5)
        ranks.generation = 2
        ranks.write(EventKind.CHECKPOINT_RESTORED, step=20, name="step-x", seconds=0.1)
        read(world)
        assert [item.resumed_from for item in world.store.generations(world.name, 1)] == [None, 20]
        assert world.attempts[0].resumed_from is None


def test_a_generation_that_died_before_it_trained_does_not_begin_the_attempt(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    log.generation = 2
    log.write(EventKind.CHECKPOINT_RESTORED, step=20, name="step-x", seconds=0.1)
    log.write(EventKind.GENERATION_FIRST_STEP, step=21, seconds=0.5)
    read(world)
    assert world.attempts[0].resumed_from == 20


def test_a_checkpoint_s_trust_follows_what_happened_to_it(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    for step, name in ((5, "a"), (10, "b"), (15, "c"), (20, "d")):
        log.write(EventKind.CHECKPOINT_COMMITTED, step=step, name=name, bytes=7, seconds=0.1)
    log.write(EventKind.CHECKPOINT_RESTORED, step=15, name="c", seconds=0.1)
    log.write(EventKind.CHECKPOINT_REFUSED, step=20, name="d", reason="chunk 3 differs")
    log.write(EventKind.CHECKPOINT_DELETED, step=5, name="a")
    log.write(EventKind.CHECKPOINT_REFUSED, step=99, name="unknown", reason="no manifest")
    read(world)
    found = {item.name: (item.trust, item.reason) for item in world.store.checkpoints(world.name)}
    assert found["a"][0] is Trust.DELETED
    assert found["b"][0] is Trust.COMMITTED
    assert found["c"] == (Trust.RESTORED, "attempt 1 resumed from it")
    assert found["d"] == (Trust.CORRUPT, "attempt 1 refused it: chunk 3 differs")
    assert world.attempts[0].saved_step == 20


def test_a_resume_takes_back_no_verdict(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    log.write(EventKind.CHECKPOINT_COMMITTED, step=10, name="a", bytes=7, seconds=0.1)
    read(world)
    world.store.trust(world.name, "a", Trust.CORRUPT, "restore test r-test-1", epoch=world.lease.epoch, now=1.0)
    log.write(EventKind.CHECKPOINT_RESTORED, step=10, name="a", seconds=0.1)
    read(world)
    (saved,) = world.store.checkpoints(world.name)
    assert (saved.trust, saved.reason) == (Trust.CORRUPT, "restore test r-test-1")


def test_where_a_generation_was_loaded_from(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    log.write(EventKind.CHECKPOINT_COMMITTED, step=10, name="a", bytes=7, seconds=0.5, stall=0.02)
    log.generation = 2
    log.write(EventKind.CHECKPOINT_REFUSED, step=10, name="a", reason="a record is torn", tier="memory")
    log.write(EventKind.CHECKPOINT_RESTORED, step=10, name="a", seconds=0.1, tier="memory")
    read(world)
    (generation,) = world.store.generations(world.name, 1)
    assert (generation.resumed_from, generation.tier) == (10, "memory")
    (saved,) = world.store.checkpoints(world.name)
    assert (saved.trust, saved.tier, saved.seconds, saved.stall) == (Trust.COMMITTED, "", 0.5, 0.02)


def test_copies_in_further_tiers_come_and_go(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    for step, name in ((10, "a"), (20, "b")):
        log.write(EventKind.CHECKPOINT_COMMITTED, step=step, name=name, bytes=7, seconds=0.1)
        for tier in ("/far", "s3://bucket/r"):
            log.write(EventKind.CHECKPOINT_FLUSHED, step=step, name=name, tier=tier, bytes=7, seconds=0.1)
    log.write(EventKind.CHECKPOINT_FLUSHED, step=99, name="unknown", tier="/far", bytes=7, seconds=0.1)
    log.write(EventKind.CHECKPOINT_DELETED, step=10, name="a", tier="/far")
    log.write(EventKind.CHECKPOINT_REFUSED, step=20, name="b", reason="chunk 3 differs", tier="s3://bucket/r")
    home = str(world.folder.checkpoints)
    log.write(EventKind.CHECKPOINT_DELETED, step=10, name="a", tier=home)
    read(world)
    copies = {(item.name, item.tier): item.path for item in world.store.copies(world.name)}
    assert copies == {("b", "/far"): "/far/b"}
    rows = {item.name: item for item in world.store.checkpoints(world.name)}
    assert (rows["a"].trust, rows["a"].tier, rows["a"].path) == (Trust.COMMITTED, "s3://bucket/r", "s3://bucket/r/a")
    assert (rows["b"].trust, rows["b"].tier) == (Trust.COMMITTED, "")
    log.write(EventKind.CHECKPOINT_REFUSED, step=20, name="b", reason="chunk 3 differs", tier=home)
    log.write(EventKind.CHECKPOINT_DELETED, step=10, name="a", tier="s3://bucket/r")
    read(world)
    rows = {item.name: item for item in world.store.checkpoints(world.name)}
    assert rows["a"].trust is Trust.DELETED, "that was the last copy"
    assert (rows["b"].trust, rows["b"].tier) == (Trust.COMMITTED, "/far")
    assert not world.store.copies(world.name)


def test_what_was_refused_for_another_reason_than_its_bytes_stays_what_it_was(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    log.write(EventKind.CHECKPOINT_COMMITTED, step=10, name="a", bytes=7, seconds=0.1)
    log.write(EventKind.CHECKPOINT_FLUSHED, step=10, name="a", tier="/far", bytes=7, seconds=0.1)
    for tier in ({}, {"tier": "/far"}):
        log.write(EventKind.CHECKPOINT_REFUSED, step=10, name="a", reason="shape differs", damaged=False, **tier)
    read(world)
    (saved,) = world.store.checkpoints(world.name)
    assert (saved.trust, saved.tier) == (Trust.COMMITTED, "")
    assert [item.tier for item in world.store.copies(world.name)] == ["/far"]


def test_the_coordinator_s_doubt_hits_what_was_saved_before(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    agent = EventLog(world.folder.attempt(1).event_file("agent-0000"), "agent-0000", 1, clock=world.clock)
    log.write(EventKind.CHECKPOINT_COMMITTED, step=10, name="a", bytes=7, seconds=0.1)
    log.write(EventKind.CHECKPOINT_COMMITTED, step=20, name="b", bytes=7, seconds=0.1)
    read(world)
    world.clock.now += 10
    agent.write(EventKind.CHECKPOINT_SUSPECT, step=20, reason="twice SIGSEGV")
    world.clock.now += 10
    log.write(EventKind.CHECKPOINT_SUSPECT, step=10, reason="left out")  # a rank only repeats what it was told
    log.write(EventKind.CHECKPOINT_COMMITTED, step=20, name="c", bytes=7, seconds=0.1)
    log.write(EventKind.CHECKPOINT_RESTORED, step=20, name="b", seconds=0.1)  # the last one there was
    read(world)
    found = {item.name: (item.trust, item.reason) for item in world.store.checkpoints(world.name)}
    assert found["a"][0] is Trust.COMMITTED
    assert found["b"] == (Trust.SUSPECT, "twice SIGSEGV")
    assert found["c"][0] is Trust.COMMITTED


def test_progress_comes_from_the_last_whole_line_of_the_metrics(tmp_path: Path) -> None:
    world, _ = begun(tmp_path)
    metrics = world.folder.attempt(1).metrics
    metrics.write_text('{"step":7,"loss":0.1}\n{"step":8,"loss":"nan"}\n{"step":9,"lo')
    read(world)
    assert world.run.step == 8
    assert str(world.run.loss) == "nan"
    world.folder.attempt(1).heartbeat.write_text('{"seq":1,"step":0,"loss":null}')
    metrics.write_text("")
    read(world)
    assert world.run.step == 8, "a heartbeat that knows no step yet sets nothing back"


@pytest.mark.parametrize(("saves", "step"), [("saves failing since step 5: disk full (/r)", 11), ("", 8)])
def test_a_disk_that_takes_no_more_lines_does_not_hide_how_far_a_run_got(tmp_path: Path, saves: str, step: int) -> None:
    world, _ = begun(tmp_path)
    place = world.folder.attempt(1)
    place.metrics.write_text('{"step":8,"loss":0.1}\n')
    place.heartbeat.write_text(dump_line({"seq": 1, "step": 11, "loss": 0.5, "saves_failing": saves}))
    read(world)
    assert world.run.step == step


def test_a_save_whose_event_is_lost_is_known_by_the_heartbeat(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    place = world.folder.attempt(1)

    def saved(by_heartbeat: int) -> int | None:
        place.metrics.write_text('{"step":80,"loss":0.1}\n')
        place.heartbeat.write_text(dump_line({"seq": 1, "step": 80, "loss": 0.5, "saved_step": by_heartbeat}))
        read(world)
        return world.store.attempt(world.name, 1).saved_step

    assert saved(0) is None
    log.write(EventKind.CHECKPOINT_RESTORED, step=20, name="b", seconds=0.1)
    assert saved(20) is None, "what it began with it has not saved"
    assert saved(40) == 40
    assert saved(30) == 40


@pytest.mark.parametrize(("digest", "accepted"), [("new", True), ("old", False), (None, False)])
def test_code_that_a_person_resumed_with_is_accepted(tmp_path: Path, digest: str | None, accepted: bool) -> None:
    world, log = begun(tmp_path)
    if digest is not None:
        files = CodeRecord(files={"mine": CodeFile(path="mine.py", sha256=digest)})
        world.store.note_run(
            world.name, epoch=world.lease.epoch, now=1.0, identity={"code": {"files": files.to_json()}}
        )
    log.write(EventKind.CODE_CHANGED, digest="d", reason="mine changed since attempt 1", files={"mine": "new"})
    read(world)
    (notice,) = world.store.notices(world.name)
    assert (notice.data["reason"], notice.data["accepted"]) == ("mine changed since attempt 1", accepted)


@pytest.mark.parametrize(("version", "accepted"), [("2.0", True), ("1.0", False)])
def test_packages_that_a_person_resumed_with_are_accepted(tmp_path: Path, version: str, accepted: bool) -> None:
    world, log = begun(tmp_path)
    files = CodeRecord(packages={"timm": version}).to_json()
    world.store.note_run(world.name, epoch=world.lease.epoch, now=1.0, identity={"code": {"files": files}})
    changed = {"digest": "d", "files": {}, "packages": {"timm": "2.0"}}
    log.write(EventKind.CODE_CHANGED, reason="package timm 1.0 -> 2.0 since attempt 1", **changed)
    read(world)
    assert [notice.data["accepted"] for notice in world.store.notices(world.name)] == [accepted]


def test_the_status_names_code_that_nobody_has_accepted(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    training(world, 2)
    assert world.run.state is RunState.RUNNING
    log.write(EventKind.CODE_CHANGED, digest="d", reason="mine changed since the submit", files={"mine": "new"})
    world.tick()
    world.tick()
    assert world.run.reason.endswith("; runs different code: mine changed since the submit")
    log.write(EventKind.RESTART_DIFFERS, step=8, restored=7, reason="loss of step 8 is 2.0, it was 1.0")
    world.tick()
    world.tick()
    assert world.run.reason.endswith("the submit; diverged after a restart: loss of step 8 is 2.0, it was 1.0")


def test_what_watchers_noticed_is_kept_once(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    log.generation = 2
    log.write(EventKind.INCIDENT, name="g002-stopped", kind="stopped", rank=3, node="n2", reason="rank 3 stopped")
    log.write(EventKind.STRAGGLER, rank=1, node="n1", section="forward", ratio=1.3, over=False)
    log.write(EventKind.BATCH_SKIPPED, step=7, position=96, reason="loss nan")
    log.write(EventKind.RESTART_DIFFERS, step=8, restored=7, reason="loss of step 8 is 2.0, was 1.0")
    log.write(EventKind.CHECKPOINT_INCOMPLETE, step=7, reason="workload.k had changed and is not saved")
    log.write(EventKind.PREFLIGHT, node=0, name="n1", ok=True, reason="")
    log.write(EventKind.PREFLIGHT, node=1, name="n2", ok=False, reason="/dev/shm is full")
    read(world)
    found = world.store.notices(world.name)
    assert [(item.kind, item.node, item.generation) for item in found] == [
        ("incident", "n2", 2), ("straggler", "n1", 2), ("batch.skipped", "", 2),
        ("restart.differs", "", 2), ("checkpoint.incomplete", "", 2), ("preflight", "n2", 2),
    ]  # fmt: skip
    assert found[0].data["name"] == "g002-stopped"
    assert [item.data["rank"] for item in world.store.cluster_notices(world.run.cluster, ["straggler"], 0.0)] == [1]
    assert world.store.cluster_notices(world.run.cluster, ["straggler"], found[1].time + 1) == []
    assert world.store.cluster_notices("elsewhere", ["straggler"], 0.0) == []
    # A cursor that was lost brings the same events again.
    for item in found:
        world.store.put_notice(item, epoch=world.lease.epoch)
    assert world.store.notices(world.name) == found


def test_a_node_that_a_spare_replaced_has_failed_once(tmp_path: Path) -> None:
    world, log = begun(tmp_path)
    log.write(EventKind.SPARE_USED, node=2, name="n3", instead="n2", reason="its agent is gone", kind="agent_lost")
    read(world)
    assert [(item.node, item.data["kind"]) for item in world.store.notices(world.name)] == [("n2", "agent_lost")]
    (node,) = world.store.nodes()
    assert (node.name, node.failures, node.attempts) == ("n2", 1, 0)
    assert "replaced by a spare in" in node.reason


def test_drills_are_kept_of_every_generation_and_orders_of_the_configuration_mark_theirs(tmp_path: Path) -> None:
    data = {**config(), "drill": {"events": [{"kind": "stop-rank", "generation": 3}]}}
    world = World(tmp_path, data=data)
    world.tick()
    for generation in (1, 2, 3):
        # A rank's process of the next generation counts its events anew.
        source = "rank-00000"
        log = EventLog(world.folder.attempt(1).event_file(source), source, 1, clock=world.clock)
        log.generation = generation
        log.write(EventKind.DRILL, kind="kill-rank", rank=0, step=5)
        log.close()
    read(world)
    notices = world.store.notices(world.name)
    assert [(item.generation, item.data.get("drilled")) for item in notices] == [(1, None), (2, None), (3, True)]


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (EventKind.CHECKPOINT_COMMITTED, {"step": 5, "bytes": 9}),
        (EventKind.CHECKPOINT_COMMITTED, {"step": "five", "name": "step-5", "bytes": 9}),
        (EventKind.CHECKPOINT_COMMITTED, {"step": None, "name": "step-5"}),
        (EventKind.CHECKPOINT_RESTORED, {"name": "step-5"}),
        (EventKind.CHECKPOINT_SEEN, {"step": 5, "name": "step-5"}),
        (EventKind.ATTEMPT_STARTED, {"nodes": 7}),
        (EventKind.GENERATION_ENDED, {"step": "x", "reason": "r"}),
        (EventKind.PREFLIGHT, {"node": 0}),
        (EventKind.SPARE_USED, {"name": "n3"}),
    ],
)
def test_an_event_that_lacks_what_its_kind_must_have_is_told_of_and_stops_nothing(
    tmp_path: Path, kind: EventKind, data: dict[str, object]
) -> None:
    world, log = begun(tmp_path)
    log.write(kind, **data)
    log.write(EventKind.CHECKPOINT_COMMITTED, step=10, name="step-10", bytes=7)
    assert read(world)
    assert not read(world)
    assert [(item.name, item.step) for item in world.store.checkpoints(world.name)] == [("step-10", 10)]
    (notice,) = world.store.notices(world.name)
    assert (notice.kind, notice.data["unread"]) == (UNREADABLE_EVENT, str(kind))
    assert notice.data["reason"]

    assert world.finish().state == "SUCCEEDED"


@pytest.mark.parametrize("loss", ["low", [1.0], {}, "nan"])
def test_a_loss_that_is_none_does_not_hide_the_step(tmp_path: Path, loss: object) -> None:
    world, _ = begun(tmp_path)
    world.folder.attempt(1).metrics.parent.mkdir(parents=True, exist_ok=True)
    world.folder.attempt(1).metrics.write_text(json.dumps({"step": 7, "loss": loss}) + "\n")
    assert read(world)
    assert world.run.step == 7


def test_what_a_newer_version_adds_to_an_event_is_left_out(tmp_path: Path) -> None:
    world, _ = begun(tmp_path)
    event = {"time": 1.0, "source": "rank-00000", "seq": 1, "attempt": 1, "generation": 1, "host": "n1"}
    line = {**event, "kind": EventKind.CHECKPOINT_COMMITTED, "data": {"step": 5, "name": "step-5", "shape": [2]}}
    world.folder.attempt(1).event_file("rank-00000").write_text(json.dumps(line) + "\n")
    assert read(world)
    assert [item.step for item in world.store.checkpoints(world.name)] == [5]
