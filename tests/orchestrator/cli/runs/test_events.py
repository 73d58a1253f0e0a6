"""`orch events`: one timeline of the events of jobs, decisions of the controller and requests of users."""

import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.runs import events as events_verb
from orchestrator.cli.runs.events import progress_line
from orchestrator.cli.runs.timeline import (
    EventDescriber,
    Repetition,
    Timeline,
    TimelineEntry,
    describe_event,
    in_recorded_order,
    parse_since,
)
from orchestrator.errors import ConfigError
from orchestrator.registry.records import REPLACED_VARIABLES
from orchestrator.run_view import find_run
from orchestrator.states import AttemptState, RunState
from tests.orchestrator.cli.conftest import Patch, Seeds, Type
from tests.orchestrator.cli.forked_orch import on_a_terminal
from trainer.protocol.events import Event, EventKind, EventLog
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.run_dir import RunDir

WHY = "rank 1 on n1 was killed by SIGKILL"


def written(seeds: Seeds, run: str, attempt: int, source: str = "coordinator") -> EventLog:
    place = RunDir(seeds.root / run).attempt(attempt)
    if not place.path.exists():
        place.make()
    return EventLog(place.event_file(source), source, attempt)


def ended(seeds: Seeds, run: str, number: int = 1) -> None:
    now, epoch = time.time(), seeds.epoch
    failure = Failure(kind=FailureKind.RANK_KILLED, reason=WHY)
    decision = {"action": "RETRY", "reason": f"rank killed once (try 1 of 5); the last one: {WHY}"}
    seeds.store.move_attempt(
        run, number, AttemptState.ENDED, WHY, epoch=epoch, now=now, ended_at=now, failure=failure.to_json(),
        decision=decision,
    )  # fmt: skip
    seeds.store.move_run(run, RunState.RECOVERING, decision["reason"], epoch=epoch, now=now)


@pytest.fixture
def failed(seeds: Seeds) -> str:
    run = seeds.run()
    log = written(seeds, run, 1)
    log.write(EventKind.ATTEMPT_STARTED, job_id="41", nodes=["n1", "n2"], world=4)
    log.write(EventKind.AGENT_JOINED, node=1, name="n2")
    log.generation = 1
    log.write(EventKind.DECISION, action="end", reason=WHY)
    log.write(EventKind.GENERATION_ENDED, reason=WHY, step=60, failure=None)
    ended(seeds, run)
    seeds.store.add_attempt(run, nonce="4567cdef", excluded=(), epoch=seeds.epoch, now=time.time())
    written(seeds, run, 2).write(EventKind.ATTEMPT_STARTED, job_id="42", nodes=["n1", "n2"], world=4)
    return run


def test_one_timeline_of_all_attempts(orch: Type, failed: str) -> None:
    said = orch("events", failed)
    assert said.code == 0
    title, *rows = [line.split("\t") for line in said.out.splitlines()]
    assert title == ["TIME", "ATT.GEN", "SOURCE", "KIND", "WHAT"]
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert [(row[1], row[2], row[4]) for row in rows[-7:]] == [
        ("1.1", "coordinator", f"decision: end ({WHY})"),
        ("1.1", "coordinator", f"ended at step 60: {WHY}"),
        ("1", "controller", f"the attempt RUNNING -> ENDED: rank_killed: {WHY}"),
        ("1", "controller", f"decision: RETRY (rank killed once (try 1 of 5); the last one: {WHY})"),
        ("", "controller", "the run RUNNING -> RECOVERING"),
        ("2", "controller", "the attempt is INTENT: next attempt"),
        ("2", "coordinator", "started, job 42 on n1,n2, 4 ranks"),
    ]
    assert not any("agent.joined" in row for row in rows)
    assert "agent.joined node=1 name=n2" in orch("events", failed, "--all").out


def test_events_json(orch: Type, failed: str) -> None:
    rows = orch("events", failed, "--json").data
    keys = ["time", "attempt", "generation", "source", "kind", "text", "data"]
    assert {tuple(row) for row in rows} == {tuple(keys)}
    (joined,) = [row for row in rows if row["kind"] == "agent.joined"]
    assert (joined["attempt"], joined["text"], joined["data"]) == (1, None, {"node": 1, "name": "n2"})
    (decided,) = [row for row in rows if row["kind"] == "decision" and row["source"] == "controller"]
    assert decided["data"]["action"] == "RETRY"
    moves = [row["data"]["after"] for row in rows if row["kind"] == "transition" and row["data"]["kind"] == "run"]
    assert moves == ["CREATED", "RUNNING", "RECOVERING"]


