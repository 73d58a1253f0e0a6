"""The registry is lost; the run directories have it all."""

import errno
import hashlib
import json
import logging
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.durable import canonical, dump_line
from orchestrator.controller.ownership import never_submitted
from orchestrator.errors import RegistryError
from orchestrator.registry.records import Checkpoint, CheckpointCopy, Generation, Notice
from orchestrator.registry.run_record import write_records
from orchestrator.registry.store import Store
from orchestrator.registry_rebuild.rebuild import rebuild
from orchestrator.run_dirs.run_folder import ensure_attempt_dir, ensure_run_dir
from orchestrator.states import AttemptState, RunState, Trust
from tests.fakes.new_runs import create_run, take_lease
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.outcome import AttemptOutcome, AttemptResult
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.run_dir import AttemptDir, RunDir

Desk = Any
CONFIG = {"name": "tiny", "train": {"steps": 100}}


def begin(desk: Desk, slug: str = "tiny", now: float = 1.0, **fields: Any) -> RunDir:
    """Submit a run: its rows and its folder."""
    nonce, known = f"{len(desk.store.runs()):08x}", {"total_steps": 100, "identity": {"code": {"sha": "abc"}}}
    run, attempt = create_run(desk.store, desk.root, CONFIG, slug=slug, now=now, nonce=nonce, **{**known, **fields})
    return ensure_run_dir(run, attempt, CONFIG)


def save(folder: RunDir, name: str) -> Path:
    """A committed checkpoint folder, as far as the catalog looks."""
    path = folder.checkpoints / name
    path.mkdir()
    (path / "COMMIT").write_text("{}")
    return path


def live_through_two_attempts(desk: Desk) -> RunDir:
    """A node is lost, the next attempt finishes; checkpoints of every trust."""
    folder = begin(desk)
    store, stamp, epoch, name = desk.store, desk.stamp, desk.lease.epoch, folder.name
    store.move_attempt(name, 1, AttemptState.SUBMITTED, "job 7 is queued", **stamp, job_id="7", submit_time="then")
    store.move_run(name, RunState.QUEUED, "job 7 is queued", **stamp)
    store.saw_node("n1", "slurm", **stamp)
    store.put_generation(Generation(run=name, attempt=1, number=1, started_at=2.0, last_step=9), epoch=epoch)
    for step, trust in ((5, Trust.DELETED), (10, Trust.CORRUPT), (20, Trust.VERIFIED)):
        folder_name = f"step-{step:08d}.001-00000000"
        if trust is not Trust.DELETED:
            save(folder, folder_name)
        item = Checkpoint(
            run=name, name=folder_name, step=step, attempt=1, trust=Trust.COMMITTED, bytes=5,
            path=str(folder.checkpoints / folder_name), committed_at=float(step),
        )  # fmt: skip
        store.put_checkpoint(item, epoch=epoch)
        store.trust(name, folder_name, trust, "chunk 3 differs", **stamp)
    for tier in ("s3://bucket/tiny-1", str(folder.checkpoints)):
        copy = CheckpointCopy(
            run=name, name=folder_name, tier=tier, path=f"{tier}/{folder_name}", bytes=5, copied_at=21.0
        )
        store.put_copy(copy, epoch=epoch)
    hang = Notice(
        run=name, attempt=1, source="coordinator", seq=9, kind="incident", generation=1, time=24.0, node="n1",
        data={"kind": "stopped", "rank": 0},
    )  # fmt: skip
    store.put_notice(hang, epoch=epoch)
    failure = {"kind": "node_lost", "reason": "NODE_FAIL", "node": "n1"}
    store.saw_node("n1", "slurm", **stamp, failure="node_lost")
    store.exclude_node("n1", "slurm", 500.0, "node_lost", **stamp)
    store.move_attempt(
        name, 1, AttemptState.ENDED, "NODE_FAIL", **stamp, nodes=("n1", "n2"), failure=failure, ended_at=30.0,
        decision={"action": "retry", "reason": "budget left"}, last_step=25,
    )  # fmt: skip
    store.move_run(name, RunState.RECOVERING, "budget left", **stamp, not_before=40.0)
    second = store.add_attempt(name, nonce="ffffffff", excluded=("n1",), **stamp)
    ensure_attempt_dir(folder, second, CONFIG)
    store.note_run(name, **stamp, step=100, loss=0.1 + 0.2)
    store.change_tags(name, ("baseline", "lr=3e-4"), ())
    store.move_attempt(name, 2, AttemptState.ENDED, "finished", **stamp, decision={"action": "succeed", "reason": ""})
    store.move_run(name, RunState.SUCCEEDED, "all steps trained", **stamp, fresh_from=2)
    return folder


