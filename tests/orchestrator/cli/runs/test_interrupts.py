"""Ctrl-C: every verb says what is true by then, and what to type."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cli.live_jobs import live_attempt
from orchestrator.cli.runs import cancel_resume, events, submit
from orchestrator.controller import service
from orchestrator.registry.store import Store
from orchestrator.states import RunState
from orchestrator.submission import create_run
from tests.orchestrator.cli.conftest import Patch, Seeds, Type, Typed
from tests.orchestrator.cli.live_jobs.test_live_attempt import begun
from trainer.protocol.requests import Request, pending


def ctrl_c(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.fixture
def no_controller(monkeypatch: Patch) -> None:
    monkeypatch.setattr(service, "ensure_running", lambda path, kind: False)


def submitted(orch: Type, tmp_path: Path, *more: str) -> Typed:
    text = tmp_path / "text.txt"
    text.write_text("some words " * 2000)
    return orch("submit", "tiny-gpt", "--cluster", "local", f"cluster.root={tmp_path / 'runs'}",
                f"data.text=[{text}]", *more)  # fmt: skip


def runs(orch: Type) -> list[str]:
    return [row["run"] for row in orch("status", "--json").data]


@pytest.mark.parametrize(
    "where", ["orchestrator.config.compose.compose", "orchestrator.submission.create_run.identify"]
)
def test_before_run(orch: Type, tmp_path: Path, monkeypatch: Patch, where: str, no_controller: None) -> None:
    monkeypatch.setattr(where, ctrl_c)
    done = submitted(orch, tmp_path)
    assert (done.code, done.out, done.err.strip()) == (130, "", "interrupted: no run was created")
    assert runs(orch) == []


def test_recorded_run(orch: Type, tmp_path: Path, monkeypatch: Patch, no_controller: None) -> None:
    monkeypatch.setattr(create_run, "ensure_run_dir", ctrl_c)
    done = submitted(orch, tmp_path)
    assert done.code == 130
    assert done.err.strip().splitlines() == [
        "detached: tiny-gpt-1 is CREATED, but no controller is running, so nothing will be started or restarted",
        "  orch controller start", "  orch status tiny-gpt-1", "  orch wait tiny-gpt-1", "  orch cancel tiny-gpt-1",
    ]  # fmt: skip
    assert runs(orch) == ["tiny-gpt-1"]


def test_deferred_interrupt(orch: Type, tmp_path: Path, monkeypatch: Patch, no_controller: None) -> None:
    really = Store.create_run

    def pressed(store: Store, *args: Any, **more: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        made = really(store, *args, **more)
        time.sleep(0)  # Python runs handlers of signals between two of its instructions
        return made

    monkeypatch.setattr(Store, "create_run", pressed)
    done = submitted(orch, tmp_path)
    assert done.code == 130
    assert "detached: tiny-gpt-1 is CREATED" in done.err
    assert runs(orch) == ["tiny-gpt-1"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("json", [False, True])
def test_submit_while_it_waits_for_the_job(
    orch: Type, seeds: Seeds, tmp_path: Path, monkeypatch: Patch, no_controller: None, json: bool
) -> None:
    monkeypatch.setattr(submit, "_await_job", ctrl_c)
    done = submitted(orch, tmp_path, *(["--json"] if json else []))
    assert done.code == 130
    if json:
        error = done.answer["error"]
        assert (error["code"], error["message"]) == ("Interrupted", "detached: tiny-gpt-1 continues (CREATED)")
        assert error["hint"] == "orch status tiny-gpt-1; orch wait tiny-gpt-1; orch cancel tiny-gpt-1"
        return
    assert done.err.strip().splitlines()[:2] == ["detached: tiny-gpt-1 continues (CREATED)", "  orch status tiny-gpt-1"]


def test_a_run_that_is_over_does_not_go_on(seeds: Seeds) -> None:
    run = seeds.run(state=RunState.FAILED)
    assert events.detach_message(run) == f"interrupted: {run} is FAILED\n  orch show {run}"


@pytest.mark.parametrize("words", [("wait",), ("events", "-f"), ("logs", "-f")])
def test_detach_message(orch: Type, seeds: Seeds, monkeypatch: Patch, words: tuple[str, ...]) -> None:
    run = seeds.run()
    monkeypatch.setattr(service, "tick_once", lambda path, kind, **_: SimpleNamespace(unreachable=()))
    monkeypatch.setattr(time, "sleep", ctrl_c)
    done = orch(*words, run)
    assert done.code == 130
    assert f"detached: {run} continues (RUNNING)" in done.err
    seeds.drop_lease()
    assert f"detached: {run} is RUNNING, but no controller is running" in orch(*words, run).err


@pytest.mark.parametrize("verb", ["cancel", "resume"])
def test_request(orch: Type, seeds: Seeds, monkeypatch: Patch, no_controller: None, verb: str) -> None:
    run = seeds.run(state=RunState.HELD)
    monkeypatch.setattr("orchestrator.submission.resume_request.resume_request", lambda *_: {})
    with monkeypatch.context() as early:
        early.setattr(cancel_resume, "locate_run", ctrl_c)
        assert orch(verb, run).err.strip() == "interrupted: nothing was requested"
    assert seeds.store.user_requests() == []
    monkeypatch.setattr(cancel_resume, "await_answers", ctrl_c)
    done = orch(verb, run)
    assert (done.code, done.err.strip().splitlines()) == (130, [
        f"interrupted: the request to {verb} {run} is recorded, and the controller will act on it",
        f"  orch status {run}",
    ])  # fmt: skip
    assert [ask.verb for ask in seeds.store.user_requests()] == [verb]


def test_a_request_to_save_stands(orch: Type, seeds: Seeds, monkeypatch: Patch) -> None:
    run = seeds.run()
    folder = begun(seeds, run)
    monkeypatch.setattr(live_attempt.time, "sleep", ctrl_c)
    done = orch("save", run)
    assert done.err.strip() == f"interrupted: the request stands, and {run} saves at its next step boundary"
    assert [request.kind for request in pending(folder.requests, 1, set())] == ["save"]


@pytest.mark.parametrize(("where", "left"), [("begin", 0), ("written", 1)])
def test_save_request(orch: Type, seeds: Seeds, monkeypatch: Patch, where: str, left: int) -> None:
    run = seeds.run()
    folder = begun(seeds, run)
    if where == "begin":
        monkeypatch.setattr("orchestrator.cli.live_jobs.live_attempt.find_run", ctrl_c)
    else:
        write = Request.write
        monkeypatch.setattr(
            Request, "write", lambda *given: (write(*given), os.kill(os.getpid(), signal.SIGINT))[0]
        )  # within the call: it is written, and nobody has said so yet
    done = orch("save", run)
    assert done.code == 130
    asked = "the request stands" in done.err
    assert asked is bool(left)
    assert ("nothing was requested" in done.err) is not asked
    assert len(pending(folder.requests, 1, set())) == left


def test_interrupted_export(orch: Type, seeds: Seeds, tmp_path: Path, monkeypatch: Patch) -> None:
    run = seeds.run()
    monkeypatch.setattr("orchestrator.cli.checkpoints.export_import.find_one", ctrl_c)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "orch.json").write_text("{}")
    for name in ("new", "full"):
        done = orch("ckpt", "export", run, tmp_path / name)
        assert (done.code, " ".join(done.err.split())) == (130, f"interrupted: {tmp_path / name} is not written")


def test_a_display_ends_without_a_word(orch: Type, seeds: Seeds, monkeypatch: Patch) -> None:
    seeds.run()
    monkeypatch.setattr(time, "sleep", ctrl_c)
    done = orch("status", "-w", "-q")
    assert (done.code, done.err.strip()) == (130, "")


def test_interrupted_reader(orch: Type, seeds: Seeds, monkeypatch: Patch) -> None:
    monkeypatch.setattr("orchestrator.registry.fast_queries.newest", ctrl_c)
    done = orch("status", "-q")
    assert (done.code, done.err.strip()) == (130, "interrupted")


def test_ctrl_c_during_imports(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    command = [sys.executable, "-c", "from orchestrator.cli.entry import main; main()"]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
