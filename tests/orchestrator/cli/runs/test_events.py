"""`orch events`: one timeline of what jobs wrote, what the controller decided, and what people asked for."""

import time
from pathlib import Path

import pytest

from orchestrator.cli.runs import events as events_verb
from orchestrator.cli.runs.timeline import Repetition, Timeline, TimelineEntry, in_recorded_order, since
from orchestrator.errors import ConfigError
from orchestrator.registry.records import REPLACED_VARIABLES
from orchestrator.states import AttemptState, RunState
from tests.orchestrator.cli.conftest import Seeds, Type
from tests.orchestrator.cli.forked_orch import on_a_terminal
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.run_dir import RunDir

WHY = "rank 1 on n1 was killed by SIGKILL"


def written(seeds: Seeds, run: str, attempt: int, source: str = "coordinator") -> EventLog:
    place = RunDir(seeds.root / run).attempt(attempt)
    if not place.path.exists():
        place.make()
    return EventLog(place.event_file(source), source, attempt)


def ended(seeds: Seeds, run: str, number: int = 1) -> None:
    """The controller concludes an attempt and decides that another one follows."""
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
    """A run whose first attempt has failed and whose second one has begun."""
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


def test_events_decisions_and_states_of_all_attempts_are_one_timeline(orch: Type, failed: str) -> None:
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


def test_programs_get_every_event_with_its_data(orch: Type, failed: str) -> None:
    rows = orch("events", failed, "--json").data
    keys = ["time", "attempt", "generation", "source", "kind", "text", "data"]
    assert {tuple(row) for row in rows} == {tuple(keys)}
    (joined,) = [row for row in rows if row["kind"] == "agent.joined"]
    assert (joined["attempt"], joined["text"], joined["data"]) == (1, None, {"node": 1, "name": "n2"})
    (decided,) = [row for row in rows if row["kind"] == "decision" and row["source"] == "controller"]
    assert decided["data"]["action"] == "RETRY"
    moves = [row["data"]["after"] for row in rows if row["kind"] == "transition" and row["data"]["kind"] == "run"]
    assert moves == ["CREATED", "RUNNING", "RECOVERING"]


def test_what_people_ask_for_is_told_with_the_answer(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    ask = seeds.store.add_user_request(run, "cancel", {}, now=time.time())
    assert "asked: orch cancel" in orch("events", run).out
    seeds.store.answer(ask, f"{run} is CANCELLED", epoch=seeds.epoch, now=time.time())
    assert f"answered: {run} is CANCELLED" in orch("events", run).out


def test_variables_with_other_values_are_named(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    seeds.store.add_user_request(run, "resume", {REPLACED_VARIABLES: ["A", "B"]}, now=time.time())
    assert "asked: orch resume, with other values of A, B\n" in orch("events", run).out


def test_on_a_terminal_a_reason_is_printed_once(seeds: Seeds, failed: str) -> None:
    shown = on_a_terminal(seeds.store, "events", failed)
    assert shown.count(WHY) == 1
    lines = [" ".join(line.split()[2:]) for line in shown.splitlines()]
    assert "1.1 ended at step 60" in lines
    assert "1 the attempt RUNNING -> ENDED: rank_killed" in lines
    assert "1 decision: RETRY (rank killed once (try 1 of 5))" in lines


def test_a_reason_of_another_attempt_is_printed_again() -> None:
    def moment(attempt: int) -> TimelineEntry:
        data = {"reason": WHY}
        return TimelineEntry(
            time=1.0, source="x", kind="decision", text=f"end ({WHY})", key=(), attempt=attempt, data=data
        )

    repetition = Repetition()
    assert [repetition.without(moment(number)) for number in (1, 1, 2)] == [f"end ({WHY})", "end", f"end ({WHY})"]


def test_since_leaves_out_what_was_before(orch: Type, failed: str) -> None:
    assert len(orch("events", failed, "--since", "1h", "--json").data) == len(orch("events", failed, "--json").data)
    assert orch("events", failed, "--since", "2999-01-01", "--json").data == []
    nothing = orch("events", failed, "--since", "2999-01-01")
    assert (nothing.out, nothing.code) == ("", 0)
    assert f"{failed}: nothing has happened since 2999-01-01" in nothing.err


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172800), (" 5s ", 5)])
def test_a_span_is_counted_from_now(text: str, seconds: float) -> None:
    assert since(text, 1e6) == 1e6 - seconds


def test_a_time_is_local_unless_it_names_a_zone(orch: Type, seeds: Seeds) -> None:
    assert since("1970-01-01T00:01:00+00:00", 0.0) == 60.0
    assert since("2026-01-31T12:00", 0.0) == time.mktime((2026, 1, 31, 12, 0, 0, 0, 0, -1))
    for text in ("yesterday", "10", "", "m"):
        with pytest.raises(ConfigError, match="not a time"):
            since(text, 0.0)
    refused = orch("events", seeds.run(), "--since", "soon")
    assert refused.code == 2
    assert "--since 10m" in refused.err


@pytest.mark.parametrize(
    ("state", "code"), [(RunState.SUCCEEDED, 0), (RunState.HELD, 8), (RunState.FAILED, 8), (RunState.CANCELLED, 10)]
)
def test_following_prints_what_comes_and_ends_with_the_run(
    orch: Type, seeds: Seeds, monkeypatch: pytest.MonkeyPatch, state: RunState, code: int
) -> None:
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


def test_following_is_for_people(orch: Type, seeds: Seeds) -> None:
    refused = orch("events", seeds.run(), "-f", "--json")
    assert refused.code == 2
    assert refused.answer["error"]["hint"] == "leave one out"


def test_a_folder_that_is_not_there_leaves_what_the_registry_knows(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    said = orch("events", run)
    assert "the run CREATED -> RUNNING" in said.out


def test_times_of_one_pass_keep_the_order_in_which_it_wrote(tmp_path: Path) -> None:
    def at(moment: float) -> TimelineEntry:
        return TimelineEntry(time=moment, source="controller", kind="transition", text="x", key=())

    found = in_recorded_order([at(100.0), at(100.5), at(100.2), at(200.0), at(50.0)])
    assert [moment.time for moment in found] == [100.0, 100.5, 100.5, 200.0, 50.0]  # the clock was set back


def test_every_moment_is_told_once(seeds: Seeds) -> None:
    run = seeds.run()
    log = written(seeds, run, 1)
    reader = Timeline(run, seeds.root / run)
    assert reader.poll()
    assert reader.poll() == []
    log.write(EventKind.STOP_REQUESTED, reason="enough")
    (moment,) = reader.poll()
    assert (moment.place, moment.text) == ("1", "asked to stop: enough")


@pytest.mark.parametrize("verb", ["events", "status"])
def test_a_folder_that_was_moved_is_warned_of(orch: Type, seeds: Seeds, verb: str) -> None:
    run = seeds.run()
    assert "is not there" not in orch(verb, run).err
    Path(seeds.store.run(run).run_dir).rename(seeds.root / "elsewhere")
    said = orch(verb, run)
    assert said.code == 0
    assert f"warning: the folder of {run} is not there" in said.err
    assert [one["code"] for one in orch(verb, run, "--json").answer["warnings"]] == ["folder_missing"]
