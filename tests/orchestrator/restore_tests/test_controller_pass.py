"""What a controller does about restore tests: it begins them as runs, and records what they have found."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpointing.retention.pins import pin, read_pins
from checkpointing.storage.backends import LocalStorage
from checkpointing.verification.verdicts import RESTORE_TESTED, read_verdicts
from orchestrator.config.compose import compose
from orchestrator.controller.run_dirs.bounded_files import DirectFiles
from orchestrator.registry.operations.run_record import record_of
from orchestrator.registry.records import Checkpoint, NewRun, Notice, RestoreTest, Run
from orchestrator.registry.store import Store
from orchestrator.restore_tests.controller_pass import RestoreTests, begin_test
from orchestrator.restore_tests.create import Asked
from orchestrator.states import AttemptState, RunState, Trust
from trainer.contract.events import EventKind
from trainer.contract.run_dir import RunDir

NOW = 1_000_000.0
NONCE = "0123abcd"


class Desk:
    """A registry with one run that has succeeded, and its controller's restore tests."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.root = folder / "runs"
        self.root.mkdir()
        self.store = Store.open(folder / "registry.db")
        lease = self.store.take_lease("here", 0.0, 1e9)
        assert lease is not None
        self.epoch = lease.epoch
        self.tests = RestoreTests(self.store, DirectFiles(), lambda run: True)
        settings = [f"cluster.root={self.root}", "cluster.kind=local", "restore_tests.budget=1000000", *overrides]
        self.composed = compose("tiny-gpt", settings)
        digest = self.store.put_config(self.composed.data)
        new = NewRun(
            slug="r", cluster="local", root=self.root, config_digest=digest, total_steps=300, identity={"code": {}},
            scheduler="local@here",
        )  # fmt: skip
        run, _ = self.store.create_run(new, now=NOW - 1000, nonce=NONCE)
        self.name = run.name
        RunDir(Path(run.run_dir)).make()
        stamp = self.stamp(NOW - 10)
        self.store.move_attempt(self.name, 1, AttemptState.SUBMITTED, "", **stamp)
        self.store.move_attempt(self.name, 1, AttemptState.RUNNING, "", **stamp, started_at=NOW - 900)
        for step in (100, 200, 300):
            self.store.put_checkpoint(self.checkpoint(step), epoch=self.epoch)
            Path(self.checkpoint(step).path).mkdir()
        self.store.move_attempt(self.name, 1, AttemptState.ENDED, "", **stamp, ended_at=NOW - 10)
        self.store.move_run(self.name, RunState.SUCCEEDED, "", **stamp)

    def stamp(self, now: float = NOW) -> dict[str, Any]:
        return {"epoch": self.epoch, "now": now}

    @property
    def run(self) -> Run:
        return self.store.run(self.name)

    @property
    def folder(self) -> RunDir:
        return RunDir(self.root / self.name)

    def checkpoint(self, step: int) -> Checkpoint:
        name = f"step-{step:08d}.001-{NONCE}"
        return Checkpoint(
            run=self.name, name=name, step=step, attempt=1, trust=Trust.COMMITTED, bytes=10,
            path=f"{self.folder.checkpoints}/{name}", committed_at=NOW - 500, manifest="f" * 32,
        )  # fmt: skip

    def trust(self, step: int) -> Trust:
        return {row.step: row.trust for row in self.store.checkpoints(self.name)}[step]

    def passes(self, now: float = NOW) -> list[str]:
        return self.tests.run(self.epoch, now, look=True)

    def under_way(self) -> RestoreTest:
        (test,) = self.store.restore_tests(going_on=True)
        return test

    def end(self, test: RestoreTest, verdict: str = "", reason: str = "why", **evidence: Any) -> None:
        """Let the test's run end as a job lets it, with this verdict."""
        if verdict:
            told = {"place": str(self.folder.checkpoints), **evidence}
            notice = Notice(
                run=test.test, attempt=1, source="rank-00000/1", seq=9, kind=EventKind.RESTORE_TESTED, generation=1,
                time=NOW, data={"verdict": verdict, "reason": reason, "evidence": told},
            )  # fmt: skip
            self.store.put_notice(notice, epoch=self.epoch)
        self.store.move_run(
            test.test, RunState.SUCCEEDED if verdict else RunState.FAILED, "how it ended", **self.stamp()
        )


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.store.close()


def test_what_is_due_becomes_a_run_with_an_order(desk: Desk) -> None:
    assert desk.passes() == ["r-1-test-1: restore test of step 300 of r-1 on same: the run has succeeded"]
    test = desk.store.run("r-1-test-1")
    order = test.identity["restore_test"]
    assert (order["run"], order["step"], order["layout"], order["same_layout"]) == ("r-1", 300, "same", True)
    assert order["manifest"] == "f" * 32
    assert order["config_digest"] == desk.run.config_digest
    assert order["place"] == str(desk.folder.checkpoints)
    config = desk.store.config(test.config_digest)
    assert config["checkpoint"]["every"] == 0
    assert config["restore_tests"]["every"] == "off"
    assert config["drill"]["events"] == []
    assert config["train"] == desk.composed.data["train"]
    assert read_pins(LocalStorage(desk.folder.checkpoints))[order["checkpoint"]].note == "restore test r-1-test-1"
    assert desk.passes() == [], "one at a time"


