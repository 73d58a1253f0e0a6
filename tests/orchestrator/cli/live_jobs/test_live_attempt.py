"""Verbs that ask a live job: whom they ask, what comes back, and when there is nobody to answer."""

import threading
import time
from pathlib import Path

import pytest

from checkpointing.storage.durable import dump_line
from orchestrator.cli.live_jobs import live_attempt
from orchestrator.errors import WaitTimeout
from orchestrator.states import RunState
from tests.orchestrator.cli.conftest import Patch, Seeds, Type
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.outcome import AttemptOutcome, AttemptResult
from trainer.protocol.requests import Request, RequestKind, pending
from trainer.protocol.run_dir import RunDir


def begun(seeds: Seeds, run: str, *, silent: float = 0.0, nodes: tuple[str, ...] = ("n1", "n2")) -> RunDir:
    folder = RunDir(seeds.root / run)
    place = folder.attempt(1)
    place.make()
    folder.requests.mkdir()
    cluster = {"nodes": 2, "ranks_per_node": 2, "spare_nodes": len(nodes) - 2, "kind": "local"}
    folder.config.write_text(dump_line({"name": "tiny", "cluster": cluster}))
    beat = {"schema": "orch.heartbeat/1", "seq": 1, "time": time.time() - silent, "attempt": 1, "step": 120}
    place.heartbeat.write_text(dump_line({**beat, "nodes": list(nodes), "state": "running"}))
    return folder


def over(folder: RunDir, reason: str) -> None:
    AttemptOutcome(
        attempt=1, job_id="41", result=AttemptResult.FAILED, reason=reason, exit_code=75, step=1, generations=1,
        started_at=1.0, ended_at=2.0,
    ).write(folder.attempt(1).outcome)  # fmt: skip


class Agent:
    def __init__(self, folder: RunDir, answer: str = "") -> None:
        self.folder, self._answer, self._stop = folder, answer, threading.Event()
        self.asked: list[Request] = []
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> "Agent":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _serve(self) -> None:
        log = EventLog(self.folder.attempt(1).event_file("coordinator"), "coordinator", 1)
        log.generation = 1
        while not self._stop.wait(0.01):
            for request in pending(self.folder.requests, 1, {one.name for one in self.asked}):
                self.asked.append(request)
                self.reply(log, request)
        log.close()

    def reply(self, log: EventLog, request: Request) -> None:
        log.write(EventKind.REQUEST_ANSWERED, name="another", answer="no")
        log.write(EventKind.REQUEST_ANSWERED, name=request.name, answer=self._answer)


def test_save_comes_back_with_the_step(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    with Agent(begun(seeds, run), "saved at step 121") as agent:
        said = orch("save", run)
        assert (said.code, said.out) == (0, "tiny-1: saved at step 121\n")
        assert orch("save", run, "--json").data == {
            "run": run, "attempt": 1, "answer": "saved at step 121", "step": 121,
        }  # fmt: skip
    assert [request.kind for request in agent.asked] == [RequestKind.SAVE] * 2


def test_save_without_waiting_leaves_the_request(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    folder = begun(seeds, run)
    assert orch("save", run, "--no-wait").out == "tiny-1: save requested; training continues\n"
    (request,) = pending(folder.requests, 1, set())
    assert (request.kind, request.reason) == (RequestKind.SAVE, "orch save")


def test_refused_save(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    with Agent(begun(seeds, run), "refused: the ranks run the user's own command, which orch cannot ask to save"):
        said = orch("save", run)
    assert said.code == 4
    assert "the ranks run the user's own command" in said.err


def test_attempt_ends_before_it_answers(orch: Type, seeds: Seeds, monkeypatch: Patch) -> None:
    run = seeds.run()
    folder = begun(seeds, run)
    monkeypatch.setattr(live_attempt.time, "sleep", lambda _: over(folder, "its node was lost"))
    said = orch("save", run)
    assert said.code == 4
    assert "attempt 1 of tiny-1 ended before it answered" in said.err
    assert "its node was lost" in said.err


def test_waiting_ends_with_124_and_says_that_the_request_stands(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    folder = begun(seeds, run)
    said = orch("save", run, "--timeout", 0)
    assert said.code == 124
    assert "the request stands" in said.err
    assert len(pending(folder.requests, 1, set())) == 1


class Clock:
    def __init__(self, monkeypatch: Patch) -> None:
        self.now = 0.0
        self.then = lambda: None
        monkeypatch.setattr(live_attempt.time, "sleep", self._sleep)

    def __call__(self) -> float:
        return self.now

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.then()


def test_await_end_of_attempt(orch: Type, seeds: Seeds, monkeypatch: Patch) -> None:
    run = seeds.run()
    folder = begun(seeds, run)
    found, clock = live_attempt.find_live_attempt(run), Clock(monkeypatch)
    live_attempt.await_end(found, "drill.001.json", 60.0, clock)
    assert clock.now >= live_attempt.STOPPED

    clock.now = 0.0
    clock.then = lambda: folder.attempt(1).heartbeat.write_text(dump_line({"seq": int(clock.now * 10)}))
    with pytest.raises(WaitTimeout, match="attempt 1 of tiny-1 continues"):
        live_attempt.await_end(found, "drill.001.json", 60.0, clock)

    clock.now = 0.0
    over(folder, "a node was lost")
    live_attempt.await_end(found, "drill.001.json", 60.0, clock)
    assert clock.now == 0.0


def nobody(seeds: Seeds, what: str) -> tuple[str, str]:
    if what == "held":
        return seeds.run(state=RunState.HELD, reason="the disk is full"), "is HELD: nothing is running"
    run = seeds.run(state=RunState.QUEUED)
    if what == "queued":
        return run, "is QUEUED: its job has not begun"
    folder = begun(seeds, run, silent=3600 if what == "silent" else 0)
    if what == "between":
        over(folder, "its node was lost")
        return run, "attempt 1 of tiny-1 has ended, the next one has not begun"
    return run, "has been silent for 3600 s"


@pytest.mark.parametrize("what", ["held", "queued", "between", "silent"])
def test_no_request_without_live_attempt(orch: Type, seeds: Seeds, what: str) -> None:
    run, words = nobody(seeds, what)
    said = orch("save", run)
    assert said.code == 4
    assert words in said.err
    requests = Path(seeds.root / run / "requests")
    assert not requests.is_dir() or not list(requests.iterdir())


def test_an_unknown_run_is_not_found(orch: Type, seeds: Seeds) -> None:
    seeds.run()
    assert orch("save", "nobody-7").code == 3
