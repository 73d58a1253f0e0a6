"""The controller as a process, and its work after each pass."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.controller import service
from orchestrator.controller.reconcile import Controller
from orchestrator.errors import RegistryError
from orchestrator.home import controller_log, registry_path, state_home
from orchestrator.observed_since import Clock
from orchestrator.registry.lease import Holder, host_name, this_process
from orchestrator.registry.records import Lease, NewRun
from orchestrator.registry.store import Store
from orchestrator.scheduler.available_schedulers import lease_key
from orchestrator.states import AttemptState, RunState
from tests.fakes.new_runs import create_run, take_lease
from tests.orchestrator.controller.until import until
from trainer.protocol.logs.log_rotation import LogFile
from trainer.protocol.node_identity import start_time
from trainer.protocol.run_dir import RunDir


class Shifting:
    """The scheduler that commands reach: the first of `answers` at every moment, empty while there is none."""

    silence = "no answer"

    def __init__(self, answers: list[str]) -> None:
        self._answers = answers

    def __call__(self, within: float = 0.0) -> str:
        return self._answers[0]


def test_a_single_pass_is_no_controller_and_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    spawned: list[object] = []
    try:
        once = Holder(host=host_name(), pid=other.pid, started=start_time(other.pid) or "", once=True)
        with Store.open(path) as store:
            lease = take_lease(store, str(once), time.time(), 60.0)
            assert (service.status(path).alive, service.status(path).once) == (True, True)
            assert service.stop(path) is False, "a pass of somebody's shell is not to be ended"
            assert service.tick_once(path) is None
            with monkeypatch.context() as patch:
                patch.setattr(os, "posix_spawn", lambda *args, **more: spawned.append(args))
                assert service.ensure_running(path) is True
            daemon = service.Daemon(Controller(store, {}, clock=Clock()), idle_exit_s=0.0)

            def pass_on(seconds: float) -> None:
                renewed = store.lease()
                assert renewed is not None
                if renewed.holder == str(once):
                    store.renew_lease(renewed, time.time(), 60.0)
                    store.drop_lease(renewed)

            with monkeypatch.context() as patch:  # the wait for the other process sleeps too, with the registry closed
                patch.setattr(service.time, "sleep", pass_on)
                daemon.run()
            after = store.lease()
    finally:
        other.communicate(b"\n", timeout=30.0)
    assert len(spawned) == 1
    assert after is not None
    assert after.epoch == lease.epoch + 1
    assert after.ticked_at > 0


def test_a_daemon_is_told_its_places_in_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("ORCH_HOME", "state")
    monkeypatch.setenv("ORCH_REGISTRY", path.name)
    assert state_home() == path.parent / "state"
    assert registry_path() == path
    given: list[dict[str, str]] = []
    monkeypatch.setattr(os, "posix_spawn", lambda program, command, environ, **more: given.append(environ))
    service.ensure_running(registry_path())
    assert (given[0]["ORCH_HOME"], given[0]["ORCH_REGISTRY"]) == (str(path.parent / "state"), str(path))


def test_an_idle_daemon_ends_by_itself_and_gives_the_lease_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with Store.open(path) as store:
        daemon = service.Daemon(Controller(store, {}, clock=Clock()), idle_exit_s=0.0)
        daemon.run()
        lease = store.lease()
    assert lease is not None
    assert lease.holder == ""
    assert lease.ticked_at > 0


def test_a_registry_or_a_disk_that_fails_for_a_while_does_not_end_the_daemon(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(service, "LONGEST", 0.01)
    with Store.open(path) as store:
        controller = Controller(store, {}, clock=Clock())
        daemon = service.Daemon(controller, idle_exit_s=0.0)
        real = {"tick": controller.tick, "news": controller.news, "drop": store.drop_lease, "lease": store.lease}
        troubles: dict[str, list[Exception]] = {
            "lease": [RegistryError("locked")],
            "tick": [RegistryError("locked"), OSError("stale file handle")],
            "news": [OSError("stale file handle"), RegistryError("locked")],
            "drop": [RegistryError("locked")],
        }

        def shaky(name: str) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                if troubles[name]:
                    raise troubles[name].pop(0)
                return real[name](*args)

            return call

        monkeypatch.setattr(controller, "tick", shaky("tick"))
        monkeypatch.setattr(controller, "news", shaky("news"))
        monkeypatch.setattr(store, "drop_lease", shaky("drop"))
        monkeypatch.setattr(store, "lease", shaky("lease"))
        daemon.run()
        assert not any(troubles.values())
        lease = real["lease"]()
    assert lease is not None
    assert lease.holder == ""


def test_a_run_s_folder_that_cannot_be_read_is_no_news(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(folder: RunDir) -> Any:
        raise PermissionError("no")

    with Store.open(path) as store:
        create_run(store, path.parent, {"name": "a"}, slug="a", cluster="local", now=1.0, nonce="00000001")
        monkeypatch.setattr(RunDir, "all_attempts", stale)
        assert Controller(store, {}, clock=Clock()).news() == ((), ("a-1",), ((False, False),))


@pytest.mark.parametrize("leaves", [False, True])
def test_a_daemon_that_lost_its_lease_leaves_it_to_another_or_takes_it_when_that_one_has_gone(
    path: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with Store.open(path) as store:
        controller = Controller(store, {}, clock=Clock())
        taken: list[Lease] = []

        def rest(report: object) -> None:
            if taken:
                daemon.stopping = True
                return
            before = store.lease()
            lease = take_lease(store, "other:1:1", time.time(), 60.0, over=[before])
            taken.append(lease)

        def while_it_waits(seconds: float) -> None:
            if leaves:
                store.drop_lease(taken[0])
            else:
                store.renew_lease(taken[0], time.time(), 60.0)

        daemon = service.Daemon(controller, idle_exit_s=None)
        monkeypatch.setattr(daemon, "_rest", rest)
        monkeypatch.setattr(service.time, "sleep", while_it_waits)
        daemon.run()
        lease = store.lease()
    assert taken
    assert lease is not None
    assert (lease.holder, lease.epoch) == (("", taken[0].epoch + 1) if leaves else ("other:1:1", taken[0].epoch))


def test_a_pass_drops_the_lease_it_took(path: Path) -> None:
    assert service.tick_once(path) is not None
    with Store.open(path) as store:
        lease = store.lease()
        assert lease is not None
        assert lease.holder == ""
        assert str(this_process())
    assert not service.status(path).alive


def test_another_host_s_controller_is_believed_for_a_while(path: Path) -> None:
    with Store.open(path) as store:
        store.take_lease("elsewhere:1:1", time.time(), 60.0)
    assert service.status(path).alive
    assert service.tick_once(path) is None
    with pytest.raises(service.Precondition) as refused:
        service.stop(path)
    assert "orch controller stop` on elsewhere" in refused.value.hint


def test_a_daemon_whose_commands_reach_another_slurm_gives_its_lease_back(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    answers = ["first", "first", "", "second"]

    with Store.open(path) as store:
        controller = Controller(store, {}, clock=Clock(), instance=Shifting(answers))  # type: ignore[arg-type]
        daemon = service.Daemon(controller, idle_exit_s=None, kind="slurm")
        held: list[list[str]] = []

        def rest(report: object) -> None:
            held.append([lease.scheduler for lease in store.leases() if lease.holder])
            answers[:] = answers[1:] or answers
            daemon.stopping = len(held) == 6

        monkeypatch.setattr(daemon, "_rest", rest)
        with caplog.at_level("WARNING", logger="orch.controller"):
            daemon.run()
    assert held == [["first"], ["first"], ["first"], [], ["second"], ["second"]]
    assert "now reach second, but this controller holds the lease of first: giving it up" in caplog.text


def test_a_daemon_that_starts_in_silence_owns_nothing_until_its_slurm_answers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    answers = ["", "", "here"]

    class Late:
        silence = "no answer"

        def __call__(self, within: float = 0.0) -> str:
            return answers[0]

    with Store.open(path) as store:
        controller = Controller(store, {}, clock=Clock(), instance=Late())  # type: ignore[arg-type]
        daemon = service.Daemon(controller, idle_exit_s=None, kind="slurm")
        held: list[list[str]] = []

        def rest(report: object) -> None:
            held.append([lease.scheduler for lease in store.leases() if lease.holder])
            answers[:] = answers[1:] or answers
            daemon.stopping = len(held) == 4

        monkeypatch.setattr(daemon, "_rest", rest)
        daemon.run()
    waiting = f"slurm@{host_name()}?"
    assert held == [[waiting], [waiting], [], ["here"]]


FIRST, OTHER = "lab@login1:6817/aaaaaaaa", "other@login2:6817/bbbbbbbb"


def live_run(store: Store, folder: Path, scheduler: str) -> None:
    create_run(store, folder, {"name": "a"}, slug="a", scheduler=scheduler, now=time.time(), nonce="00000001")


@pytest.mark.parametrize("served", [True, False])
def test_a_daemon_whose_commands_reach_another_slurm_for_a_while_comes_back_to_its_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    now = [FIRST]

    with Store.open(path) as store:
        live_run(store, path.parent, FIRST)
        if served:
            pid = os.getppid()
            store.take_lease(f"{host_name()}:{pid}:{start_time(pid)}", time.time(), 60.0, OTHER)
        controller = Controller(store, {}, clock=Clock(), instance=Shifting(now))  # type: ignore[arg-type]
        daemon = service.Daemon(controller, idle_exit_s=0.0, kind="slurm")
        monkeypatch.setattr(daemon, "_rest", lambda report: None)
        assert daemon._turn() is True
        now[0] = OTHER
        assert [daemon._turn() for _ in range(4)] == [True] * 4
        now[0] = FIRST
        assert daemon._turn() is True
        daemon._turn()
        assert FIRST in [lease.scheduler for lease in store.leases() if lease.holder]


def test_a_daemon_ends_when_others_serve_what_it_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [FIRST]

    with Store.open(path) as store:
        live_run(store, path.parent, FIRST)
        holder = f"{host_name()}:{os.getppid()}:{start_time(os.getppid())}"
        store.take_lease(holder, time.time(), 60.0, OTHER)
        controller = Controller(store, {}, clock=Clock(), instance=Shifting(now))  # type: ignore[arg-type]
        daemon = service.Daemon(controller, idle_exit_s=None, kind="slurm")
        monkeypatch.setattr(daemon, "_rest", lambda report: None)
        assert daemon._turn() is True
        now[0] = OTHER
        assert daemon._turn() is True
        store.take_lease(holder, time.time(), 60.0, FIRST)
        assert daemon._turn() is False


def test_a_lease_that_cannot_be_given_back_does_not_end_the_daemon(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [FIRST]

    def locked(lease: Lease) -> None:
        raise RegistryError("the registry is locked by another process")

    with Store.open(path) as store:
        live_run(store, path.parent, FIRST)
        controller = Controller(store, {}, clock=Clock(), instance=Shifting(answers))  # type: ignore[arg-type]
        daemon = service.Daemon(controller, idle_exit_s=None, kind="slurm")
        monkeypatch.setattr(daemon, "_rest", lambda report: None)
        assert daemon._turn() is True
        monkeypatch.setattr(store, "drop_lease", locked)
        answers[0] = OTHER
        assert daemon._turn() is True
        assert daemon._turn() is True


def test_a_full_disk_costs_the_controller_log_lines_and_no_descriptors(tmp_path: Path, monkeypatch) -> None:
    def refuse(file: LogFile, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LogFile, "write", refuse)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    log, before = service.RotatedLog(tmp_path / "controller.log"), len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        log.emit(logging.makeLogRecord({"msg": "a pass"}))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    return tmp_path / "registry.db"


def held_run(path: Path, line: str) -> None:
    """A run that has just been held, and tells so by a line for the shell."""
    with Store.open(path) as store:
        key = lease_key("local")
        lease = take_lease(store, str(this_process()), time.time(), 60.0, key)
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


def lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def test_a_single_pass_has_told_when_it_ends(path: Path) -> None:
    held_run(path, 'sleep 0.3; echo "$ORCH_STATE $ORCH_REASON" >> told')
    report = service.tick_once(path)
    assert report is not None
    assert report.actions == ("r-1: sent the HELD notification by command",)
    assert lines_of(path.parent / "told") == ["HELD disk full"]
    again = service.tick_once(path)
    assert again is not None
    assert (again.actions, lines_of(path.parent / "told")) == ((), ["HELD disk full"])


def test_a_controller_killed_after_sending_is_followed_by_one_that_repeats_it_once(path: Path) -> None:
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
    assert report.actions == ("r-1: sent the HELD notification by command",)
    service.tick_once(path)
    first, second = lines_of(told)
    assert first == second
    assert first.startswith("r-1/HELD/")
    assert os.path.exists(controller_log())