def everything(store: Store) -> dict[str, Any]:
    runs = store.runs()
    return {
        "runs": runs,
        "nodes": store.nodes(),
        "configs": {run.config_digest: store.config(run.config_digest) for run in runs},
        **{
            f"{run.name} {verb}": getattr(store, verb)(run.name)
            for run in runs
            for verb in ("attempts", "generations", "checkpoints", "copies", "notices", "transitions", "cursors")
        },
    }


def lose(desk: Desk) -> None:
    desk.store.close()
    for name in os.listdir(desk.folder):
        if name.startswith(desk.path.name):
            (desk.folder / name).unlink()


@contextmanager
def rebuilt(desk: Desk) -> Iterator[Store]:
    """Lose the registry and rebuild it from the runs' folders."""
    lose(desk)
    rebuild(desk.path, [desk.root], now=50.0)
    with Store.open(desk.path) as store:
        yield store


def test_the_rebuilt_registry_equals_the_lost_one(desk: Desk) -> None:
    live_through_two_attempts(desk)
    begin(desk, now=2.0)
    begin(desk, slug="alpha", now=3.0)
    for run in desk.store.runs()[:2]:
        desk.store.move_run(run.name, RunState.HELD, "disk full", **desk.stamp)
    before = everything(desk.store)
    assert len(before["runs"]) == 3
    epoch = desk.lease.epoch
    lose(desk)
    assert rebuild(desk.path, [desk.root], now=50.0) == 3
    with Store.open(desk.path) as store:
        assert everything(store) == before
        lease = take_lease(store, "next", 60.0, 10.0)
        assert lease.epoch > epoch


def test_a_database_of_another_program_stays_where_it_is(desk: Desk) -> None:
    begin(desk)
    theirs = desk.folder / "theirs.db"
    with closing(sqlite3.connect(theirs)) as connection:
        connection.execute("CREATE TABLE addresses (name TEXT)")
        connection.commit()
    before = theirs.read_bytes()
    with pytest.raises(RegistryError, match="a database, but not an orch registry"):
        rebuild(theirs, [desk.root], now=50.0)
    assert theirs.read_bytes() == before


def test_a_registry_that_is_there_is_set_aside(desk: Desk) -> None:
    live_through_two_attempts(desk)
    before = everything(desk.store)
    desk.store.drop_lease(desk.lease)
    desk.store.close()
    rebuild(desk.path, [desk.root], now=0.0)
    aside = desk.path.with_name("registry.db.19700101-000000.old")
    with Store.open(desk.path) as store, Store.open(aside, readonly=True) as old:
        assert everything(store) == everything(old) == before


