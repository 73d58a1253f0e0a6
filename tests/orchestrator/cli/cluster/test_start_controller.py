"""`orch controller start`: a real controller in the background, and which verbs start one."""

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from orchestrator.cli.cluster import controller
from orchestrator.controller import service
from orchestrator.home import controller_log
from orchestrator.states import RunState
from tests.orchestrator.cli.conftest import Seeds, Type


def leave(seeds: Seeds) -> None:
    seeds.drop_lease()


@pytest.fixture
def alone(seeds: Seeds) -> Seeds:
    leave(seeds)
    return seeds


@pytest.fixture
def started() -> Iterator[list[int]]:
    pids: list[int] = []
    yield pids
    for pid in pids:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def test_controller_is_started_once(orch: Type, alone: Seeds, started: list[int]) -> None:
    (first,) = orch("controller", "start", "--cluster", "local", "--json").data
    started.append(first["pid"])
    assert (first["started"], first["alive"], first["stalled"]) == (True, True, False)
    assert first["scheduler"].startswith("local@")
    again = orch("controller", "start", "--cluster", "local")
    assert again.out == f"alive already for {first['scheduler']}: pid {first['pid']} on {first['host']}\n"
    assert again.err == f"log {first['log']}\n"

    os.kill(first["pid"], signal.SIGKILL)
    psutil.wait_procs([psutil.Process(first["pid"])] if psutil.pid_exists(first["pid"]) else [], timeout=10)
    assert "`orch controller start` or the next `orch submit` there starts one" in orch("controller", "status").out
    epoch = service.status(path := alone.store.path).epoch
    report = service.tick_once(path)
    assert report is not None, "a single pass replaces it at once"
    assert report.errors == ()
    assert service.status(path).epoch == epoch + 1
    (second,) = orch("controller", "start", "--cluster", "local", "--json").data
    started.append(second["pid"])
    assert second["started"]
    assert second["pid"] != first["pid"]
    stopped = orch("controller", "stop")
    assert stopped.out == "stopped; `orch controller start` starts one, and so does the next `orch submit`\n"


def test_controller_that_does_not_come_up(orch: Type, alone: Seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ensure_running", lambda path, kind: True)
    monkeypatch.setattr(controller, "ALIVE_WITHIN", 0.0)
    refused = orch("controller", "start", "--cluster", "local")
    assert refused.code == 4
    assert "but did not take the lease" in refused.err
    assert str(controller_log()) in refused.err
    assert "`orch controller run` runs one in the foreground" in refused.err


@pytest.mark.parametrize(
    ("live", "here", "expected"),
    [
        (["local"], ["local"], ["local"]),
        (["local", "slurm"], ["local", "slurm"], ["local", "slurm"]),
        (["slurm"], ["local"], ["local"]),  # none of its runs can be served from here
        ([], ["local", "slurm"], ["slurm"]),
    ],
)
def test_without_a_cluster_live_runs_decide(
    orch: Type, alone: Seeds, monkeypatch: pytest.MonkeyPatch, live: list[str], here: list[str], expected: list[str]
) -> None:
    from orchestrator.registry import fast_queries

    started_kinds: list[str] = []
    health = service.Health(alive=True, host="login1", pid=7, epoch=1, renewed_at=None, ticked_at=None, log="x")
    rows = [{"cluster": kind} for kind in live]
    monkeypatch.setattr(fast_queries, "newest", lambda *_, **__: rows)
    monkeypatch.setattr(controller, "kinds", lambda: here)
    monkeypatch.setattr(controller, "resolve", lambda kind: "slurm" if "slurm" in here else "local")
    monkeypatch.setattr(
        controller, "start_controller",
        lambda screen, kind: started_kinds.append(kind) or (True, health),
    )  # fmt: skip
    assert orch("controller", "start").code == 0
    assert started_kinds == expected


@pytest.mark.parametrize("lives", [True, False])
def test_resuming_a_live_run_starts_a_controller_where_none_runs(
    orch: Type, seeds: Seeds, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    started_kinds: list[str] = []
    monkeypatch.setattr(service, "ensure_running", lambda path, kind: started_kinds.append(kind) or True)
    run = seeds.run(state=RunState.RUNNING)
    if not lives:
        leave(seeds)
    done = orch("resume", run)
    assert done.code == 0
    assert f"{run}: is already live" in done.out
    assert started_kinds == ([] if lives else ["local"])
    assert ("no controller was alive: started one" in done.err) is not lives


@pytest.mark.parametrize("verb", ["status", "show", "top"])
def test_reading_verbs_start_no_controller(
    orch: Type, seeds: Seeds, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(service, "ensure_running", lambda path, kind: pytest.fail("started one"))
    run = seeds.run()
    leave(seeds)
    said = orch(verb, run)
    assert said.code == 0
    assert "warning: no controller is running: jobs continue, but nothing is restarted" in said.err
    assert "`orch controller start` starts one" in said.err
    (warning,) = orch(verb, run, "--json").answer["warnings"]
    assert warning["code"] == "no_controller"


def test_waiting_says_that_it_acts_instead(orch: Type, seeds: Seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    ticked = SimpleNamespace(unreachable=())
    monkeypatch.setattr(service, "tick_once", lambda path, kind, **_: ticked)
    run = seeds.run()
    leave(seeds)
    said = orch("wait", run, "--timeout", 0.1)
    assert said.code == 124
    assert said.err.count("no controller is running: this command does its work") == 1
