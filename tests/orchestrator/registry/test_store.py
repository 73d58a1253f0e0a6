"""The store's verbs one by one."""

import math
import sqlite3
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import Fenced, NotFound, RegistryError
from orchestrator.registry.records import Checkpoint, CheckpointCopy, Generation, Notice
from orchestrator.registry.store import Store
from orchestrator.states import AttemptState, RunState, Trust

Desk = Any


def checkpoint(run: str, step: int, **changes: Any) -> Checkpoint:
    fields = {"trust": Trust.COMMITTED, "bytes": 9, "path": "/p", "committed_at": float(step), "attempt": 1}
    return Checkpoint(**{**fields, "run": run, "name": f"step-{step}", "step": step, **changes})


def test_a_run_is_numbered_by_its_slug_and_begins_with_an_intent(desk: Desk) -> None:
    run, attempt = desk.run("tiny")
    assert (run.name, run.state, run.run_dir) == ("tiny-1", RunState.CREATED, str(desk.root / "tiny-1"))
    assert (attempt.state, attempt.job_name) == (AttemptState.INTENT, "orch-tiny-1-1-00000000")
    assert [desk.run(slug)[0].name for slug in ("tiny", "tiny-big", "tiny")] == ["tiny-2", "tiny-big-1", "tiny-3"]
    (desk.root / "tiny-4").mkdir()
    assert desk.run("tiny")[0].name == "tiny-5"


def test_a_run_is_found_by_name_beginning_or_last(desk: Desk) -> None:
    with pytest.raises(NotFound, match="no run yet"):
        desk.store.run("@last")
    for slug in ("alpha", "beta", "beta"):
        desk.run(slug)
    assert desk.store.run("al").name == "alpha-1"
    assert desk.store.run("beta-1").name == "beta-1"
    assert desk.store.run("@last").name == "beta-2"
    with pytest.raises(NotFound, match="several runs begin with beta: beta-2, beta-1"):
        desk.store.run("beta")
    with pytest.raises(NotFound, match="no run bata-1") as caught:
        desk.store.run("bata-1")
    assert "did you mean beta-1" in caught.value.hint
    with pytest.raises(NotFound, match="no run $"):
        desk.store.run("")
    with pytest.raises(NotFound, match="no run %"):
        desk.store.run("%")


def test_a_restore_test_is_never_meant_where_another_run_can_be(desk: Desk) -> None:
    run = desk.run("tiny")[0].name
    tests = [desk.test_of(run, 10), desk.test_of(run, 20)]
    assert desk.store.run("@last").name == run
    assert desk.store.run("ti").name == run
    assert [desk.store.run(test).name for test in tests] == tests
    assert desk.store.run("tiny-1-test-1").name == tests[0]
    with pytest.raises(NotFound, match="several runs begin with tiny-1-t: tiny-1-test-2, tiny-1-test-1"):
        desk.store.run("tiny-1-t")
    other = desk.run("tiny-1-train")[0].name
    assert desk.store.run("tiny-1-t").name == other
    with pytest.raises(NotFound, match="several runs begin with tin: tiny-1-train-1, tiny-1$"):
        desk.store.run("tin")


def test_an_exact_name_wins_over_longer_ones(desk: Desk) -> None:
    for _ in range(10):
        desk.run("tiny")
    assert desk.store.run("tiny-1").name == "tiny-1"


def test_runs_come_newest_first_and_by_state(desk: Desk) -> None:
    names = [desk.run()[0].name for _ in range(3)]
    desk.store.move_run(names[1], RunState.RUNNING, "go", **desk.stamp)
    assert [run.name for run in desk.store.runs()] == names[::-1]
    assert [run.name for run in desk.store.runs(limit=2)] == names[:0:-1]
    assert [run.name for run in desk.store.runs([RunState.RUNNING])] == [names[1]]
    assert desk.store.runs([]) == []


def test_moves_are_written_with_their_reason_and_only_along_the_table(desk: Desk) -> None:
    run, _ = desk.run()
    desk.store.move_run(run.name, RunState.RUNNING, "job 7 runs", **desk.stamp, step=5)
    desk.store.move_run(run.name, RunState.RUNNING, "again", **desk.stamp)
    now = desk.store.run(run.name)
    assert (now.state, now.reason, now.step) == (RunState.RUNNING, "job 7 runs", 5)
    moved = [(item.before, item.after, item.reason) for item in desk.store.transitions(run.name) if item.kind == "run"]
    assert moved == [("", "CREATED", "submitted"), ("CREATED", "RUNNING", "job 7 runs")]
    with pytest.raises(AssertionError, match="may not go from RUNNING to CREATED"):
        desk.store.move_run(run.name, RunState.CREATED, "back", **desk.stamp)
    with pytest.raises(AssertionError, match="no \\['stepp'\\]"):
        desk.store.note_run(run.name, **desk.stamp, stepp=6)
    with pytest.raises(AssertionError, match="no \\['state'\\]"):
        desk.store.note_run(run.name, **desk.stamp, state=RunState.FAILED)