def test_a_journal_goes_with_the_registry_that_it_belongs_to(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for tail in ("", "-wal", "-shm", "-journal"):
        (tmp_path / f"registry.db{tail}").write_bytes(b"a machine that lost its power")
    rebuild(tmp_path / "registry.db", [tmp_path / "runs"], now=0.0)
    aside = "registry.db.19700101-000000.old"
    for tail in ("", "-wal", "-shm", "-journal"):
        assert (tmp_path / f"{aside}{tail}").read_bytes() == b"a machine that lost its power"
        assert not tail or not (tmp_path / f"registry.db{tail}").exists()


def finish(folder: RunDir, number: int, result: AttemptResult, job_id: str = "7") -> None:
    place = folder.attempt(number)
    AttemptOutcome(
        attempt=number, job_id=job_id, result=result, reason="said the job", exit_code=0, step=20, generations=1,
        started_at=3.0, ended_at=9.0,
    ).write(place.outcome)  # fmt: skip


def tell(folder: RunDir) -> str:
    """What a first attempt's coordinator and rank 0 write; returns the checkpoint's name."""
    name = "step-00000020.001-00000000"
    log = EventLog(folder.attempt(1).event_file("agent-0000"), "agent-0000", 1, clock=lambda: 5.0)
    log.write(EventKind.ATTEMPT_STARTED, job_id="7", nodes=["n1", "n2"], world=4)
    log.generation = 1
    log.write(EventKind.GENERATION_STARTED, world=4, nodes=["n1", "n2"])
    log.write(EventKind.CHECKPOINT_COMMITTED, step=20, name=name, bytes=5, seconds=1.0)
    log.write(EventKind.GENERATION_ENDED, reason="finished", step=20, failure=None)
    log.close()
    return name


def test_without_a_record_the_jobs_own_files_tell(desk: Desk) -> None:
    folder = begin(desk)
    save(folder, tell(folder))
    save(folder, "step-00000030.001-00000000")
    LaunchToken(attempt=1, epoch=41, job_id="7", nonce="00000000").write(folder.attempt(1).go)
    finish(folder, 1, AttemptResult.FINISHED)
    folder.record.unlink(missing_ok=True)
    with rebuilt(desk) as store:
        run, (attempt,) = store.run("tiny-1"), store.attempts("tiny-1")
        assert (run.state, run.identity) == (RunState.SUCCEEDED, {"code": {"sha": "abc"}})
        assert (attempt.state, attempt.job_id, attempt.nodes) == (AttemptState.ENDED, "7", ("n1", "n2"))
        assert (attempt.epoch, attempt.saved_step, attempt.last_step) == (41, 20, 20)
        assert [(item.step, item.trust) for item in store.checkpoints("tiny-1")] == [
            (30, Trust.COMMITTED),
            (20, Trust.COMMITTED),
        ]
        assert [item.reason for item in store.generations("tiny-1")] == ["finished"]
        assert store.config(run.config_digest) == CONFIG
        assert store.take_lease("next", 60.0, 10.0).epoch > 41


def test_without_a_record_nothing_is_started_that_a_person_may_have_cancelled(desk: Desk) -> None:
    for result in (AttemptResult.STOPPED, AttemptResult.FAILED, None):
        folder = begin(desk)
        if result is not None:
            finish(folder, 1, result)
    alive = begin(desk, slug="alive")
    LaunchToken(attempt=1, epoch=3, job_id="9", nonce="00000003").write(alive.attempt(1).go)
    alive.attempt(1).heartbeat.write_text("{}")
    for path in desk.root.iterdir():
        RunDir(path).record.unlink(missing_ok=True)
    lose(desk)
    rebuild(desk.path, [desk.root])
    with Store.open(desk.path) as store:
        held = [store.run(f"tiny-{number}") for number in (1, 2, 3)]
        assert {run.state for run in held} == {RunState.HELD}
        assert all("orch resume tiny-" in run.reason for run in held)
        assert store.run("alive-1").state is RunState.RUNNING
        assert store.attempt("alive-1", 1).job_id == "9"


def test_events_written_after_the_record_are_taken_in(desk: Desk) -> None:
    folder = begin(desk)
    desk.store.move_attempt(folder.name, 1, AttemptState.SUBMITTED, "job 7", **desk.stamp, job_id="7")
    name = tell(folder)
    save(folder, name)
    with rebuilt(desk) as store:
        (checkpoint,) = store.checkpoints(folder.name)
        assert (checkpoint.name, checkpoint.bytes) == (name, 5)
        assert store.attempt(folder.name, 1).state is AttemptState.SUBMITTED
        ((file, end),) = store.cursors(folder.name).items()
        assert end == (folder.path / file).stat().st_size


def test_folders_that_are_not_runs_or_are_damaged_are_left_out(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    good, changed = begin(desk), begin(desk)
    changed.config.write_bytes(canonical({**CONFIG, "name": "other"}))
    (desk.root / "notes").mkdir()
    (desk.root / "broken").mkdir()
    (desk.root / "broken" / "run.json").write_text("{")
    (desk.root / "listed").mkdir()
    (desk.root / "listed" / "run.json").write_text("[]")
    (desk.root / "listed" / "config.json").write_text("{}")
    refused = begin(desk)
    config = {**CONFIG, "train": {"steps": -1}}
    refused.config.write_bytes(canonical(config))
    about = {**json.loads(refused.run.read_text()), "config_digest": hashlib.sha256(canonical(config)).hexdigest()}
    refused.run.write_text(dump_line(about))
    lose(desk)
    with caplog.at_level(logging.WARNING):
        assert rebuild(desk.path, [desk.root], now=50.0) == 1
    with Store.open(desk.path) as store:
        assert [run.name for run in store.runs()] == [good.name]
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert "tiny-2/config.json was changed" in told
    assert "broken/run.json is not JSON" in told
    assert "listed/run.json or" in told
    assert "tiny-3: train.steps=-1" in told


def test_an_edited_config_is_not_believed_where_the_registry_before_still_has_the_true_one(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    folder = begin(desk)
    folder.config.write_bytes(canonical({**CONFIG, "name": "other"}))
    lease = desk.store.lease()
    assert lease is not None
    desk.store.drop_lease(lease)
    desk.store.close()
    with caplog.at_level(logging.WARNING):
        assert rebuild(desk.path, [desk.root], now=50.0) == 1
    with Store.open(desk.path) as store:
        (run,) = store.runs()
        assert store.config(run.config_digest) == CONFIG
        assert {attempt.config_digest for attempt in store.attempts(run.name)} == {run.config_digest}
    assert "config.json was changed: the run keeps the configuration that the registry had" in caplog.text


def test_a_folder_that_may_not_be_read_is_left_out(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    good = begin(desk)
    (desk.root / "secret").mkdir()
    lose(desk)
    is_file = Path.is_file

    def refuse(path: Path) -> bool:
        if path.parent.name == "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert rebuild(desk.path, [desk.root], now=50.0) == 1
    with Store.open(desk.path) as store:
        assert [run.name for run in store.runs()] == [good.name]


def test_two_folders_of_one_name_are_refused_and_nothing_changes(desk: Desk, tmp_path: Path) -> None:
    begin(desk)
    shutil.copytree(desk.root, tmp_path / "copy")
    lose(desk)
    with pytest.raises(RegistryError, match="two folders claim to be the run tiny-1"):
        rebuild(desk.path, [desk.root, tmp_path / "copy"])
    assert not desk.path.exists()


def test_folders_that_moved_are_known_at_their_new_place(desk: Desk, tmp_path: Path) -> None:
    folder = live_through_two_attempts(desk)
    old = desk.store.run(folder.name)
    lose(desk)
    moved = tmp_path / "elsewhere"
    os.rename(desk.root, moved)
    rebuild(desk.path, [moved / folder.name], now=50.0)
    with Store.open(desk.path) as store:
        assert store.run(folder.name) == replace(old, run_dir=str(moved / folder.name))
        assert all(item.path.startswith(str(moved)) for item in store.checkpoints(folder.name))
        near, far = (item.tier for item in store.copies(folder.name))
        assert (near, far) == (str(moved / folder.name / "checkpoints"), "s3://bucket/tiny-1")


def assert_gone_from_the_run_alone(desk: Desk, tier: str) -> None:
    """Of two checkpoints that are not there, the one in this tier stays as recorded by a rebuild."""
    folder = begin(desk)
    for step, place in ((20, ""), (30, tier)):
        name = f"step-{step:08d}.001-00000000"
        item = Checkpoint(
            run=folder.name, name=name, step=step, attempt=1, trust=Trust.COMMITTED, bytes=5,
            path=f"{place or folder.checkpoints}/{name}", committed_at=float(step), tier=place,
        )  # fmt: skip
        desk.store.put_checkpoint(item, epoch=desk.lease.epoch)
    desk.store.move_run(folder.name, RunState.HELD, "disk full", **desk.stamp)
    with rebuilt(desk) as store:
        trust = {item.step: item.trust for item in store.checkpoints(folder.name)}
        assert trust == {20: Trust.DELETED, 30: Trust.COMMITTED}


def test_what_lies_on_the_nodes_own_disks_is_not_taken_for_gone(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = [{"path": "/nvme", "shared": False}, {"path": "run"}]
    monkeypatch.setitem(CONFIG, "checkpoint", {"tiers": tiers})
    assert_gone_from_the_run_alone(desk, "/nvme/tiny-1/n1")


def test_what_lies_in_a_tier_that_cannot_be_read_is_not_taken_for_gone(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, listed = tmp_path / "scratch" / "tiny-1", LocalStorage.list

    def closed(storage: LocalStorage, path: str) -> dict[str, int | None]:
        if storage.root == scratch:
            raise PermissionError(errno.EACCES, "Permission denied", str(scratch))
        return listed(storage, path)

    monkeypatch.setattr(LocalStorage, "list", closed)
    monkeypatch.setitem(CONFIG, "checkpoint", {"tiers": [{"path": str(scratch.parent)}, {"path": "run"}]})
    assert_gone_from_the_run_alone(desk, str(scratch))


def spoil(record: Path, section: str, key: str, value: object) -> None:
    fields = json.loads(record.read_text())
    fields[section][key] = value
    record.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: spoil(record, "run", "state", "DANCING"),
        lambda record: spoil(record, "run", "step", 10**30),
        lambda record: spoil(record, "run", "created_at", 10**30),
        lambda record: record.write_text("null"),
        lambda record: record.write_text("[" * 100_000),
    ],
    ids=["state", "step", "time", "null", "nested"],
)
def test_a_run_with_a_damaged_record_is_rebuilt_from_its_other_files(
    desk: Desk, damage: Callable[[Path], object]
) -> None:
    folder = live_through_two_attempts(desk)
    damage(folder.record)
    with rebuilt(desk) as store:
        run = store.run(folder.name)
        assert (run.state, run.created_at) == (RunState.HELD, 1.0)
        assert run.step < 1000


TRACES: dict[str, Callable[[AttemptDir], object]] = {
    "none": lambda place: None,
    "script": lambda place: (place.submission / "submission.sh").write_text(""),
    "log": lambda place: (place.logs / "agent-0000.log").write_text(""),
    "go": lambda place: LaunchToken(attempt=1, epoch=1, job_id="7", nonce="00000000").write(place.go),
}


@pytest.mark.parametrize("trace", TRACES)
def test_an_attempt_counts_as_submitted_if_its_folder_has_a_trace_of_a_job(desk: Desk, trace: str) -> None:
    folder = begin(desk)
    write_records(desk.store, [folder.name])
    TRACES[trace](folder.attempt(1))
    with rebuilt(desk) as store:
        assert store.run(folder.name).state is RunState.CREATED
        assert never_submitted(store.attempts(folder.name)) == (trace == "none")


@pytest.mark.parametrize("recorded", [True, False])
def test_a_run_keeps_its_cluster_and_its_tags(desk: Desk, recorded: bool) -> None:
    there = "lab@login1:6817/aaaaaaaa"
    folder = begin(desk, scheduler=there, tags=("baseline",))
    desk.store.move_run(folder.name, RunState.HELD, "", **desk.stamp)
    if not recorded:
        folder.record.unlink()
    with rebuilt(desk) as store:
        assert (store.run(folder.name).scheduler, store.run(folder.name).tags) == (there, ("baseline",))
        assert [item.scheduler for item in store.attempts(folder.name)] == [there]
