"""What a controller does about restore tests: it begins them as runs, and records what they have found."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpointing.retention.garbage import pin, read_pins, remove_pin
from checkpointing.storage.backends import LocalStorage
from checkpointing.verification.verdicts import RESTORE_TESTED, read_verdicts
from orchestrator.config.run_config import RunConfig
from orchestrator.registry.records import Checkpoint, Generation, NewRun, Notice, RestoreTest, Run
from orchestrator.registry.run_record import load_record
from orchestrator.registry.store import Store
from orchestrator.restore_tests.controller_pass import RestoreTests, begin_test
from orchestrator.restore_tests.create import RestoreTestRequest, create_test
from orchestrator.run_dirs.bounded_files import DirectFiles
from orchestrator.states import AttemptState, RunState, Trust
from orchestrator.submission.run_identity import code
from tests.fakes.new_runs import take_lease
from tests.orchestrator.tiny_config import tiny_config
from trainer.protocol.events import EventKind
from trainer.protocol.plain_data import build
from trainer.protocol.restore_test import RestoreTestOrder as Order
from trainer.protocol.run_dir import RunDir
from trainer.protocol.user_code.code_record import CodeRecord
from trainer.protocol.user_code.installed_packages import find_site_folders

NOW = 1_000_000.0
NONCE = "0123abcd"


class Desk:
    """A registry with one run that has succeeded, and its controller's restore tests."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.root = folder / "runs"
        self.root.mkdir()
        self.store = Store.open(folder / "registry.db")
        lease = take_lease(self.store, "here", 0.0, 1e9)
        self.epoch = lease.epoch
        self.tests = RestoreTests(self.store, DirectFiles(), lambda run: True)
        self.overrides = overrides
        self.name = self.add_run()

    def add_run(self, data: dict[str, Any] | None = None) -> str:
        """One more run that has succeeded; tests from then on are about it. All in one transaction, to save time."""
        return self.store.together(lambda: self._add_run(data))

    def _add_run(self, data: dict[str, Any] | None) -> str:
        settings = ["cluster.kind=local", "restore_tests.budget=1000000", *self.overrides]
        self.config = tiny_config(self.root, *settings)
        identity = code(build(RunConfig, self.config))
        new = NewRun(
            slug="r", cluster="local", root=self.root, config_digest=self.store.put_config(data or self.config),
            total_steps=300, identity={"code": identity, "submit_dir": str(self.root)}, scheduler="local@here",
        )  # fmt: skip
        run, _ = self.store.create_run(new, now=NOW - 1000, nonce=NONCE[:6] + f"{len(self.store.runs()):02d}")
        self.name, self.nonce = run.name, self.store.attempt(run.name, 1).nonce
        RunDir(Path(run.run_dir)).make()
        stamp = self.stamp(NOW - 10)
        self.store.move_attempt(self.name, 1, AttemptState.SUBMITTED, "", **stamp)
        self.store.move_attempt(self.name, 1, AttemptState.RUNNING, "", **stamp, started_at=NOW - 900)
        for step in (100, 200, 300):
            self.store.put_checkpoint(self.checkpoint(step), epoch=self.epoch)
            Path(self.checkpoint(step).path).mkdir()
        self.store.move_attempt(self.name, 1, AttemptState.ENDED, "", **stamp, ended_at=NOW - 10)
        self.store.move_run(self.name, RunState.SUCCEEDED, "", **stamp)
        return self.name

    def stamp(self, now: float = NOW) -> dict[str, Any]:
        return {"epoch": self.epoch, "now": now}

    @property
    def run(self) -> Run:
        return self.store.run(self.name)

    @property
    def folder(self) -> RunDir:
        return RunDir(self.root / self.name)

    def checkpoint(self, step: int) -> Checkpoint:
        name = f"step-{step:08d}.001-{self.nonce}"
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

    def end(
        self, test: RestoreTest, verdict: str = "", reason: str = "why", state: RunState | None = None, **evidence: Any
    ) -> None:
        """Let the test's run end as a job lets it, with this verdict."""
        if verdict:
            told = {"place": str(self.folder.checkpoints), **evidence}
            notice = Notice(
                run=test.test, attempt=1, source="rank-00000/1", seq=9, kind=EventKind.RESTORE_TESTED, generation=1,
                time=NOW, data={"verdict": verdict, "reason": reason, "evidence": told},
            )  # fmt: skip
            self.store.put_notice(notice, epoch=self.epoch)
        state = state or (RunState.SUCCEEDED if verdict else RunState.FAILED)
        self.store.move_run(test.test, state, "how it ended", **self.stamp())


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
    assert config["train"] == desk.config["train"]
    assert read_pins(LocalStorage(desk.folder.checkpoints))[order["checkpoint"]].note == "restore test r-1-test-1"
    assert desk.passes() == [], "one at a time"