def test_an_attempt_keeps_what_it_is_told(desk: Desk) -> None:
    run, _ = desk.run()
    failure = {"kind": "rank_killed", "reason": "SIGKILL", "rank": 1}
    desk.store.move_attempt(
        run.name, 1, AttemptState.SUBMITTED, "job 7", **desk.stamp, job_id="7", nodes=("a", "b"), failure=failure
    )
    desk.store.note_attempt(run.name, 1, epoch=desk.lease.epoch, last_step=3)
    attempt = desk.store.attempt(run.name, 1)
    assert (attempt.job_id, attempt.nodes, attempt.failure, attempt.last_step) == ("7", ("a", "b"), failure, 3)
    second = desk.store.add_attempt(run.name, nonce="ffffffff", excluded=("a",), **desk.stamp)
    assert (second.number, second.excluded, second.epoch) == (2, ("a",), desk.lease.epoch)
    assert [item.number for item in desk.store.attempts(run.name)] == [1, 2]
    with pytest.raises(NotFound, match="no attempt 3"):
        desk.store.attempt(run.name, 3)


def test_generations_and_checkpoints(desk: Desk) -> None:
    run, _ = desk.run()
    epoch = desk.lease.epoch
    for number in (1, 2):
        desk.store.put_generation(Generation(run=run.name, attempt=1, number=number, started_at=1.0), epoch=epoch)
    desk.store.put_generation(
        Generation(run=run.name, attempt=1, number=1, started_at=1.0, reason="rank 1 died"), epoch=epoch
    )
    assert [(item.number, item.reason) for item in desk.store.generations(run.name)] == [(1, "rank 1 died"), (2, "")]
    assert desk.store.generations(run.name, 2) == []
    assert desk.store.attempt(run.name, 1).generations == 2
    for step in (5, 10):
        desk.store.put_checkpoint(checkpoint(run.name, step), epoch=epoch)
    desk.store.put_checkpoint(checkpoint(run.name, 10, bytes=1), epoch=epoch)
    desk.store.trust(run.name, "step-10", Trust.CORRUPT, "chunk 3 differs", **desk.stamp)
    newest, older = desk.store.checkpoints(run.name)
    assert (newest.step, newest.trust, newest.reason, newest.bytes) == (10, Trust.CORRUPT, "chunk 3 differs", 9)
    assert older.trust is Trust.COMMITTED
    with pytest.raises(AssertionError, match="may not go from CORRUPT to VERIFIED"):
        desk.store.trust(run.name, "step-10", Trust.VERIFIED, "no", **desk.stamp)


def test_a_copy_takes_the_place_of_what_is_gone(desk: Desk) -> None:
    run, _ = desk.run()
    epoch = desk.lease.epoch
    desk.store.put_checkpoint(checkpoint(run.name, 5), epoch=epoch)
    copies = [
        CheckpointCopy(run=run.name, name="step-5", tier=tier, path=f"{tier}/step-5", bytes=9, copied_at=1.0)
        for tier in ("/far", "/farther")
    ]
    for copy in copies:
        desk.store.put_copy(copy, epoch=epoch)
    desk.store.rehome(copies[0], "gone", epoch=epoch)
    (saved,) = desk.store.checkpoints(run.name)
    assert (saved.trust, saved.tier, saved.path, saved.reason) == (Trust.COMMITTED, "/far", "/far/step-5", "gone")
    assert desk.store.copies(run.name) == copies[1:]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 0.1 + 0.2, None])
def test_a_loss_reads_back_exactly(desk: Desk, loss: float | None) -> None:
    run, _ = desk.run()
    desk.store.note_run(run.name, **desk.stamp, loss=loss)
    assert repr(desk.store.run(run.name).loss) == repr(loss)


def test_asks_are_answered_once(desk: Desk) -> None:
    run, _ = desk.run()
    number = desk.store.add_user_request(run.name, "cancel", {"now": True}, 5.0)
    (ask,) = desk.store.user_requests()
    assert (ask.id, ask.verb, ask.args) == (number, "cancel", {"now": True})
    desk.store.answer(number, "done", **desk.stamp)
    desk.store.answer(number, "something else", **desk.stamp)
    assert desk.store.user_requests() == []
    assert [item.answer for item in desk.store.user_requests(pending=False)] == ["done"]
    with pytest.raises(NotFound):
        desk.store.add_user_request("nobody-1", "cancel", {}, 5.0)


