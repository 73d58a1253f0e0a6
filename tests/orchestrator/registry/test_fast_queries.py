"""Queries of `orch status`, with the standard library only."""

import ast
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import RegistryError
from orchestrator.registry import fast_queries, versions
from orchestrator.registry.records import Attempt, Checkpoint, Generation, RestoreTest, Run
from orchestrator.registry.tables import compile_statement, encode, field_names, insertion
from orchestrator.states import AttemptState, RunState, Trust
from tests.fakes.new_runs import create_run
from tests.orchestrator.ordinary_user import folder_of_an_ordinary_user
from trainer.protocol.restore_test import UNDECIDED, Outcome

Desk = Any
ROOT = Path(fast_queries.__file__).resolve().parents[2]


def test_one_answer_has_all_that_status_shows(desk: Desk) -> None:
    run, _ = desk.run()
    store, stamp, epoch = desk.store, desk.stamp, desk.lease.epoch
    store.move_attempt(run.name, 1, AttemptState.ENDED, "node lost", **stamp, job_id="7", nodes=("a",))
    store.add_attempt(run.name, nonce="ffffffff", excluded=(), **stamp)
    store.note_attempt(run.name, 2, epoch=epoch, job_id="8", nodes=("b", "c"), job_state="RUNNING")
    store.move_run(run.name, RunState.RUNNING, "job 8 is RUNNING", **stamp, step=20, loss=float("nan"))
    for attempt, number in ((1, 1), (1, 2), (2, 1)):
        store.put_generation(Generation(run=run.name, attempt=attempt, number=number, started_at=1.0), epoch=epoch)
    for step, trust in ((10, Trust.VERIFIED), (20, Trust.COMMITTED), (30, Trust.CORRUPT), (40, Trust.DELETED)):
        item = Checkpoint(
            run=run.name, name=f"s{step}", step=step, attempt=1, trust=trust, bytes=1, path="/p", committed_at=step
        )
        store.put_checkpoint(item, epoch=epoch)
    (row,) = fast_queries.newest(desk.path)
    assert repr(row.pop("loss")) == "nan"
    assert row == {
        "run": run.name, "state": "RUNNING", "reason": "job 8 is RUNNING", "cluster": "local", "run_dir": run.run_dir,
        "config_digest": run.config_digest, "step": 20, "total_steps": 100, "created_at": 1.0, "updated_at": 10.0,
        "scheduler": "", "slurm_cluster": None,
        "not_before": 0.0, "attempts": 2, "generations": 3, "attempt": 2, "job_id": "8", "job_state": "RUNNING",
        "saved_path": "/p",
        "nodes": ["b", "c"], "checkpoint": {"step": 20, "trust": "COMMITTED", "committed_at": 20.0},
        "failure": None, "restore_test": None, "bad_test": None, "test_of": None,
        "tags": [], "notified": {}, "removal": "", "speed_since": {"step": 0, "at": 1.0, "saved": False},
        "after": "", "after_removed": False, "sweep": {}, "start_at": None, "start_noted_at": None,
    }  # fmt: skip


@pytest.mark.parametrize("created_at", [1.0, 0.0], ids=["known", "of-an-older-registry"])
def test_a_removed_predecessor_is_no_later_run_of_its_name(desk: Desk, created_at: float) -> None:
    first, _ = desk.run("first")
    create_run(
        desk.store, desk.root, {}, slug="later", nonce="0000000a", predecessor=first.name,
        predecessor_created_at=created_at,
    )  # fmt: skip

    def is_removed() -> bool:
        return bool(fast_queries.runs_by_name(desk.path, ["later-1"])[0]["after_removed"])

    assert not is_removed()
    desk.store.move_run(first.name, RunState.CANCELLED, "", **desk.stamp)
    desk.store.move_attempt(first.name, 1, AttemptState.ENDED, "", **desk.stamp)
    desk.store.begin_removal(first.name)
    desk.store.delete_run(first.name)
    assert is_removed()
    assert desk.run("first", now=3.0)[0].name == first.name
    assert is_removed() == bool(created_at)


def test_newest_first_limited_by_state_and_by_name(desk: Desk) -> None:
    names = [desk.run()[0].name for _ in range(3)]
    desk.store.move_run(names[0], RunState.HELD, "disk full", **desk.stamp)
    assert [row["run"] for row in fast_queries.newest(desk.path, 2)] == [names[2], names[1]]
    assert [row["run"] for row in fast_queries.newest(desk.path, None)] == names[::-1]
    assert [row["run"] for row in fast_queries.newest(desk.path, 50, [RunState.HELD])] == [names[0]]
    assert fast_queries.newest(desk.path, 50, []) == []
    assert [row["run"] for row in fast_queries.runs_by_name(desk.path, [names[1], "nobody-1"])] == [names[1]]
    assert fast_queries.newest(desk.path, 1)[0]["checkpoint"] is None


