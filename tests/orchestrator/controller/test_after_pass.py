"""Notifications by real controllers: a single pass waits for them, and one that is killed repeats what it sent."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from orchestrator.controller import service
from orchestrator.home import controller_log
from orchestrator.registry.lease import this_process
from orchestrator.registry.records import NewRun
from orchestrator.registry.store import Store
from orchestrator.scheduler.available_schedulers import lease_key
from orchestrator.states import AttemptState, RunState


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    return tmp_path / "registry.db"


def held_run(path: Path, line: str) -> None:
    """A run that has just been held, and tells so by a line for the shell."""
    with Store.open(path) as store:
        key = lease_key("local")
        lease = store.take_lease(str(this_process()), time.time(), 60.0, key)
        assert lease is not None
        digest = store.put_config({"name": "r", "notify": {"command": ["sh", "-c", line]}})
        new = NewRun(
            slug="r", cluster="local", root=path.parent, config_digest=digest, total_steps=9, scheduler=key,
            identity={"submit_dir": str(path.parent)},
        )  # fmt: skip
        run, _ = store.create_run(new, now=time.time(), nonce="0123abcd")
        stamp = {"epoch": lease.epoch, "now": time.time()}
        store.move_attempt(run.name, 1, AttemptState.ENDED, "", **stamp)
        store.move_run(run.name, RunState.HELD, "disk full", **stamp)
        store.drop_lease(lease)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def test_a_single_pass_has_told_when_it_ends(path: Path) -> None:
    held_run(path, 'sleep 0.3; echo "$ORCH_STATE $ORCH_REASON" >> told')
    report = service.tick_once(path)
    assert report is not None
    assert report.actions == ("r-1: told that it is HELD by command",)
    assert lines_of(path.parent / "told") == ["HELD disk full"]
    again = service.tick_once(path)
    assert again is not None
    assert (again.actions, lines_of(path.parent / "told")) == ((), ["HELD disk full"])


def test_a_controller_killed_after_sending_is_followed_by_one_that_repeats_it_once(path: Path) -> None:
    """The message itself kills the controller that has sent it, the first time."""
    told, victim = path.parent / "told", path.parent / "victim"
    kill = f'while [ ! -s {victim} ]; do sleep 0.05; done; kill -9 "$(cat {victim})"'
    held_run(path, f'echo "$ORCH_NOTIFICATION_ID" >> told; if [ "$(wc -l < told)" = 1 ]; then {kill}; fi')
    service.ensure_running(path)
    until(lambda: service.status(path).pid is not None and service.status(path).alive)
    pid = service.status(path).pid
    assert pid is not None
    victim.write_text(str(pid))
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert len(lines_of(told)) == 1
    report = service.tick_once(path)
    assert report is not None
    assert report.actions == ("r-1: told that it is HELD by command",)
    service.tick_once(path)
    first, second = lines_of(told)
    assert first == second
    assert first.startswith("r-1/HELD/")
    assert os.path.exists(controller_log())