def test_requests_and_answers(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    ask = seeds.store.add_user_request(run, "cancel", {}, now=time.time())
    assert "requested: orch cancel" in orch("events", run).out
    seeds.store.answer(ask, f"{run} is CANCELLED", epoch=seeds.epoch, now=time.time())
    assert f"answered: {run} is CANCELLED" in orch("events", run).out


def test_replaced_variables(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    seeds.store.add_user_request(run, "resume", {REPLACED_VARIABLES: ["A", "B"]}, now=time.time())
    assert "requested: orch resume, with other values of A, B\n" in orch("events", run).out


def test_repeated_reason_on_terminal(seeds: Seeds, failed: str) -> None:
    shown = on_a_terminal(seeds.store, "events", failed)
    assert shown.count(WHY) == 1
    lines = [" ".join(line.split()[2:]) for line in shown.splitlines()]
    assert "1.1 ended at step 60" in lines
    assert "1 the attempt RUNNING -> ENDED: rank_killed" in lines
    assert "1 decision: RETRY (rank killed once (try 1 of 5))" in lines


def test_reason_of_another_attempt() -> None:
    def moment(attempt: int) -> TimelineEntry:
        data = {"reason": WHY}
        return TimelineEntry(
            time=1.0, source="x", kind="decision", text=f"end ({WHY})", key=(), attempt=attempt, data=data
        )

    repetition = Repetition()
    assert [repetition.without(moment(number)) for number in (1, 1, 2)] == [f"end ({WHY})", "end", f"end ({WHY})"]


def test_since(orch: Type, failed: str) -> None:
    assert len(orch("events", failed, "--since", "1h", "--json").data) == len(orch("events", failed, "--json").data)
    assert orch("events", failed, "--since", "2999-01-01", "--json").data == []
    nothing = orch("events", failed, "--since", "2999-01-01")
    assert (nothing.out, nothing.code) == ("", 0)
    assert f"{failed}: nothing has happened since 2999-01-01" in nothing.err


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172800), (" 5s ", 5)])
def test_since_span(text: str, seconds: float) -> None:
    assert parse_since(text, 1e6) == 1e6 - seconds


def test_since_time_zone(orch: Type, seeds: Seeds) -> None:
    assert parse_since("1970-01-01T00:01:00+00:00", 0.0) == 60.0
    assert parse_since("2026-01-31T12:00", 0.0) == time.mktime((2026, 1, 31, 12, 0, 0, 0, 0, -1))
    for text in ("yesterday", "10", "", "m"):
        with pytest.raises(ConfigError, match="not a time"):
            parse_since(text, 0.0)
    refused = orch("events", seeds.run(), "--since", "soon")
    assert refused.code == 2
    assert "--since 10m" in refused.err


@pytest.mark.parametrize(
    ("state", "code"), [(RunState.SUCCEEDED, 0), (RunState.HELD, 8), (RunState.FAILED, 8), (RunState.CANCELLED, 10)]
)
def test_follow_until_end(orch: Type, seeds: Seeds, monkeypatch: Patch, state: RunState, code: int) -> None:
    run = seeds.run()
    log = written(seeds, run, 1)
    steps = iter([
        lambda: log.write(EventKind.CHECKPOINT_RESTORED, step=20, tier=""),
        lambda: ended(seeds, run),
        lambda: seeds.store.move_run(run, state, "that is why", epoch=seeds.epoch, now=time.time()),
    ])  # fmt: skip
    monkeypatch.setattr(events_verb.time, "sleep", lambda _: next(steps, lambda: None)())
    said = orch("events", run, "-f")
    assert said.code == code, said.err
    told = [line.split("\t")[4] for line in said.out.splitlines()]
    assert told[-5:] == [
        "resumed from step 20",
        f"the attempt RUNNING -> ENDED: rank_killed: {WHY}",
        f"decision: RETRY (rank killed once (try 1 of 5); the last one: {WHY})",
        "the run RUNNING -> RECOVERING",
        f"the run RECOVERING -> {state}: that is why",
    ]
    assert len(set(said.out.splitlines())) == len(said.out.splitlines())
    assert f"{run} is {state}: that is why" in said.err


def test_follow_excludes_json(orch: Type, seeds: Seeds) -> None:
    refused = orch("events", seeds.run(), "-f", "--json")
    assert refused.code == 2
    assert refused.answer["error"]["hint"] == "omit one of them"