def test_runs_that_are_restore_tests_are_left_out_unless_they_are_asked_for(desk: Desk) -> None:
    run = desk.run()[0].name
    test = desk.test_of(run, 10)
    assert [row["run"] for row in fast_queries.newest(desk.path)] == [run]
    assert [row["run"] for row in fast_queries.newest(desk.path, 50, [RunState.CREATED])] == [run]
    assert [row["run"] for row in fast_queries.newest(desk.path, 1, tests=True)] == [test]
    assert [row["run"] for row in fast_queries.runs_by_name(desk.path, [test])] == [test]


def verdicts_of(desk: Desk, run: str) -> tuple[Any, Any]:
    """Step and verdict of the newest finished test, and of the one that found the newest checkpoint bad."""
    (row,) = fast_queries.runs_by_name(desk.path, [run])
    return tuple(found and (found["step"], found["verdict"]) for found in (row["restore_test"], row["bad_test"]))


def saved(desk: Desk, run: str, step: int, at: float) -> None:
    """A checkpoint, and its row."""
    item = Checkpoint(
        run=run, name=f"s{step}", step=step, attempt=1, trust=Trust.COMMITTED, bytes=1, path="/p", committed_at=at
    )
    desk.store.put_checkpoint(item, epoch=desk.lease.epoch)


def test_the_newest_finished_restore_test_is_told(desk: Desk) -> None:
    run = desk.run()[0].name
    desk.test_of(run, 10)
    desk.test_of(run, 10, Outcome.NOT_FINISHED)
    assert verdicts_of(desk, run) == (None, None)
    desk.test_of(run, 10, Outcome.RESTORED, ended_at=30.0, layout="2x4")
    desk.test_of(run, 20, Outcome.RESTORED, ended_at=25.0)
    desk.test_of(run, 30, Outcome.NOT_FINISHED, ended_at=40.0)
    (row,) = fast_queries.runs_by_name(desk.path, [run])
    assert row["restore_test"] == {"step": 10, "layout": "2x4", "verdict": "RESTORED", "ended_at": 30.0}
    assert fast_queries.found_bad(desk.path, 0.0) == []


@pytest.mark.parametrize("verdict", [Outcome.SUSPECT, Outcome.CORRUPT])
def test_a_bad_checkpoint_is_told_until_it_or_a_newer_one_is_restored(desk: Desk, verdict: Outcome) -> None:
    run = desk.run()[0].name
    saved(desk, run, 400, 4.0)
    saved(desk, run, 300, 3.0)
    desk.test_of(run, 400, Outcome.RESTORED, ended_at=40.0)
    desk.test_of(run, 400, verdict, ended_at=50.0)
    (row,) = fast_queries.runs_by_name(desk.path, [run])
    assert row["bad_test"] == {
        "step": 400, "layout": "same", "verdict": verdict, "ended_at": 50.0, "reason": f"{verdict} at 400"
    }  # fmt: skip
    desk.test_of(run, 300, Outcome.RESTORED, ended_at=60.0)  # the older one, which is tested at once
    assert verdicts_of(desk, run) == ((300, "RESTORED"), (400, verdict))
    assert (fast_queries.found_bad(desk.path, 50.0), fast_queries.found_bad(desk.path, 50.5)) == ([run], [])
    desk.test_of(run, 400, Outcome.RESTORED, ended_at=70.0)
    assert verdicts_of(desk, run) == ((400, "RESTORED"), None)


def test_a_checkpoint_of_a_later_attempt_is_newer_than_one_of_a_higher_step(desk: Desk) -> None:
    run = desk.run()[0].name
    saved(desk, run, 400, 4.0)
    saved(desk, run, 350, 5.0)  # after a roll-back
    desk.test_of(run, 400, Outcome.CORRUPT, ended_at=50.0)
    desk.test_of(run, 350, Outcome.RESTORED, ended_at=60.0)
    assert verdicts_of(desk, run) == ((350, "RESTORED"), None)
    desk.test_of(run, 400, Outcome.CORRUPT, ended_at=70.0)
    assert verdicts_of(desk, run) == ((400, "CORRUPT"), None)
    desk.test_of(run, 350, Outcome.CORRUPT, ended_at=80.0)
    assert verdicts_of(desk, run) == ((350, "CORRUPT"), (350, "CORRUPT"))


def test_the_words_of_the_query_are_those_of_the_verdicts() -> None:
    bad, good = {str(Outcome.SUSPECT), str(Outcome.CORRUPT)}, {str(Outcome.RESTORED)}
    assert set(ast.literal_eval(fast_queries._BAD)) == bad
    assert set(ast.literal_eval(fast_queries._FINISHED)) == bad | good == set(Outcome) - UNDECIDED


def test_the_lease_tells_how_old_the_answer_is(desk: Desk, tmp_path: Path) -> None:
    before = fast_queries.lease(desk.path)
    desk.store.note_tick(desk.lease, 40.0)
    after = fast_queries.lease(desk.path)
    assert after == desk.store.lease()
    assert before is not None
    assert after is not None
    assert (before.ticked_at, after.ticked_at) == (0.0, 40.0)