def test_a_pass_restores_trust_marks_the_copy_and_takes_the_pin_away(desk: Desk) -> None:
    desk.passes()
    desk.end(desk.under_way(), "RESTORED", first_step_at=NOW + 30.0, verify_seconds=10.0)
    assert desk.passes()[0] == "r-1-test-1: step 300 of r-1 on same: RESTORED, why"
    assert desk.trust(300) is Trust.RESTORED
    assert read_pins(LocalStorage(desk.folder.checkpoints)) == {}
    (mark,) = read_verdicts(LocalStorage(desk.folder.checkpoints))
    assert (mark.ok, mark.level, mark.name) == (True, RESTORE_TESTED, desk.checkpoint(300).name)
    (test,) = desk.store.restore_tests("r-1")
    assert (test.verdict, test.ended_at) == ("RESTORED", NOW)
    assert desk.passes() == [], "it is proven"


@pytest.mark.parametrize(("verdict", "trust"), [("SUSPECT", Trust.SUSPECT), ("CORRUPT", Trust.CORRUPT)])
def test_a_bad_one_is_told_of_and_the_next_older_one_is_tested_at_once(desk: Desk, verdict: str, trust: Trust) -> None:
    desk.passes()
    desk.end(desk.under_way(), verdict, "loss of step 301 is 9.0, the run had 2.0")
    ended, begun = desk.passes()
    assert verdict in ended
    assert begun == f"r-1-test-2: restore test of step 200 of r-1 on same: step 300 was found {verdict}"
    assert desk.trust(300) is trust
    (notice,) = desk.store.notices("r-1")
    assert (notice.kind, notice.data["step"], notice.data["verdict"]) == ("restore.tested", 300, verdict)
    marks = [(mark.ok, mark.reason) for mark in read_verdicts(LocalStorage(desk.folder.checkpoints))]
    assert marks == ([(False, "loss of step 301 is 9.0, the run had 2.0")] if verdict == "CORRUPT" else [])


def test_without_a_verdict_nothing_is_known(desk: Desk) -> None:
    desk.passes()
    desk.end(desk.under_way())
    desk.passes()
    (test,) = desk.store.restore_tests("r-1")
    assert (test.verdict, test.reason) == ("NOT_FINISHED", "how it ended")
    assert desk.trust(300) is Trust.COMMITTED
    assert read_pins(LocalStorage(desk.folder.checkpoints)) == {}
    (due,) = desk.tests.due(NOW)
    assert due.at > NOW


def test_a_pin_of_a_person_stays(desk: Desk) -> None:
    storage, name = LocalStorage(desk.folder.checkpoints), desk.checkpoint(300).name
    pin(storage, name, "for the paper", NOW)
    desk.passes()
    assert read_pins(storage)[name].note == "for the paper"
    desk.end(desk.under_way(), "RESTORED")
    desk.passes()
    assert read_pins(storage)[name].note == "for the paper"


def test_the_verdict_on_a_copy_says_nothing_of_the_one_at_home(desk: Desk) -> None:
    desk.passes()
    desk.end(desk.under_way(), "CORRUPT", place="/elsewhere")
    desk.passes()
    assert desk.trust(300) is Trust.COMMITTED


def test_of_several_ranks_the_one_that_failed_decides(desk: Desk) -> None:
    desk.passes()
    test = desk.under_way()
    for rank, verdict in enumerate(("RESTORED", "SUSPECT", "RESTORED")):
        notice = Notice(
            run=test.test, attempt=1, source=f"restore-test-{rank:05d}", seq=1, kind=EventKind.RESTORE_TESTED,
            generation=1, time=NOW, data={"verdict": verdict, "reason": f"rank {rank}", "evidence": {}},
        )  # fmt: skip
        desk.store.put_notice(notice, epoch=desk.epoch)
    desk.end(test)
    desk.passes()
    (ended, *_) = desk.store.restore_tests("r-1")
    assert (ended.verdict, ended.reason) == ("SUSPECT", "rank 1")


def test_a_layout_that_the_run_cannot_have_begins_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(tmp_path, "restore_tests.layouts=[3]", "train.batch_size=16")
    assert desk.passes() == []
    assert "train.batch_size=16: must be a multiple of the 3 data-parallel ranks" in caplog.text
    desk.store.close()


def test_of_two_runs_one_is_tested_at_a_time(desk: Desk) -> None:
    forced = Asked(checkpoint=desk.checkpoint(100), forced=True)
    begin_test(desk.store, DirectFiles(), desk.run, forced, NOW)
    assert desk.passes() == []
    desk.end(desk.under_way(), "RESTORED")
    assert len(desk.passes()) == 2


def test_the_record_of_a_test_keeps_its_row(desk: Desk) -> None:
    desk.passes()
    desk.end(desk.under_way(), "RESTORED")
    desk.passes()
    record = record_of(desk.store, "r-1-test-1")
    assert record.restore_test is not None
    assert record.restore_test.verdict == "RESTORED"
    assert json.loads(record.encode())["restore_test"]["checkpoint"] == desk.checkpoint(300).name
    assert record_of(desk.store, "r-1").checkpoints[0].manifest == "f" * 32
    assert replace(record_of(desk.store, "r-1")).restore_test is None


def test_a_controller_that_was_paused_begins_nothing_again(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """It has found the test due before its successor began it."""
    stale = desk.tests.due(NOW)
    desk.passes()
    desk.tests.due = lambda now, *, force=False: stale  # type: ignore[method-assign]
    assert desk.passes() == []
    assert "a restore test of r-1 is under way" in caplog.text