@pytest.mark.parametrize(("gib", "minutes"), [(0, "30"), (2, "31"), (2000, "1030")])
def test_a_large_checkpoint_has_more_time(tmp_path: Path, gib: int, minutes: str) -> None:
    desk = Desk(tmp_path, "cluster.time=2-00:00:00")
    row = replace(desk.checkpoint(200), bytes=gib << 30)
    test = begin_test(desk.store, DirectFiles(), desk.run, RestoreTestRequest(checkpoint=row, forced=True), NOW)
    config = desk.store.config(desk.store.run(test.test).config_digest)
    assert config["cluster"]["time"] == minutes
    hang = config["detection"]["hang"]
    assert hang["slow"] == hang["most"] == max(3600.0, 60.0 * int(minutes))
    desk.store.close()


def test_its_run_counts_to_the_step_to_which_the_test_trains(desk: Desk) -> None:
    desk.passes()
    test = desk.store.run(desk.under_way().test)
    order = build(Order, test.identity["restore_test"])
    assert isinstance(order, Order)
    assert (order.step, order.steps) == (300, 3)
    assert [order.last_step(steps) for steps in (300, 302, 1000)] == [301, 302, 303]
    assert test.total_steps == order.last_step(desk.config["train"]["steps"])


@pytest.mark.parametrize("evidence", [{"exact": True, "compared": 3}, {"exact": True, "compared": 0}, {"compared": 3}])
def test_a_test_is_told_of_an_earlier_one_whose_steps_were_equal(desk: Desk, evidence: dict[str, Any]) -> None:
    desk.passes()
    first = desk.under_way()
    desk.end(first, "RESTORED", **evidence)
    desk.passes()
    run, older = desk.store.run("r-1"), RestoreTestRequest(checkpoint=desk.checkpoint(200))
    made = [create_test(desk.store, run, replace(older, layout=layout, forced=True), NOW) for layout in ("same", "1")]
    told = [desk.store.run(test.test).identity["restore_test"]["agreed"] for test in made]
    assert told == [first.test if evidence.get("exact") and evidence["compared"] else "", ""]


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


@pytest.mark.parametrize(("seen", "rto"), [(NOW, 20.0), (NOW + 60.0, 15.0), (None, 15.0)])
def test_a_controller_that_looks_late_makes_no_restart_faster(desk: Desk, seen: float | None, rto: float) -> None:
    desk.passes()
    test = desk.under_way()
    if seen is not None:
        desk.store.note_attempt(test.test, 1, epoch=desk.epoch, started_at=seen)
    generation = Generation(run=test.test, attempt=1, number=1, started_at=NOW + 5.0)
    desk.store.put_generation(generation, epoch=desk.epoch)
    desk.end(test, "RESTORED", first_step_at=NOW + 30.0, verify_seconds=10.0)
    desk.passes()
    (ended,) = desk.store.restore_tests("r-1")
    assert ended.evidence["rto_seconds"] == rto


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


def test_what_is_not_comparable_changes_no_trust_and_begins_no_older_one(desk: Desk) -> None:
    desk.passes()
    desk.end(desk.under_way(), "NOT_COMPARABLE", "the program builds a different model")
    (ended,) = desk.passes()
    assert "NOT_COMPARABLE" in ended
    assert [desk.trust(step) for step in (300, 200, 100)] == [Trust.COMMITTED] * 3
    assert desk.store.notices("r-1") == []
    assert read_verdicts(LocalStorage(desk.folder.checkpoints)) == []
    assert desk.passes() == [], "the run is over: it is not tested again and again"