def test_order_within_one_pass(tmp_path: Path) -> None:
    def at(moment: float) -> TimelineEntry:
        return TimelineEntry(time=moment, source="controller", kind="transition", text="x", key=())

    found = in_recorded_order([at(100.0), at(100.5), at(100.2), at(200.0), at(50.0)])
    assert [moment.time for moment in found] == [100.0, 100.5, 100.5, 200.0, 50.0]  # the clock was set back


def test_moments_are_read_once(seeds: Seeds) -> None:
    run = seeds.run()
    log = written(seeds, run, 1)
    reader = Timeline(run, seeds.root / run)
    assert reader.poll()
    assert reader.poll() == []
    log.write(EventKind.STOP_REQUESTED, reason="enough")
    (moment,) = reader.poll()
    assert (moment.place, moment.text) == ("1", "asked to stop: enough")


@pytest.mark.parametrize("verb", ["events", "status"])
def test_moved_folder(orch: Type, seeds: Seeds, verb: str) -> None:
    run = seeds.run()
    assert "is not there" not in orch(verb, run).err
    Path(seeds.store.run(run).run_dir).rename(seeds.root / "elsewhere")
    said = orch(verb, run)
    assert said.code == 0
    assert f"warning: the folder of {run} is missing" in said.err
    assert [one["code"] for one in orch(verb, run, "--json").answer["warnings"]] == ["folder_missing"]


def test_progress_line(seeds: Seeds) -> None:
    run = seeds.run("script")
    assert progress_line(find_run(run), None) == "script-1  RUNNING  step 120/200  loss 2.5000"
    seeds.store.note_run(run, epoch=seeds.epoch, now=time.time(), step=0)
    assert progress_line(find_run(run), None) == "script-1  RUNNING"
    latest = {"attempt": 1, "generation": 2, "step": 150, "loss": "nan", "tokens_per_s": 81000.4}
    said = "script-1  RUNNING  step 150/200 75%  loss nan  81000 tokens/s  attempt 1 generation 2"
    assert progress_line(find_run(run), latest) == said