def test_nodes_count_attempts_and_failures(desk: Desk) -> None:
    epoch = desk.lease.epoch
    desk.store.saw_node("n1", "slurm", epoch=epoch, now=1.0)
    desk.store.saw_node("n1", "slurm", epoch=epoch, now=2.0)
    desk.store.saw_node("n1", "slurm", epoch=epoch, now=3.0, failure="XID 79")
    desk.store.exclude_node("n1", "slurm", 99.0, "XID 79", epoch=epoch, now=3.0)
    (node,) = desk.store.nodes()
    assert (node.attempts, node.failures, node.excluded_until, node.reason) == (2, 1, 99.0, "XID 79")
    assert (node.first_seen, node.last_seen) == (1.0, 3.0)
    desk.store.exclude_node("n1", "slurm", 200.0, "slow", epoch=epoch, now=4.0)
    (node,) = desk.store.nodes()
    assert (node.attempts, node.failures, node.excluded_until, node.reason) == (2, 1, 200.0, "slow")


def test_notices_are_kept_once_and_found_by_cluster_kind_and_time(desk: Desk) -> None:
    run, _ = desk.run()
    told = [
        Notice(
            run=run.name,
            attempt=1,
            source="coordinator",
            seq=seq,
            kind=kind,
            generation=1,
            time=float(time),
            node="n1",
            data={"rank": seq},
        )  # fmt: skip
        for seq, kind, time in ((2, "straggler", 20), (1, "incident", 10))
    ]
    for notice in (*told, replace(told[0], data={})):
        desk.store.put_notice(notice, epoch=desk.lease.epoch)
    assert desk.store.notices(run.name) == told[::-1]
    assert desk.store.cluster_notices(run.cluster, ["straggler", "incident"], 15.0) == told[:1]
    assert desk.store.cluster_notices(run.cluster, ["incident"], 15.0) == []
    assert desk.store.cluster_notices("elsewhere", ["straggler"], 0.0) == []


def test_a_config_is_stored_once_and_never_changed(desk: Desk) -> None:
    digest = desk.store.put_config({"b": 1.5, "a": "é"})
    assert desk.store.put_config({"a": "é", "b": 1.5}) == digest
    assert desk.store.config(digest) == {"a": "é", "b": 1.5}
    raw = sqlite3.connect(desk.path)
    for statement in (
        "UPDATE configs SET data = '{}'",
        "DELETE FROM configs",
        f"INSERT OR REPLACE INTO configs VALUES ('{digest}', '{{}}')",
        f"REPLACE INTO configs VALUES ('{digest}', '{{}}')",
    ):
        with pytest.raises(sqlite3.IntegrityError, match="a config is never"):
            raw.execute(statement)
    raw.close()
    assert desk.store.config(digest) == {"a": "é", "b": 1.5}
    with pytest.raises(NotFound):
        desk.store.config("0" * 64)


def test_a_fenced_controller_writes_nothing(desk: Desk) -> None:
    run, _ = desk.run()
    store, old = desk.store, desk.lease.epoch
    store.drop_lease(desk.lease)
    store.take_lease("other", 1.0, 100.0)
    before = (store.run(run.name), store.attempts(run.name), store.transitions(run.name))
    stamp = {"epoch": old, "now": 2.0}
    number = store.add_user_request(run.name, "cancel", {}, 1.0)
    writes = [
        lambda: store.move_run(run.name, RunState.RUNNING, "x", **stamp),
        lambda: store.move_attempt(run.name, 1, AttemptState.ENDED, "x", **stamp),
        lambda: store.note_run(run.name, **stamp, step=3),
        lambda: store.note_attempt(run.name, 1, epoch=old, last_step=3),
        lambda: store.add_attempt(run.name, nonce="ffffffff", excluded=(), **stamp),
        lambda: store.put_generation(Generation(run=run.name, attempt=1, number=1, started_at=1.0), epoch=old),
        lambda: store.put_checkpoint(checkpoint(run.name, 5), epoch=old),
        lambda: store.trust(run.name, "step-5", Trust.CORRUPT, "x", **stamp),
        lambda: store.rehome(
            CheckpointCopy(run=run.name, name="s", tier="t", path="p", bytes=1, copied_at=1.0), "", epoch=old
        ),
        lambda: store.saw_node("n", "slurm", **stamp),
        lambda: store.exclude_node("n", "slurm", 9.0, "slow", **stamp),
        lambda: store.release_node("n", "slurm", "asked", **stamp),
        lambda: store.put_notice(
            Notice(run=run.name, attempt=1, source="s", seq=1, kind="incident", generation=1, time=1.0), epoch=old
        ),
        lambda: store.set_cursor(run.name, "f", 1, epoch=old),
        lambda: store.answer(number, "x", **stamp),
        lambda: store.renew_lease(desk.lease, 2.0, 10.0),
        lambda: store.note_tick(desk.lease, 2.0),
    ]
    for write in writes:
        with pytest.raises(Fenced):
            write()
    assert (store.run(run.name), store.attempts(run.name), store.transitions(run.name)) == before
    assert store.nodes() == []
    assert store.cursors(run.name) == {}