@pytest.mark.parametrize("verdicts", [("NOT_COMPARABLE", "SUSPECT"), ("SUSPECT", "NOT_COMPARABLE")])
def test_a_bad_checkpoint_decides_over_ranks_that_could_not_judge(desk: Desk, verdicts: tuple[str, str]) -> None:
    desk.passes()
    test = desk.under_way()
    for rank, verdict in enumerate(verdicts):
        notice = Notice(
            run=test.test, attempt=1, source=f"restore-test-{rank:05d}", seq=1, kind=EventKind.RESTORE_TESTED,
            generation=1, time=NOW, data={"verdict": verdict, "reason": f"rank {rank}", "evidence": {}},
        )  # fmt: skip
        desk.store.put_notice(notice, epoch=desk.epoch)
    desk.end(test)
    desk.passes()
    (ended, *_) = desk.store.restore_tests("r-1")
    assert ended.verdict == "SUSPECT"


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
    pin(storage, name, "restore test showed it is good", NOW)
    desk.passes()
    desk.end(desk.under_way(), "RESTORED")
    desk.passes()
    assert read_pins(storage)[name].note == "restore test showed it is good"


def test_a_test_keeps_a_checkpoint_that_something_else_has_pinned_too(desk: Desk) -> None:
    storage, name = LocalStorage(desk.folder.checkpoints), desk.checkpoint(300).name
    pin(storage, name, "being read", NOW, holder="reader")
    desk.passes()
    remove_pin(storage, name, "reader")
    assert read_pins(storage)[name].note == "restore test r-1-test-1"
    desk.end(desk.under_way(), "RESTORED")
    desk.passes()
    assert read_pins(storage) == {}


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


def test_a_layout_that_the_run_cannot_have_begins_nothing_and_takes_nobodys_place(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "restore_tests.every=off", "train.batch_size=16")
    settings = {**desk.config["restore_tests"], "every": "1d", "layouts": ["3"]}
    first = desk.add_run({**desk.config, "restore_tests": settings})
    assert desk.passes() == []
    (due,) = desk.tests.due(NOW)
    assert "train.batch_size=16: must be a multiple of the 3 data-parallel ranks" in due.refused
    desk.overrides = ()
    desk.add_run()
    assert desk.passes() == [
        f"{desk.name}-test-1: restore test of step 300 of {desk.name} on same: the run has succeeded"
    ]
    assert desk.store.restore_tests(first) == []
    desk.store.close()


def test_a_config_of_another_version_costs_only_its_own_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(tmp_path)
    data = {**desk.config, "restore_tests": {**desk.config["restore_tests"], "every": "5 minutes"}}
    odd = desk.add_run(data)
    begun = desk.passes()
    assert [line.partition(":")[0] for line in begun] == ["r-1-test-1"]
    assert f"{odd}: cannot determine when its next restore test is due" in caplog.text
    desk.store.close()


@pytest.mark.parametrize(("started", "hours", "late"), [(False, 0.9, False), (False, 1.1, True), (True, 1.6, True)])
def test_a_test_that_takes_too_long_is_given_up(desk: Desk, started: bool, hours: float, late: bool) -> None:
    desk.passes()
    test = desk.under_way()
    if started:
        desk.store.move_attempt(test.test, 1, AttemptState.SUBMITTED, "", **desk.stamp())
        desk.store.move_attempt(test.test, 1, AttemptState.RUNNING, "", **desk.stamp(), started_at=NOW)
    assert bool(desk.passes(NOW + 3600 * hours)) is late
    (row,) = desk.store.restore_tests("r-1")
    assert row.verdict == ("NOT_FINISHED" if late else "")
    assert [ask.verb for ask in desk.store.user_requests() if ask.run == test.test] == (["cancel"] if late else [])


def test_a_pass_of_one_rank_counts_only_when_all_ranks_are_done(desk: Desk) -> None:
    desk.passes()
    test = desk.under_way()
    desk.end(test, "RESTORED", state=RunState.FAILED)
    desk.passes()
    (row,) = desk.store.restore_tests("r-1")
    assert (row.verdict, row.reason) == ("NOT_FINISHED", "how it ended")
    assert desk.trust(300) is Trust.COMMITTED


@pytest.mark.parametrize("ours", [True, False])
def test_a_pass_takes_back_every_doubt(desk: Desk, ours: bool) -> None:
    desk.passes()
    if ours:
        desk.end(desk.under_way(), "SUSPECT")
        desk.passes()
        desk.end(desk.under_way(), "RESTORED")
        desk.passes()
        begin_test(
            desk.store, DirectFiles(), desk.run, RestoreTestRequest(checkpoint=desk.checkpoint(300), forced=True), NOW
        )
    else:
        why = "the same failure came twice after loading it"
        desk.store.trust(desk.name, desk.checkpoint(300).name, Trust.SUSPECT, why, **desk.stamp())
    desk.end(desk.under_way(), "RESTORED")
    desk.passes()
    assert desk.trust(300) is Trust.RESTORED