SAID: list[tuple[EventKind, dict[str, Any], str]] = [
    (EventKind.CHECKPOINT_COMMITTED, {"step": 20, "name": "a", "bytes": 1 << 20, "seconds": 0.52},
     "saved step 20 (1.0 MiB, 0.5 s)"),
    (EventKind.CHECKPOINT_COMMITTED, {"step": 20, "name": "a", "bytes": 1 << 20, "seconds": 0.52, "stall": 0.0123},
     "saved step 20 (1.0 MiB, 0.5 s, training waited 12 ms)"),
    (EventKind.CHECKPOINT_RESTORED, {"step": 20, "name": "a", "seconds": 0.1, "tier": "memory"},
     "resumed from memory, step 20"),
    (EventKind.CHECKPOINT_RESTORED, {"step": 20, "name": "a", "seconds": 0.1, "tier": "/runs/r-1/checkpoints"},
     "resumed from step 20"),
    (EventKind.CHECKPOINT_RESTORED, {"step": 20, "name": "a", "seconds": 0.1}, "resumed from step 20"),
    (EventKind.CHECKPOINT_REFUSED, {"step": 20, "name": "a", "reason": "torn", "tier": "memory"},
     "checkpoint 20 in memory is not used: torn"),
    (EventKind.CHECKPOINT_REFUSED, {"step": 20, "name": "a", "reason": "torn"}, "checkpoint 20 is not used: torn"),
    (EventKind.CHECKPOINT_INCOMPLETE, {"step": 20, "reason": "workload.k is not saved"},
     "checkpoint 20 does not hold everything: workload.k is not saved"),
    (EventKind.CHECKPOINT_SOFTWARE, {"step": 20, "changes": {"torch": ["2.12", "2.13"], "nccl": [None, "2.27"]}},
     "checkpoint 20 was saved with different software, so numbers may differ: torch 2.12 -> 2.13, nccl None -> 2.27"),
    (EventKind.CHECKPOINT_SOFTWARE, {"step": 20, "changes": {"driver": ["1", "2"]}, "ranks": {"driver": 8}},
     "checkpoint 20 was saved with different software, so numbers may differ: driver 1 -> 2 (rank 8)"),
    (EventKind.CHECKPOINT_SKIPPED, {"step": 20, "reason": "no free copy"}, "step 20 is not saved: no free copy"),
    (EventKind.CHECKPOINT_RETRIED, {"step": 20, "reason": "disk full"}, "retrying the save of step 20: disk full"),
    (EventKind.CHECKPOINT_RETRIED,
     {"step": 20, "reason": "rank 0: disk full ([Errno 28] No space left on device: '/r/x'); rank 1: the same"},
     "retrying the save of step 20: disk full (/r)"),
    (EventKind.CHECKPOINT_FAILED, {"step": 20, "reason": "disk full"}, "saving step 20 failed: disk full"),
    (EventKind.CHECKPOINT_FAILED, {"step": 20, "reason": "it is away", "tier": "/far"},
     "copying step 20 to /far failed: it is away"),
    (EventKind.CHECKPOINT_DOUBTED, {"step": 20, "reason": "loss is nan"},
     "step 20 is saved, but looks wrong: loss is nan"),
    (EventKind.CHECKPOINT_FLUSHED, {"step": 20, "name": "a", "tier": "/far", "bytes": 1 << 20, "seconds": 2.0},
     "copied step 20 to /far (1.0 MiB, 2.0 s)"),
    (EventKind.CHECKPOINT_STUCK, {"step": 20, "reason": "9 bytes to go"},
     "the save of step 20 is stuck, but training continues: 9 bytes to go"),
    (EventKind.CHECKPOINT_SUSPECT, {"step": 20, "reason": "twice SIGSEGV"},
     "checkpoint 20 is suspect: twice SIGSEGV"),
    (EventKind.CHECKPOINT_MISSING, {"step": 20, "seconds": 2520, "reason": "no checkpoint", "looked": "looked in /out"},
     "no checkpoint (looked in /out)"),
    (EventKind.CHECKPOINT_VERIFIED, {"step": 20, "name": "a.1f", "path": "/out/a", "bytes": 7, "seconds": 0.1},
     "checkpoint 20 matches its seal"),
    (EventKind.CHECKPOINT_CADENCE, {"steps": 1200, "seconds": 600.0, "reason": "a save costs 2 s"},
     "saves every 1200 steps from now on: a save costs 2 s"),
    (EventKind.CHECKPOINT_SEEN, {"step": 20, "name": "a.1f", "path": "/out/a", "bytes": 1 << 20, "new": True},
     "the program has a checkpoint of step 20 (1.0 MiB)"),
    (EventKind.CHECKPOINT_SEEN, {"step": 20, "name": "a.1f", "bytes": 7, "damage": "is damaged: a.pt is empty"},
     "the program has a checkpoint of step 20 (7 B), which is damaged: a.pt is empty"),
    (EventKind.CHECKPOINT_SEEN, {"step": 0, "name": "a.1f.2.anew", "anew": "a.1f", "bytes": 7, "new": True},
     "the program has rewritten its checkpoint of step 0 (7 B)"),
    (EventKind.CHECKPOINT_SET_ASIDE, {"step": 20, "name": "a.1f", "path": "/out/.orch-set-aside.20", "reason": "torn"},
     "checkpoint 20 is now /out/.orch-set-aside.20: torn"),
]  # fmt: skip


def test_all_checkpoint_events_are_described() -> None:
    silent = {EventKind.CHECKPOINT_SAVING, EventKind.CHECKPOINT_DELETED, EventKind.CHECKPOINT_SEALED}
    kinds = {kind for kind in EventKind if kind.startswith("checkpoint.")} - silent
    assert {kind for kind, _, _ in SAID} == kinds


