"""A controller that stands still: what is said of it, who takes over, and that it does no harm when it wakes."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from orchestrator.cli import main
from orchestrator.controller import service
from orchestrator.home import controller_log
from orchestrator.registry import lease as leases
from orchestrator.registry.lease import Holder, host_name
from orchestrator.registry.store import Store
from orchestrator.scheduler.available_schedulers import lease_key
from tests.orchestrator.controller.until import until
from trainer.protocol.node_identity import process_state, start_time


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ORCH_REGISTRY", raising=False)
    registry = tmp_path / "home" / "registry.db"
    Store.open(registry).close()
    yield registry
    found = service.status(registry)
    if found.pid not in (None, os.getpid()) and found.host == host_name():
        for process in psutil.process_iter():
            if process.pid == found.pid:
                process.kill()


@pytest.fixture
def stopped(path: Path) -> psutil.Process:
    """A daemon that was stopped while it rested."""
    service.ensure_running(path)
    until(lambda: service.status(path).ticked_at is not None)
    pid = service.status(path).pid
    assert pid is not None
    stop(pid)
    return psutil.Process(pid)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: process_state(pid) == "T")


def typed(*words: str) -> int:
    return int(main.run(list(words)))


def test_a_new_daemon_waits_beside_a_stopped_one_which_goes_on_or_is_told_of_and_replaced_by_a_single_pass(
    path: Path, stopped: psutil.Process, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert service.ensure_running(path) is True
    (waits,) = path.parent.glob(f".{path.name}.waits.{host_name()}.*")
    until(lambda: f":{waits.stat().st_ino} " in Path("/proc/locks").read_text())
    home = path.parent / "other-home"
    home.mkdir()
    second = subprocess.run(
        [sys.executable, "-P", "-m", "orchestrator.controller.service", str(path)], timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(service.__file__).parents[2]), "ORCH_HOME": str(home)},
    )  # fmt: skip
    assert "another process is already waiting for the lease" in (home / "controller.log").read_text()
    assert second.returncode == 0
    stopped.send_signal(signal.SIGCONT)
    # The one that was stopped goes on with its lease, and the one beside it has nothing to wait for.
    until(lambda: "another controller is alive" in controller_log().read_text())
    assert service.status(path).pid == stopped.pid
    stop(stopped.pid)
    epoch = service.status(path).epoch
    assert typed("controller", "status") == 0
    assert f"(pid {stopped.pid} on {host_name()}): stopped by a signal" in capsys.readouterr().out
    monkeypatch.setattr(service, "SLACK", -leases.LEASE_TTL)
    assert typed("controller", "tick") == 4, "nothing was done, and that is no success"
    told = capsys.readouterr().err
    assert "controller stalled for" in told
    assert "nothing was done for its runs" in told
    monkeypatch.setattr(leases, "LEASE_TTL", 1.0)
    monkeypatch.setattr(service, "SLACK", 15.0)
    assert typed("controller", "tick") == 0
    assert capsys.readouterr().out == "0 live runs\n"
    assert service.status(path, lease_key("local")).epoch > epoch
    assert stopped.wait(timeout=10.0) is not None or not stopped.is_running()


HOLD = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
sys.stdin.readline()
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
time.sleep(600)
"""


def test_a_daemon_that_was_stopped_in_the_middle_of_a_write_is_replaced_too(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        with Store.open(path) as store:
            holder = Holder(host=host_name(), pid=process.pid, started=start_time(process.pid) or "")
            assert store.take_lease(str(holder), time.time(), 60.0) is not None
    except BaseException:
        process.kill()
        raise
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    assert process.stdout.readline() == "locked\n"
    os.kill(process.pid, signal.SIGSTOP)
    with (
        closing(sqlite3.connect(path, timeout=0.1, isolation_level=None)) as raw,
        pytest.raises(sqlite3.OperationalError, match="locked"),
    ):
        raw.execute("BEGIN IMMEDIATE")
    monkeypatch.setattr(leases, "LEASE_TTL", 0.5)
    report = service.tick_once(path)
    assert report is not None
    assert process.wait(timeout=10.0) == -signal.SIGKILL
    process.stdout.close()
