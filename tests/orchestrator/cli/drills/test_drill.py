"""`orch drill`: requests to a live run, refusals, and the printed score."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointing.storage.backends import open_storage
from checkpointing.storage.durable import dump_line, read_json
from checkpointing.tiers.catalog import Catalog
from checkpointing.verification.verify import verify
from orchestrator.cli.drills import demo
from orchestrator.cli.drills.drill import damage_newest
from orchestrator.cli.runs import events
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import Precondition
from orchestrator.states import RunState
from tests.checkpointing.made_checkpoint import make
from tests.orchestrator.cli.conftest import Seeds, Type
from tests.orchestrator.cli.live_jobs.test_live_attempt import Agent, begun
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.requests import Request, RequestKind, pending
from trainer.protocol.run_dir import RunDir


class Job(Agent):
    def __init__(self, folder: RunDir, *, blames: int = 1) -> None:
        super().__init__(folder)
        self._blames = blames

    def reply(self, log: EventLog, request: Request) -> None:
        rank = int(request.value or 0)
        log.write(EventKind.DRILL, kind=request.detail, rank=rank, step=120)
        log.write(EventKind.REQUEST_ANSWERED, name=request.name, answer=f"{request.detail} strikes rank {rank}")
        if request.detail in ("kill-agent", "kill-node"):
            log.write(EventKind.AGENT_LOST, node=rank, name=f"n{rank + 1}", reason="the connection ended")
            failure = {"kind": "agent_lost", "reason": "lost", "rank": None, "node": f"n{self._blames + 1}"}
        else:
            log.write(EventKind.RANK_EXITED, rank=rank, node="n1", exit_code=None, signal=9, reason="killed by SIGKILL")
            failure = {"kind": "rank_killed", "reason": "killed", "rank": self._blames, "node": "n1"}
        log.write(EventKind.GENERATION_ENDED, reason="killed", step=120, failure=failure)
        log.generation += 1
        log.write(EventKind.GENERATION_FIRST_STEP, step=111, seconds=0.5)


def test_a_live_run_is_hit_and_scored(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    with Job(begun(seeds, run)) as job:
        said = orch("drill", run, "kill-rank", "--rank", 1)
    (request,) = job.asked
    assert (request.kind, request.value, request.detail) == (RequestKind.DRILL, 1, "kill-rank")
    assert said.code == 0
    assert "kill-rank in tiny-1: noticed, rightly named, and training again" in said.out
    assert "10 steps trained again" in said.out


def test_a_node_is_named_by_its_place(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    with Job(begun(seeds, run)) as job:
        data = orch("drill", run, "kill-agent", "--yes", "--json").data
    assert job.asked[0].value == 1, "the last node, which is not the coordinator's"
    assert (data["passed"], data["node"], data["named"], data["rank"]) == (True, "n2", "node n2", None)


@pytest.mark.parametrize(("at", "spares", "why"), [
    ((), 0, "it has no spare node"), (("--rank", 0), 1, "the coordinator is on its first node"), ((), 1, ""),
])  # fmt: skip
def test_drill_without_spare_needs_confirmation(
    orch: Type, seeds: Seeds, at: tuple[object, ...], spares: int, why: str
) -> None:
    run = seeds.run()
    with Job(begun(seeds, run, nodes=("n1", "n2", "n3")[: 2 + spares])) as job:
        said = orch("drill", run, "kill-node", *at)
    if not why:
        assert (said.code, len(job.asked)) == (0, 1)
        return
    assert (said.code, job.asked) == (4, [])
    assert f"kill-node costs tiny-1 more than a restart: {why}, so a new job has to be submitted" in said.err
    assert "orch drill tiny-1 kill-node --yes" in said.err


class Starting(Job):
    def __init__(self, folder: RunDir) -> None:
        super().__init__(folder)
        self.trains = threading.Event()

    def reply(self, log: EventLog, request: Request) -> None:
        self.trains.wait(30)
        super().reply(log, request)


def test_a_drill_during_start_up_waits_with_a_note(orch: Type, seeds: Seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    run = seeds.run()
    with Starting(begun(seeds, run)) as job:

        def note(screen: Screen, text: str) -> None:
            notes.extend([text] if "kill-rank" in text else [])
            if "are not training yet" in text:
                job.trains.set()

        notes: list[str] = []
        monkeypatch.setattr(Screen, "note", note)
        said = orch("drill", run, "kill-rank", "--rank", 1)
    assert said.code == 0
    assert notes[0] == "tiny-1: its ranks are not training yet; kill-rank strikes when they are"
    assert "tiny-1: kill-rank strikes rank 1" in notes[1:]


class Ending(Job):
    def __init__(self, folder: RunDir, seeds: Seeds) -> None:
        super().__init__(folder)
        self._seeds = seeds

    def reply(self, log: EventLog, request: Request) -> None:
        store, epoch = self._seeds.store, self._seeds.epoch
        store.move_run(self.folder.name, RunState.HELD, "the disk is full", epoch=epoch, now=time.time())


def test_a_job_that_ends_before_it_trains_ends_the_drill(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    with Ending(begun(seeds, run), seeds):
        said = orch("drill", run, "kill-rank")
    assert said.code == 4
    assert "attempt 1 of tiny-1 ended before kill-rank struck" in said.err
    assert "the disk is full" in said.err


def test_a_timeout_reports_that_the_drill_is_still_pending(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    begun(seeds, run)
    said = orch("drill", run, "kill-rank", "--timeout", 1)
    assert said.code == 124
    assert "kill-rank has not struck tiny-1 within 1 s: its ranks are not training yet" in said.err
    assert "it strikes when they are; see:  orch status tiny-1 -w" in said.err


def test_spare_nodes_are_never_hit(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    with Job(begun(seeds, run, nodes=("n1", "n2", "n3"))) as job:
        data = orch("drill", run, "kill-agent", "--json").data
    assert job.asked[0].value == 1
    assert (data["passed"], data["node"]) == (True, "n2")


@pytest.mark.parametrize("kind", ["kill-agent", "kill-node", "corrupt-checkpoint", "kill-rank"])
def test_a_refusal_by_the_job_ends_the_drill(orch: Type, seeds: Seeds, kind: str) -> None:
    run = seeds.run()
    folder = begun(seeds, run)
    for step in (10, 20):
        make(open_storage(folder.checkpoints), step)
    with Agent(folder, "refused: there is no node 1, only 0 to 0"):
        said = orch("drill", run, kind, "--yes", "--timeout", 20)
    assert said.code == 4
    assert "refused: there is no node 1, only 0 to 0" in said.err


def test_no_checkpoint_is_damaged_if_a_spare_would_hide_it(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    folder = begun(seeds, run, nodes=("n1", "n2", "n3"))
    for words in ((run, "corrupt-checkpoint", "--yes"), ("--demo", "corrupt-checkpoint", "cluster.spare_nodes=1")):
        said = orch("drill", *words)
        assert said.code == 4
        assert "cluster.spare_nodes=1" in said.err
    assert pending(folder.requests, 1, set()) == []


def test_the_wrong_name_ends_with_8(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    with Job(begun(seeds, run), blames=3):
        said = orch("drill", run, "kill-rank", "--rank", 1)
        as_json = orch("drill", run, "kill-rank", "--rank", 1, "--json")
    assert (said.code, as_json.code) == (8, 8)
    assert "rank 3, which is wrong" in said.out
    assert as_json.data["verdict"] == "rank 3 was blamed"


def test_events_before_the_drill_are_ignored(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    folder = begun(seeds, run)
    log = EventLog(folder.attempt(1).event_file("rank-00000"), "rank-00000", 1, clock=lambda: time.time() - 5)
    log.write(EventKind.DRILL, kind="kill-rank", rank=3, step=5)
    log.close()
    with Job(folder):
        said = orch("drill", run, "kill-rank", "--rank", 1)
    assert "struck     rank 1 at step 120" in said.out
    assert "rank 3" not in said.err


def test_a_fault_that_costs_more_than_a_restart_needs_yes(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    folder = begun(seeds, run)
    said = orch("drill", run, "desync")
    assert said.code == 4
    assert "the run will be held" in said.err
    assert "orch drill tiny-1 desync --yes" in said.err
    assert pending(folder.requests, 1, set()) == []


@pytest.mark.parametrize("yes", [(), ("--yes",)])
def test_a_real_disk_is_never_filled(orch: Type, seeds: Seeds, yes: tuple[str, ...]) -> None:
    run = seeds.run()
    begun(seeds, run)
    said = orch("drill", run, "full-disk", *yes)
    assert said.code == 4
    assert "orch drill --demo full-disk" in said.err
    assert "--yes" not in said.err, "the hint does not lead to another refusal"


@pytest.mark.parametrize(("fields", "kind", "why"), [
    ({"command": ["python", "train.py"]}, "stop-rank", "its ranks would wait until the time limit"),
    ({"command": ["python", "train.py"]}, "nan", "its ranks run a command of their own"),
    ({"detection": {"hang": {"on": False}}}, "hang-in-collective", "detection.hang.on=false"),
])  # fmt: skip
def test_an_undetectable_fault_is_refused(
    orch: Type, seeds: Seeds, fields: dict[str, Any], kind: str, why: str
) -> None:
    run = seeds.run()
    folder = begun(seeds, run)
    folder.config.write_text(dump_line({**read_json(folder.config), **fields}))
    said = orch("drill", run, kind)
    assert said.code == 4
    assert why in said.err
    assert f"orch drill --demo {kind}" in said.err
    assert "--yes" not in said.err
    assert pending(folder.requests, 1, set()) == []


def test_a_demo_with_an_undetectable_fault_is_not_started(orch: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "launch", lambda *_args, **_named: pytest.fail("it was started"))
    said = orch("drill", "--demo", "stop-rank", "detection.hang.on=false")
    assert said.code == 4
    assert "stop-rank has no effect in this demo: hang detection is off" in said.err


@pytest.mark.parametrize("form", ["people", "json"])
def test_the_score_of_a_demo_that_does_not_end_is_shown(
    orch: Type, seeds: Seeds, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    run = seeds.run()
    log = EventLog(begun(seeds, run).attempt(1).event_file("coordinator"), "coordinator", 1)
    log.write(EventKind.DRILL, kind="kill-rank", rank=1, step=25)
    log.write(EventKind.RANK_EXITED, rank=1, node="n1", exit_code=None, signal=9, reason="killed by SIGKILL")
    failure = {"kind": "rank_killed", "reason": "killed", "rank": 1, "node": "n1"}
    log.write(EventKind.GENERATION_ENDED, reason="killed", step=25, failure=failure)
    log.generation = 1
    log.write(EventKind.GENERATION_FIRST_STEP, step=21, seconds=0.5)
    log.close()
    made = {"run": run, "job_id": "41", "run_dir": str(seeds.root / run)}
    monkeypatch.setattr(demo, "launch", lambda *_args, **_named: made)
    now = [0.0]
    clock = SimpleNamespace(time=time.time, monotonic=lambda: now[0], sleep=lambda s: now.append(now.pop() + s))
    monkeypatch.setattr(events, "time", clock)
    said = orch("drill", "--demo", "kill-rank", "--timeout", 30, *(["--json"] if form == "json" else []))
    assert said.code == 0
    assert now[0] >= 30
    if form == "json":
        assert said.data["passed"]
        (warning,) = said.answer["warnings"]
        assert warning["message"] == "tiny-1 is still RUNNING after 30 s; end it:  orch cancel tiny-1"
    else:
        assert "kill-rank in tiny-1: noticed, rightly named, and training again" in said.out
        assert "end it:  orch cancel tiny-1" in said.err


def test_a_drill_needs_a_live_run_and_a_known_kind(orch: Type, seeds: Seeds) -> None:
    begun(seeds, seeds.run())
    for words in (("tiny-1", "burn"), ("--demo", "burn"), ("tiny-1",), ("tiny-1", "nan", "more")):
        assert orch("drill", *words).code == 2, words
    held = seeds.run(state=RunState.HELD, reason="the disk is full")
    assert orch("drill", held, "kill-rank").code == 4


def test_the_newest_checkpoint_is_damaged_and_no_other(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "tiny-1")
    folder.make()
    storage = open_storage(folder.checkpoints)
    older, newest = (make(storage, step) for step in (10, 20))
    step, path = damage_newest(folder)
    assert step == 20
    assert newest in str(path)
    assert verify(folder.checkpoints / older, 2).ok
    assert not verify(folder.checkpoints / newest, 2).ok
    assert Catalog(folder.checkpoints).committed_entries()[0].step == 20, (
        "it is still there, and only its bytes are wrong"
    )


@pytest.mark.parametrize("steps", [(), (10,)])
def test_the_last_checkpoint_is_never_damaged(tmp_path: Path, steps: tuple[int, ...]) -> None:
    folder = RunDir(tmp_path / "tiny-1")
    folder.make()
    names = [make(open_storage(folder.checkpoints), step) for step in steps]
    with pytest.raises(Precondition, match=f"has {len(steps)} committed checkpoints"):
        damage_newest(folder)
    assert all(verify(folder.checkpoints / name, 2).ok for name in names)