HELD = {"parameters": 4 << 20, "gradients": 4 << 20, "optimizer": 8 << 20}
HOLDS = "training: step 1 done after 2.5 s; rank 0 holds 4.0 MiB of parameters, 4.0 MiB of gradients, 8.0 MiB of "
NOTICED: list[tuple[EventKind, dict[str, Any], str]] = [
    (EventKind.RESTART_DIFFERS, {"step": 22, "restored": 20, "reason": "loss of step 22 is 3.5, it was 2.5"},
     "training continued differently from step 20: loss of step 22 is 3.5, it was 2.5 before the restart. "
     "Either it depends on something that is not in the checkpoint, or it is not deterministic"),
    (EventKind.VALIDATED, {"step": 50, "seconds": 3.21, "metrics": {"val_loss": 2.25, "accuracy": "nan"}},
     "validated after step 50: val_loss 2.2500  accuracy nan (3.2 s)"),
    (EventKind.GENERATION_ENDED, {"step": None, "reason": "all ranks finished", "failure": None},
     "ended: all ranks finished"),
    (EventKind.GENERATION_ENDED, {"step": 60, "reason": "all ranks finished", "failure": None},
     "ended at step 60: all ranks finished"),
    (EventKind.GENERATION_FIRST_STEP, {"step": 1, "seconds": 2.5}, "training: step 1 done after 2.5 s"),
    (EventKind.GENERATION_FIRST_STEP, {"step": 1, "seconds": 2.5, "held": {**HELD, "on_host": []}},
     f"{HOLDS}optimizer state"),
    (EventKind.GENERATION_FIRST_STEP, {"step": 1, "seconds": 2.5, "held": {**HELD, "on_host": ["optimizer"]}},
     f"{HOLDS}optimizer state (optimizer state in host memory)"),
    (EventKind.INCIDENT, {"reason": "rank 3 stopped first", "evidence": "a/b", "withdrawn": False},
     "hung: rank 3 stopped first; evidence in a/b"),
    (EventKind.INCIDENT, {"reason": "rank 3 stopped first", "evidence": "a/b", "withdrawn": True},
     "looked hung, but continued: rank 3 stopped first"),
    (EventKind.STRAGGLER, {"rank": 1, "node": "n1", "section": "forward", "ratio": 1.3, "over": False},
     "rank 1 on n1 is slow: forward takes 1.30 x its peers' time"),
    (EventKind.STRAGGLER, {"rank": 1, "node": "n1", "section": "forward", "ratio": 1.0, "over": True},
     "rank 1 on n1 is as fast as its peers again"),
    (EventKind.CODE_CHANGED, {"digest": "ab", "reason": "mine changed since attempt 1", "files": {}},
     "training now uses different code: mine changed since attempt 1"),
    (EventKind.BATCH_SKIPPED, {"step": 7, "position": 96, "reason": "loss nan"},
     "the batch of step 7 is skipped from now on: loss nan"),
    (EventKind.LOSS_LEVEL, {"step": 7, "reason": "loss 9 is high"},
     "the losses have been at a new level since step 7: loss 9 is high"),
    (EventKind.SPARE_USED, {"node": 2, "name": "n3", "instead": "n2", "reason": "gone"},
     "n3 takes the place of n2: gone"),
    (EventKind.STOP_REQUESTED, {"reason": "an agent got SIGTERM"}, "asked to stop: an agent got SIGTERM"),
    (EventKind.STOP_AGREED, {"step": 7, "reason": "preemption"}, "ranks stop together after step 7"),
    (EventKind.STOP_AGREED, {"step": 7, "reason": "time_limit"},
     "ranks stop together after step 7: the time limit is near"),
    (EventKind.STOP_AGREED, {"step": 7, "reason": "save_and_go_on"},
     "ranks save together after step 7, as requested"),
    (EventKind.DRILL, {"kind": "kill-agent", "rank": None, "node": "n2", "step": 7}, "drill: kill-agent n2 at step 7"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "data", "words"), [*SAID, *NOTICED])
def test_described_events(kind: EventKind, data: dict[str, Any], words: str) -> None:
    event = Event(time=1.0, source="coordinator", seq=1, kind=kind, attempt=1, generation=2, data=data)
    assert describe_event(event) == f"attempt 1 generation 2: {words}"


def test_repeated_save_failures() -> None:
    describer = EventDescriber()

    def told(kind: EventKind, step: int, reason: str = "", generation: int = 1) -> str | None:
        data = {"step": step, "reason": reason} if reason else {"step": step, "bytes": 1 << 20, "seconds": 0.5}
        event = Event(time=1.0, source="r", seq=1, kind=kind, attempt=1, generation=generation, data=data)
        return describer.describe(event)

    full = "OSError: [Errno 28] No space left on device: '/runs/a/checkpoints/step-{:08}.001-x/0'"
    assert told(EventKind.CHECKPOINT_RETRIED, 20, full.format(20))
    assert told(EventKind.CHECKPOINT_FAILED, 20, full.format(20))
    for step in (40, 60):
        assert told(EventKind.CHECKPOINT_RETRIED, step, full.format(step)) is None
        assert told(EventKind.CHECKPOINT_FAILED, step, full.format(step)) is None
    assert told(EventKind.CHECKPOINT_FAILED, 80, "rank 1 is gone"), "another reason"
    assert told(EventKind.CHECKPOINT_FAILED, 100, full.format(100)) is None
    assert told(EventKind.CHECKPOINT_COMMITTED, 120) == (
        "attempt 1 generation 1: saved step 120 (1.0 MiB, 0.5 s), after 3 more failures"
    )
    assert told(EventKind.CHECKPOINT_FAILED, 140, full.format(140)), "it works, and fails anew"
    assert told(EventKind.CHECKPOINT_COMMITTED, 160) == "attempt 1 generation 1: saved step 160 (1.0 MiB, 0.5 s)"
