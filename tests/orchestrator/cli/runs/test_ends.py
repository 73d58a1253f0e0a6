"""`orch wait` and the ends of runs; `orch cancel` and `orch resume` as requests."""

import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.cli.runs import cancel_resume
from orchestrator.states import RunState
from tests.orchestrator.cli.conftest import Patch, Seeds, Type
from tests.orchestrator.cli.forked_orch import ForkedOrch
from tests.orchestrator.registry.newer_record import record_newer_attempt


@pytest.mark.parametrize(
    ("state", "code"),
    [(RunState.SUCCEEDED, 0), (RunState.FAILED, 8), (RunState.HELD, 8), (RunState.CANCELLED, 10)],
)
def test_exit_codes_of_wait(orch: Type, seeds: Seeds, state: RunState, code: int) -> None:
    run = seeds.run(state=state, reason="because of that")
    ended = orch("wait", run)
    assert ended.code == code
    if code:
        assert f"error: {run} is {state}: because of that" in ended.err
        assert f"orch resume {run}" in ended.err
    as_json = orch("wait", run, "--json")
    assert as_json.code == code
    assert as_json.data["state"] == state


def test_wait_timeout(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    late = orch("wait", run, "--timeout", 0)
    assert late.code == 124
    assert "still RUNNING" in late.err
    assert f"orch wait {run}" in late.err


@pytest.mark.parametrize("words", [["--follow"], []])
def test_wait_reasons(orch: Type, seeds: Seeds, service: SimpleNamespace, monkeypatch: Patch, words: list[str]) -> None:
    run, reasons = seeds.run(), ["job 41 is PENDING (Priority): jobs with higher priority go first", "queued again"]
    looks = iter([*reasons, *reasons, ""])

    def elapse(_: float) -> None:
        reason = next(looks)
        state = RunState.QUEUED if reason else RunState.SUCCEEDED
        for step in (RunState.RECOVERING, state) if reason else (RunState.RUNNING, state):
            seeds.store.move_run(run, step, reason or "done", epoch=seeds.epoch, now=time.time())

    monkeypatch.setattr("orchestrator.cli.runs.events.time.sleep", elapse)
    done = orch("wait", run, *words)
    assert done.code == 0
    assert [done.err.count(reason) for reason in reasons] == [1, 1]


def test_wait_acts_as_controller(orch: Type, seeds: Seeds, service: SimpleNamespace) -> None:
    run = seeds.run()
    lease = seeds.store.lease()
    assert lease is not None

    def tick(path: object, kind: str, **_: object) -> object:
        service.knocks.append("tick_once")
        fresh = seeds.store.take_lease("me:1:1", time.time(), 60.0)
        assert fresh is not None
        seeds.store.move_run(run, RunState.SUCCEEDED, "all steps", epoch=fresh.epoch, now=time.time())
        return SimpleNamespace(unreachable=())

    assert orch("wait", run, "--timeout", 0).code == 124
    assert service.knocks == []
    seeds.store.drop_lease(lease)
    service.tick_once = tick
    assert orch("wait", run, "--timeout", 20).code == 0
    assert service.knocks == ["tick_once"]


def test_interrupted_wait(seeds: Seeds) -> None:
    run = seeds.run()
    words = ["wait", run, "--follow"]
    child = ForkedOrch(seeds.store, words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stderr is not None
    assert run in child.stderr.readline()  # it follows by now
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 130
    assert f"{run} continues" in err
    assert f"orch cancel {run}" in err


@pytest.mark.parametrize("verb", ["cancel", "resume"])
def test_request_wakes_controller(orch: Type, seeds: Seeds, service: SimpleNamespace, verb: str) -> None:
    run = seeds.run(state=RunState.HELD if verb == "resume" else RunState.RUNNING)

    def answer(path: object, kind: str) -> None:
        (ask,) = seeds.store.user_requests()
        assert (ask.run, ask.verb) == (run, verb)
        seeds.store.answer(ask.id, "will be done", epoch=seeds.epoch, now=time.time())

    service.ensure_running = answer
    done = orch(verb, run)
    assert done.code == 0
    assert f"{run}: will be done" in done.out
    assert orch(verb, run, "--json", "--no-controller").data[0]["run"] == run
    assert service.knocks == ["tick_once"]


def test_refused_requests(orch: Type, seeds: Seeds, service: SimpleNamespace) -> None:
    done = seeds.run(state=RunState.SUCCEEDED, reason="all steps")
    for verb in ("cancel", "resume"):
        refused = orch(verb, done)
        assert refused.code == 4
        assert "is SUCCEEDED" in refused.err
    assert seeds.store.user_requests() == []
    live = seeds.run()
    assert orch("resume", live).out.startswith("tiny-2: is already live")
    seeds.store.add_user_request(live, "cancel", {}, now=time.time())
    refused = orch("resume", live)
    assert (refused.code, "tiny-2 is being cancelled" in refused.err, "orch wait tiny-2" in refused.err) == (
        4,
        True,
        True,
    )


@pytest.mark.parametrize("state", [RunState.CANCELLED, RunState.RECOVERING])
@pytest.mark.parametrize("changes", [(), ("train.steps=300",)])
def test_owned_elsewhere(
    orch: Type, seeds: Seeds, service: SimpleNamespace, state: RunState, changes: tuple[str, ...]
) -> None:
    run, other = seeds.run(state=state), seeds.root.parent / "other" / "registry.db"
    record_newer_attempt(seeds.store, run, other)
    refused = orch("resume", run, *changes)
    assert refused.code == 4
    assert f"another registry has continued {run}: {other} has attempt 2" in refused.err
    assert f"`orch db rebuild --root {seeds.root}` imports that" in refused.err
    assert (seeds.store.user_requests(), service.knocks) == ([], [])


@pytest.mark.parametrize("verb", ["cancel", "resume"])
def test_requests_need_whole_names(orch: Type, seeds: Seeds, service: SimpleNamespace, verb: str) -> None:
    run = seeds.run(state=RunState.HELD)
    refused = orch(verb, run[:-1], "--no-controller")
    assert refused.code == 3
    assert run in refused.err
    assert seeds.store.user_requests() == []
    assert orch(verb, "@last", "--no-controller").code == 0


def test_cancel_several_runs(orch: Type, seeds: Seeds, service: SimpleNamespace) -> None:
    run = seeds.run()
    some = orch("cancel", run, "nobody-7", "--no-controller")
    assert some.code == 3
    assert "nobody-7" in some.err
    assert [ask.run for ask in seeds.store.user_requests()] == [run]


def test_waits_for_answer(orch: Type, seeds: Seeds, service: SimpleNamespace, monkeypatch: Patch) -> None:
    run = seeds.run()
    monkeypatch.setattr(cancel_resume, "ANSWER_TIMEOUT", 0.5)
    monkeypatch.setattr(cancel_resume, "QUIET", 0.0)
    told = orch("cancel", run)
    assert f"requested; waiting for the controller's answer about {run}" in told.err
    assert f"{run}: requested; " in told.out


@pytest.mark.parametrize("state", [RunState.HELD, RunState.CANCELLED, RunState.RUNNING, RunState.RECOVERING])
@pytest.mark.parametrize("left", [None, "checkpoints/step-00000100.001-0123abcd"])
def test_deleted_folder(orch: Type, seeds: Seeds, service: SimpleNamespace, state: RunState, left: str | None) -> None:
    run = seeds.run(state=state)
    folder = Path(seeds.store.run(run).run_dir)
    shutil.rmtree(folder)
    if left is not None:
        (folder / left).mkdir(parents=True)
    before = sorted(seeds.root.rglob("*"))
    refused = orch("resume", run, "--no-controller")
    assert (refused.code, str(folder) in refused.err) == (4, True), refused.err
    assert seeds.store.user_requests() == []
    assert sorted(seeds.root.rglob("*")) == before