def test_together_is_all_or_nothing(desk: Desk) -> None:
    run, _ = desk.run()

    def half() -> None:
        desk.store.note_run(run.name, **desk.stamp, step=7)
        assert desk.store.run(run.name).step == 7
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        desk.store.together(half)
    assert desk.store.run(run.name).step == 0


def test_a_read_in_another_thread_does_not_see_an_open_write(desk: Desk) -> None:
    run, _ = desk.run()
    seen: list[int] = []

    def write() -> None:
        desk.store.note_run(run.name, **desk.stamp, step=7)
        reader = threading.Thread(target=lambda: seen.append(desk.store.run(run.name).step))
        reader.start()
        reader.join(10)

    desk.store.together(write)
    assert seen == [0]
    assert desk.store.run(run.name).step == 7


def test_what_is_read_together_is_one_snapshot_and_writes_nothing(desk: Desk) -> None:
    run, _ = desk.run()
    steps: list[int] = []

    def read() -> None:
        steps.append(desk.store.run(run.name).step)
        writer = threading.Thread(target=lambda: desk.store.note_run(run.name, **desk.stamp, step=7))
        writer.start()
        writer.join(10)
        steps.append(desk.store.run(run.name).step)
        with pytest.raises(AssertionError, match="a write within a read"):
            desk.store.note_run(run.name, **desk.stamp, step=8)

    desk.store.database.read(read)
    assert steps == [0, 0]
    assert desk.store.run(run.name).step == 7


def test_a_registry_that_stays_locked_is_told_so(desk: Desk) -> None:
    from orchestrator.registry.database import Database

    desk.run()
    blocker = sqlite3.connect(desk.path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    database = Database(desk.path, patience=0.0, busy_seconds=0.05)
    with pytest.raises(RegistryError, match="locked by another process"):
        database.write(lambda: None)
    blocker.execute("ROLLBACK")
    blocker.close()
    database.write(lambda: None)
    database.close()


def test_the_file_is_private_and_a_readonly_store_makes_none(desk: Desk, tmp_path: Path) -> None:
    assert stat.S_IMODE(desk.path.stat().st_mode) == 0o600
    with pytest.raises(RegistryError, match="no registry yet"):
        Store.open(tmp_path / "none.db", readonly=True)
    assert not (tmp_path / "none.db").exists()
    run, _ = desk.run()
    with Store.open(desk.path, readonly=True) as reader:
        assert reader.run(run.name).name == run.name
        with pytest.raises(RegistryError, match="read-only"):
            reader.put_config({"a": 1})


def test_files_that_are_no_registry_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.db"
    text.write_text("not a database at all, but long enough to look at" * 50)
    with pytest.raises(RegistryError, match="is not a registry"):
        Store.open(text)
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE mine (x)")
    other.close()
    with pytest.raises(RegistryError, match="not an orch registry"):
        Store.open(tmp_path / "other.db")
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(RegistryError, match="it is a folder"):
        Store.open(tmp_path / "folder.db")
    (tmp_path / "file").write_text("")
    with pytest.raises(RegistryError, match="cannot be written"):
        Store.open(tmp_path / "file" / "registry.db")


def test_submissions_are_counted_within_their_attempt_and_over_all_runs(desk: Desk) -> None:
    (run, _), (other, _) = desk.run(), desk.run()
    epoch = desk.lease.epoch
    first = desk.store.add_submission(run.name, 1, epoch=epoch, now=10.0)
    second = desk.store.add_submission(run.name, 1, epoch=epoch, now=20.0)
    desk.store.add_submission(other.name, 1, epoch=epoch, now=15.0)
    desk.store.note_submission(run.name, 1, first, epoch=epoch, job_id="7", outcome="adopted")
    assert (first, second) == (1, 2)
    own = [(one.number, one.job_id, one.outcome) for one in desk.store.submissions(run.name)]
    assert own == [(1, "7", "adopted"), (2, None, "")]
    assert [(one.run, one.submitted_at) for one in desk.store.submissions(since=12.0)] == [
        (other.name, 15.0), (run.name, 20.0),
    ]  # fmt: skip
    with pytest.raises(Fenced):
        desk.store.add_submission(run.name, 1, epoch=epoch - 1, now=30.0)