def test_the_verdict_is_written_by_the_controller_of_the_tested_run(desk: Desk) -> None:
    desk.passes()
    test = desk.under_way()
    desk.end(test, "CORRUPT")
    desk.tests.owns = lambda run: run.name == test.test
    assert desk.passes() == []
    desk.tests.owns = lambda run: run.name == desk.name
    assert "CORRUPT" in desk.passes()[0]
    assert desk.trust(300) is Trust.CORRUPT


def test_a_pin_whose_folder_was_away_is_taken_when_it_is_back(desk: Desk) -> None:
    desk.passes()
    away = desk.folder.path.rename(desk.root / "away")
    desk.end(desk.under_way(), "RESTORED")
    desk.passes()
    away.rename(desk.folder.path)
    assert read_pins(LocalStorage(desk.folder.checkpoints))
    desk.passes(NOW + 60)
    assert not read_pins(LocalStorage(desk.folder.checkpoints))


def test_code_that_was_changed_since_is_told_to_the_test(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "mine.py").write_text("from mine_too import Base\nclass Mine(Base): pass")
    desk = Desk(tmp_path, f"workload.path=[{code}]", "workload.target=mine:Mine")
    desk.passes()
    differs = desk.store.run(desk.under_way().test).identity["restore_test"]["differs"]
    assert differs == []
    desk.end(desk.under_way())
    desk.passes()
    (code / "mine.py").write_text("class Mine: other = 1")
    asked = RestoreTestRequest(checkpoint=desk.checkpoint(200), forced=True)
    test = begin_test(desk.store, DirectFiles(), desk.run, asked, NOW)
    assert desk.store.run(test.test).identity["restore_test"]["differs"] == ["code.user"]
    desk.store.close()


@pytest.mark.parametrize("recorded", [True, False])
def test_packages_that_attempts_recorded_are_compared_by_the_job(tmp_path: Path, recorded: bool) -> None:
    desk = Desk(tmp_path)
    identity = desk.store.run(desk.name).identity
    env = {"packages": {"torch": "1.0"}, "torch": "1.0"}
    job = {"python": sys.executable, "package_root": "", "variables": {}}
    desk.store.note_run(desk.name, epoch=desk.epoch, now=NOW - 5, identity={**identity, "env": env, "job": job})
    packages = {"torch": "1.0"} if recorded else None
    folders = find_site_folders(sys.path)
    desk.folder.attempt(1).make()
    CodeRecord(packages=packages, site_folders=folders).write(desk.folder.attempt(1).code)
    desk.passes()
    differs = desk.store.run(desk.under_way().test).identity["restore_test"]["differs"]
    assert differs == ([] if recorded else ["env.torch", "env.packages"])
    desk.store.close()


def test_of_two_runs_one_is_tested_at_a_time(desk: Desk) -> None:
    forced = RestoreTestRequest(checkpoint=desk.checkpoint(100), forced=True)
    begin_test(desk.store, DirectFiles(), desk.run, forced, NOW)
    assert desk.passes() == []
    desk.end(desk.under_way(), "RESTORED")
    assert len(desk.passes()) == 2


def test_the_record_of_a_test_keeps_its_row(desk: Desk) -> None:
    desk.passes()
    desk.end(desk.under_way(), "RESTORED")
    desk.passes()
    record = load_record(desk.store, "r-1-test-1")
    assert record.restore_test is not None
    assert record.restore_test.verdict == "RESTORED"
    assert json.loads(record.encode())["restore_test"]["checkpoint"] == desk.checkpoint(300).name
    assert load_record(desk.store, "r-1").checkpoints[0].manifest == "f" * 32
    assert replace(load_record(desk.store, "r-1")).restore_test is None


def test_a_controller_that_was_paused_begins_nothing_again(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    stale = desk.tests.due(NOW)
    desk.passes()
    desk.tests.due = lambda now, *, force=False: stale  # type: ignore[method-assign]
    assert desk.passes() == []
    assert "a restore test of r-1 is under way" in caplog.text
