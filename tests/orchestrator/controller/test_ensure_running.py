"""A controller is started where none lives, found where one does, and stopped."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from orchestrator.controller import service
from orchestrator.home import controller_log
from orchestrator.registry.lease import LEASE_TTL, host_name, is_awaited
from orchestrator.registry.store import Store
from orchestrator.scheduler.available_schedulers import lease_key
from tests.fakes.new_runs import take_lease
from tests.orchestrator.controller.until import until
from trainer.protocol.config_sections.scheduler_kinds import LOCAL
from trainer.protocol.node_identity import start_time


def test_a_daemon_is_started_once_and_found_by_a_second_one_and_stopped(path: Path, tmp_path: Path) -> None:
    assert not service.status(path).alive
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), True)
        assert service.ensure_running(path) is True
    with (tmp_path / "lock").open() as again:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    until(lambda: service.status(path).alive)
    pid = service.status(path).pid
    assert pid is not None
    until(lambda: service.status(path).ticked_at is not None)
    assert psutil.Process(pid).cmdline()[0].startswith("orch-controller")
    assert os.getsid(pid) == pid, "it must outlive the terminal"
    assert psutil.Process(pid).environ()["ORCH_HOME"] == os.environ["ORCH_HOME"]
    assert service.ensure_running(path) is False
    assert service.tick_once(path) is None
    assert_a_second_one_ends(path)
    assert service.status(path).pid == pid
    assert service.stop(path) is True
    assert not service.status(path).alive
    assert service.stop(path) is False
    assert "controller ends" in controller_log().read_text()


def assert_a_second_one_ends(path: Path) -> None:
    home = path.parent / "other-home"
    home.mkdir()
    again = subprocess.run(
        [sys.executable, "-P", "-m", "orchestrator.controller.service", str(path)], timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(service.__file__).parents[2]), "ORCH_HOME": str(home)},
    )  # fmt: skip
    assert again.returncode == 0
    assert "another controller is alive" in (home / "controller.log").read_text()


@pytest.mark.parametrize("place", ["elsewhere", f"{host_name()}/another-container"])
def test_a_controller_elsewhere_with_the_pid_of_this_process_is_another(path: Path, place: str) -> None:
    holder = f"{place}:{os.getpid()}:{start_time(os.getpid())}"
    with Store.open(path) as store:
        lease = store.take_lease(holder, time.time(), LEASE_TTL, lease_key(LOCAL))
    assert lease is not None
    assert service.tick_once(path) is None
    assert service.tick_once(path, patience=0.0) is None
    with Store.open(path) as store:
        assert [(held.holder, held.epoch) for held in store.leases()] == [(holder, lease.epoch)]


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that are started."""
    started: list[int] = []
    real = os.posix_spawn

    def spawn(*args: object, **more: object) -> int:
        started.append(real(*args, **more))  # type: ignore[arg-type]
        return started[-1]

    monkeypatch.setattr(os, "posix_spawn", spawn)
    return started


def test_one_waits_beside_another_host_s_controller_until_that_one_renews(path: Path, spawned: list[int]) -> None:
    key = lease_key("local")
    with Store.open(path) as store:
        lease = take_lease(store, "elsewhere:1:1", time.time(), 60.0, key)
        assert not service.ensure_running(path), "it may live: nobody says that a new one was started"
        until(lambda: is_awaited(path, key))
        assert not service.ensure_running(path)
        assert len(spawned) == 1

        def ends_at_a_renewal() -> bool:
            """Renew as a live controller does: the other may read the lease only after the first time."""
            store.renew_lease(lease, time.time() + 0.001, 60.0)
            return not is_awaited(path, key)

        until(ends_at_a_renewal)
    assert service.status(path).host == "elsewhere"


@pytest.mark.proof
def test_a_host_that_died_after_its_last_renewal_is_replaced(path: Path) -> None:
    with Store.open(path) as store:
        assert store.take_lease("elsewhere:1:1", time.time(), 60.0, lease_key("local")) is not None
    service.ensure_running(path)
    until(lambda: service.status(path).host == host_name(), 90.0)
