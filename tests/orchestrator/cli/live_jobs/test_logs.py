"""`orch logs`, the first error and the feed, on run directories as jobs write them."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from orchestrator.cli.drills.demo import read_demo_report
from orchestrator.cli.live_jobs.first_error import _around
from orchestrator.cli.runs.run_reader import EventFeed
from orchestrator.cli.runs.timeline import describe_event
from orchestrator.states import RunState
from tests.orchestrator.cli.conftest import Patch, Seeds, Type
from tests.orchestrator.cli.forked_orch import ForkedOrch
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.outcome import AttemptOutcome, AttemptResult, Failure, FailureKind
from trainer.protocol.failures.rank_end import RankEnd, append_outcome
from trainer.protocol.run_dir import AttemptDir, RunDir


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def place(seeds: Seeds) -> RunDir:
    run = seeds.run()
    place = RunDir(seeds.root / run)
    shutil.rmtree(place.path)
    place.make()
    place.attempt(1).make()
    return place


def write_log(attempt: AttemptDir, rank: int, *lines: str) -> None:
    attempt.rank_log(rank).write_text("".join(f"{line}\n" for line in lines))


def test_one_rank_all_ranks_and_the_end_only(orch: Type, place: RunDir) -> None:
    for rank in (0, 1):
        write_log(place.attempt(1), rank, *(f"r{rank} line {n}" for n in range(5)))
    assert orch("logs", place.name).out.splitlines()[0] == "r0 line 0"
    assert orch("logs", place.name, "--rank", 1, "--tail", 2).out == "r1 line 3\nr1 line 4\n"
    assert orch("logs", place.name, "--rank", "all", "--tail", 1).out == "rank 0 | r0 line 4\nrank 1 | r1 line 4\n"
    assert orch("logs", place.name, "--tail", 0).out == ""
    assert len(orch("logs", place.name, "--tail", 99).out.splitlines()) == 5


def test_the_end_of_a_long_log_is_found_from_its_end(orch: Type, place: RunDir) -> None:
    write_log(place.attempt(1), 0, *(f"{n} " + "x" * 200 for n in range(5000)))
    lines = orch("logs", place.name, "--tail", 700).out.splitlines()
    assert len(lines) == 700
    assert lines[0].startswith("4300 ")


def test_escape_sequences_are_left_out(orch: Type, place: RunDir) -> None:
    write_log(place.attempt(1), 0, "\x1b[31mred\x1b[0m \x1b]0;owned\x07done\rover", "tab\tkept")
    assert orch("logs", place.name).out == "red doneover\ntab\tkept\n"


def test_agents_speak_where_no_rank_has_started(orch: Type, place: RunDir) -> None:
    attempt = place.attempt(1)
    (attempt.submission / "41_0_log.err").write_text("srun: error\n")
    assert "srun: error" in orch("logs", place.name).out
    attempt.agent_log(0).write_text("no GO yet\n")
    assert "no GO yet" in orch("logs", place.name).out
    assert orch("logs", place.name, "--node", 0).out == "no GO yet\n"


def test_paths_and_json(orch: Type, place: RunDir) -> None:
    write_log(place.attempt(1), 0, "hello")
    path = str(place.attempt(1).rank_log(0))
    assert orch("logs", place.name, "--path").out == path + "\n"
    assert orch("logs", place.name, "--json").data == {
        "paths": [path],
        "lines": [{"source": "rank 0", "line": "hello"}],
    }
    assert orch("logs", place.name, "--rank", 7).code == 3
    assert orch("logs", place.name, "--attempt", 9).code == 3
    assert orch("logs", place.name, "-f", "--json").code == 2


def test_controller_log_of_one_run(orch: Type, place: RunDir, home: Path) -> None:
    (home / "controller.log").write_text(f"{place.name}: adopted job 41\nother-1: nothing\n")
    assert orch("logs", place.name, "--controller").out == f"{place.name}: adopted job 41\n"


def failed(
    attempt: AttemptDir, rank: int, at: float, *, secondary: bool = False, exception: str = "ValueError"
) -> None:
    outcome = RankEnd(
        rank=rank, generation=1, node="n1", step=12, exit_code=1, time=at, exception=exception, message="bad batch",
        traceback=f"Traceback (most recent call last):\n  rank {rank}\n{exception}: bad batch\n", secondary=secondary,
    )  # fmt: skip
    append_outcome(attempt, outcome)


def test_first_error_is_the_earliest_root(orch: Type, place: RunDir) -> None:
    attempt = place.attempt(1)
    failed(attempt, 3, 99.0, secondary=True, exception="DistBackendError")
    failed(attempt, 2, 100.0)
    failed(attempt, 1, 101.0)
    shown = orch("logs", place.name, "--rank", "first-error")
    assert shown.code == 0
    assert shown.out.splitlines()[0] == "attempt 1, generation 1, rank 2 on n1, step 12: ValueError: bad batch"
    assert "Traceback (most recent call last):\n  rank 2\n" in shown.out
    assert orch("logs", place.name, "--rank", "first-error", "--json").data["rank"] == 2


def test_coordinator_decides_the_first_error(orch: Type, place: RunDir) -> None:
    attempt = place.attempt(1)
    failed(attempt, 0, 90.0)  # a node whose clock is behind
    failed(attempt, 2, 100.0)
    log = EventLog(attempt.event_file("coordinator"), "coordinator", 1)
    log.generation = 1
    root = Failure(kind=FailureKind.USER_ERROR, reason="bad batch", rank=2, node="n1")
    log.write(EventKind.GENERATION_ENDED, reason="rank 2 failed", step=12, failure=root.to_json())
    log.close()
    assert orch("logs", place.name, "--rank", "first-error", "--json").data["rank"] == 2


def test_a_killed_rank_left_only_its_log(orch: Type, place: RunDir) -> None:
    attempt = place.attempt(1)
    write_log(attempt, 1, *(f"step {n}" for n in range(100)))
    log = EventLog(attempt.event_file("agent-0"), "agent-0", 1)
    log.generation = 1
    log.write(EventKind.RANK_EXITED, rank=1, node="n1", exit_code=None, signal=9, reason="")
    log.close()
    shown = orch("logs", place.name, "--rank", "first-error").out.splitlines()
    assert shown[0] == "attempt 1, generation 1, rank 1 on n1: killed by signal 9"
    assert shown[-1] == "step 99"


def test_a_run_without_a_failure_says_so(orch: Type, place: RunDir) -> None:
    none = orch("logs", place.name, "--rank", "first-error")
    assert none.code == 3
    assert "no failure is on record" in none.err


def test_following_goes_on_over_attempts_until_the_run_ends(seeds: Seeds, place: RunDir) -> None:
    write_log(place.attempt(1), 0, "first attempt")
    words = ["logs", place.name, "-f"]
    child = ForkedOrch(seeds.store, words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "first attempt\n"
        place.attempt(2).make()
        write_log(place.attempt(2), 0, "second attempt")
        assert child.stdout.readline() == "second attempt\n"
        seeds.store.move_run(place.name, RunState.FAILED, "a bug", epoch=seeds.epoch, now=time.time())
        _, err = child.communicate(timeout=20)
    finally:
        child.kill()
    assert child.returncode == 8
    assert "is FAILED: a bug" in err


def test_follow_all_ranks(orch: Type, seeds: Seeds, place: RunDir) -> None:
    for rank in (0, 1):
        write_log(place.attempt(1), rank, *(f"line {n}" for n in range(50)))
    with place.attempt(1).rank_log(1).open("a") as log:
        log.write("no end of line")
    seeds.store.move_run(place.name, RunState.SUCCEEDED, "done", epoch=seeds.epoch, now=time.time())
    shown = orch("logs", place.name, "--rank", "all", "-f", "--tail", 1)
    assert shown.out.splitlines() == ["rank 0 | line 49", "rank 1 | line 49", "rank 1 | no end of line"]


def test_log_with_rotated_files_only(orch: Type, place: RunDir) -> None:
    place.attempt(1).agent_log(0).write_text("an agent\n")
    write_log(place.attempt(1), 0, "killed in the middle of a rotation")
    log = place.attempt(1).rank_log(0)
    log.rename(log.with_name(f"{log.name}.1"))
    for more in ((), ("--rank", 0), ("--rank", "all"), ("--tail", 5)):
        assert orch("logs", place.name, *more).out == "killed in the middle of a rotation\n"


def test_generation_mark_within_a_torn_line(place: RunDir) -> None:
    log = place.attempt(1).rank_log(0)
    log.write_text("--- generation 1 ---\none\nstep 5 los--- generation 2 ---\ntwo\n--- generation 3 ---\nthree\n")
    assert [_around(log, number) for number in (1, 2, 3)] == ["one\nstep 5 los", "two", "three"]


def test_following_ends_by_ctrl_c_without_harm(seeds: Seeds, place: RunDir) -> None:
    write_log(place.attempt(1), 0, "hello")
    words = ["logs", place.name, "-f"]
    child = ForkedOrch(seeds.store, words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 130
    assert "continues" in err


def drilled(place: RunDir, tier: str = "/runs/tiny-1/checkpoints") -> None:
    attempt, clock = place.attempt(1), Clock()
    log = EventLog(attempt.event_file("coordinator"), "coordinator", 1, clock=clock)
    log.generation = 1
    log.write(EventKind.GENERATION_STARTED, world=4, nodes=["n1", "n2"])
    clock.now += 10
    log.write(EventKind.DRILL, kind="kill-rank", rank=1, step=4)
    clock.now += 0.5
    log.write(EventKind.RANK_EXITED, rank=1, node="n1", exit_code=None, signal=9, reason="")
    log.generation = 2
    log.write(EventKind.CHECKPOINT_RESTORED, step=2, name="step-2", seconds=0.1, tier=tier)
    clock.now += 1
    log.write(EventKind.GENERATION_FIRST_STEP, step=3, seconds=1.0)
    log.close()
    trained = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (2, 5), (2, 6)]
    with attempt.metrics.open("w") as stream:
        for generation, step in trained:
            line = {"time": 0.0, "attempt": 1, "generation": generation, "step": step, "loss": 7.0 - step}
            stream.write(json.dumps(line) + "\n")
        stream.write('{"torn')


def test_demo_report(place: RunDir) -> None:
    drilled(place)
    story = read_demo_report(place.path)
    assert story.fault == "rank 1 was killed with SIGKILL after step 4"
    assert story.has_recovered
    assert story.recovery_s == pytest.approx(1.5)
    assert story.resumed_from == 2
    assert (story.first_loss, story.loss_before, story.loss_after, story.last_loss) == (6.0, 3.0, 4.0, 1.0)
    assert (story.replayed, story.replayed_equal) == (2, 2)


def test_demo_report_without_fault(place: RunDir) -> None:
    story = read_demo_report(place.path)
    assert story.fault is None
    assert not story.has_recovered


def test_the_feed_gives_every_event_once_in_words(place: RunDir) -> None:
    drilled(place)
    feed = EventFeed(place.path)
    said = [text for event in feed.poll() if (text := describe_event(event))]
    assert "attempt 1 generation 1: drill: kill-rank rank 1 at step 4" in said
    assert "attempt 1 generation 1: rank 1 on n1 ended: killed by signal 9" in said
    assert "attempt 1 generation 2: training: step 3 done after 1.0 s" in said
    assert feed.latest is not None
    assert (feed.latest["step"], feed.latest["loss"]) == (6, 1.0)
    assert feed.poll() == []


@pytest.mark.parametrize(
    ("tier", "words"), [("memory", "from memory, at step 2"), ("/nvme/tiny-1/n1", "from the checkpoint of step 2")]
)
def test_the_demo_says_what_it_went_on_from(place: RunDir, tier: str, words: str) -> None:
    drilled(place, tier)
    assert f"recovered  trained again 1.5 s later, {words}" in read_demo_report(place.path).lines()


@pytest.mark.parametrize(("hit", "state", "code"), [(True, "SUCCEEDED", 0), (False, "SUCCEEDED", 8), (True, "HELD", 8)])
def test_the_demo_judges_by_what_happened(
    orch: Type, seeds: Seeds, place: RunDir, monkeypatch: Patch, hit: bool, state: str, code: int
) -> None:
    from orchestrator.cli.drills import demo

    if hit:
        drilled(place)
    seeds.store.move_run(place.name, RunState(state), "the end", epoch=seeds.epoch, now=time.time())
    launched = {"run": place.name, "job_id": "41", "run_dir": str(place.path)}
    monkeypatch.setattr(demo, "launch", lambda *_, **__: launched)
    shown = orch("demo")
    assert shown.code == code, shown.err
    assert state in shown.out
    assert ("recovered  trained again 1.5 s later, from the checkpoint of step 2" in shown.out) == hit
    assert ("2 of 2 replayed steps" in shown.out) == hit
    assert f"orch show {place.name}" in shown.out
    as_json = orch("demo", "--json")
    assert as_json.code == code
    assert as_json.data["recovered"] == hit


def generation_failed(attempt: AttemptDir, *ends: tuple[int, int, str]) -> None:
    log = EventLog(attempt.event_file("coordinator"), "coordinator", attempt.number)
    for generation, rank, reason in ends:
        log.generation = generation
        root = Failure(kind=FailureKind.USER_ERROR, reason=reason, rank=rank, node="n1")
        log.write(EventKind.GENERATION_ENDED, reason=reason, step=12, failure=root.to_json())
    log.close()


def test_first_error_of_a_failed_attempt(orch: Type, place: RunDir) -> None:
    attempt = place.attempt(1)
    ends = [(1, 1, "killed by SIGKILL (drill kill-rank)"), (2, 0, "ValueError: a bad batch"), (3, 0, "KeyError: 'x'")]
    generation_failed(attempt, *ends)
    shown = orch("logs", place.name, "--rank", "first-error")
    assert shown.out.splitlines()[0].startswith("attempt 1, generation 1, rank 1"), "it goes on: the earliest"
    failure = Failure(kind=FailureKind.USER_ERROR, reason="KeyError: 'x'", rank=0, node="n1")
    AttemptOutcome(
        attempt=1, job_id="41", result=AttemptResult.FAILED, reason="the training code failed", exit_code=78, step=12,
        generations=3, started_at=1.0, ended_at=9.0, failure=failure,
    ).write(attempt.outcome)  # fmt: skip
    shown = orch("logs", place.name, "--rank", "first-error")
    assert shown.out.splitlines()[0] == "attempt 1, generation 3, rank 0 on n1: KeyError: 'x'"