def test_no_registry_is_an_empty_answer(tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    assert (fast_queries.newest(path), fast_queries.lease(path), versions.read_version(path)) == ([], None, None)
    assert not path.exists()
    path.touch()
    assert (fast_queries.newest(path), fast_queries.lease(path), versions.read_version(path)) == ([], None, None)


def test_what_is_no_file_or_may_not_be_read_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="cannot be opened: it is a folder") as caught:
        fast_queries.newest(tmp_path)
    assert caught.value.hint == f"ORCH_REGISTRY names a file: {tmp_path}/registry.db"
    with folder_of_an_ordinary_user() as folder:
        path = folder / "registry.db"
        path.touch(mode=0o000)
        with pytest.raises(RegistryError, match="cannot be opened: permission denied") as caught:
            fast_queries.newest(path)
        assert caught.value.hint == f"chmod u+rw {path}, or ask its owner"


def test_it_reads_while_a_writer_is_in_the_middle_of_a_transaction(desk: Desk) -> None:
    run, _ = desk.run()
    seen: list[int] = []

    def write() -> None:
        desk.store.note_run(run.name, **desk.stamp, step=9)
        seen.extend(row["step"] for row in fast_queries.newest(desk.path))

    desk.store.together(write)
    assert seen == [0]
    assert fast_queries.newest(desk.path)[0]["step"] == 9


ON_A_READ_ONLY_MOUNT = """
set -e; folder=$(dirname "$1"); mount --bind "$folder" "$folder"; mount -o remount,bind,ro "$folder"
exec "$0" -c 'import sys; from pathlib import Path; from orchestrator.registry import fast_queries
fast_queries.newest(Path(sys.argv[1]))' "$1"
"""


def test_a_log_on_a_read_only_mount_is_told_so(desk: Desk, tmp_path: Path) -> None:
    desk.run()
    desk.store.close()
    inside = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount")
    command = [*inside, "sh", "-c", ON_A_READ_ONLY_MOUNT, sys.executable, str(desk.path)]
    read = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "read-only mount, where its write-ahead log" in read.stderr
    assert read.stderr.count("Traceback") == 2  # SQLite's error, and the one to show


def fill(desk: Desk, count: int) -> None:
    """Insert runs with three attempts, five checkpoints and, for every second run, a test of its predecessor."""
    digest = desk.store.put_config({})

    def rows() -> Iterator[object]:
        for n in range(count):
            name = f"r-{n}"
            yield Run(
                name=name, state=RunState.RUNNING if n % 9 == 0 else RunState.SUCCEEDED, reason="", cluster="slurm",
                run_dir=f"/r/{n}", config_digest=digest, total_steps=9, identity={"x": "x" * 4000},
            )  # fmt: skip
            for k in range(1, 4):
                yield Attempt(run=name, number=k, state=AttemptState.ENDED, nonce="n", job_name=f"{name}/{k}")
                yield Generation(run=name, attempt=k, number=1, started_at=1.0)
            for k in range(5):
                yield Checkpoint(
                    run=name, name=f"s-{k}", step=k, attempt=1, trust=Trust.COMMITTED, bytes=1, path="/p",
                    committed_at=1.0,
                )  # fmt: skip
            if n % 2:
                verdict = "CORRUPT" if n % 3 == 0 else "RESTORED"
                yield RestoreTest(
                    test=name, run=f"r-{n - 1}", checkpoint=f"s-{n % 5}", layout="same", step=1, begun_at=1.0,
                    ended_at=2.0, verdict=verdict, evidence={"x": "x" * 3000},
                )  # fmt: skip

    by_kind: dict[type, list[dict[str, Any]]] = {}
    for row in rows():
        by_kind.setdefault(type(row), []).append({name: encode(value) for name, value in vars(row).items()})
    with closing(sqlite3.connect(desk.path)) as raw, raw:
        for kind, values in by_kind.items():
            raw.executemany(compile_statement(insertion(kind), field_names(kind))[0], values)


def test_thousands_of_runs_are_read_by_look_ups(desk: Desk) -> None:
    fill(desk, 4_000)

    def work(limit: int, states: list[str] | None) -> int:
        ticks = 0

        def tick() -> int:
            nonlocal ticks
            ticks += 1
            return 0

        connect = versions.connect_readonly

        def counted(path: Path) -> sqlite3.Connection:
            connection = connect(path)
            connection.set_progress_handler(tick, 100)
            return connection

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(versions, "connect_readonly", counted)
            rows = fast_queries.newest(desk.path, limit, states)
        assert len(rows) == limit
        assert rows[0]["attempts"] == rows[0]["generations"] == 3
        return ticks

    # Reading all runs takes some 20,000 ticks of 100 instructions; 50 of them by index a few hundred.
    assert work(50, None) < 400
    assert work(50, ["RUNNING"]) < 400
    assert work(10, None) * 3 < work(50, None)


def test_it_loads_no_heavy_library(desk: Desk) -> None:
    desk.run()
    code = (
        "import sys; from pathlib import Path; from orchestrator.registry import fast_queries, versions; "
        "p = Path(sys.argv[1]); assert fast_queries.newest(p); fast_queries.lease(p); versions.read_version(p); "
        "print([m for m in ('sqlalchemy', 'torch', 'omegaconf', 'rich', 'yaml') if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(desk.path)], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    assert answer.stdout.strip() == "[]"
