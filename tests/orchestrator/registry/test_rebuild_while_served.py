"""Nobody makes a registry anew while a controller is alive: of this one, or of another that has the same runs."""

import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import RegistryError
from orchestrator.registry.lease import Holder, host_name
from orchestrator.registry_rebuild.rebuild import rebuild
from orchestrator.states import RunState
from tests.fakes.new_runs import take_lease
from tests.orchestrator.registry.test_rebuild import begin, lose
from trainer.protocol.node_identity import start_time

Desk = Any


def serve(desk: Desk) -> None:
    """By a process that lives for as long as this test."""
    desk.store.drop_lease(desk.lease)
    desk.lease = desk.store.take_lease(f"{host_name()}:{os.getppid()}:{start_time(os.getppid())}", 1.0, 60.0)


def test_live_runs_of_another_registrys_controller_are_refused(desk: Desk, tmp_path: Path) -> None:
    serve(desk)
    run = begin(desk).name
    desk.store.move_run(run, RunState.HELD, "disk full", **desk.stamp)
    second = tmp_path / "second" / "registry.db"
    second.parent.mkdir()
    assert rebuild(second, [desk.root]) == 1, "it is not live, and nobody acts on it"
    second.unlink()
    desk.store.move_run(run, RunState.RECOVERING, "resumed", **desk.stamp)
    with pytest.raises(RegistryError, match=f"{run} is RECOVERING, and the controller of another registry") as caught:
        rebuild(second, [desk.root])
    assert f"`orch controller stop` with ORCH_REGISTRY={desk.path}" in caught.value.hint
    assert not second.exists()
    lose(desk)
    assert rebuild(second, [desk.root]) == 1


def test_a_living_controller_is_not_robbed_of_its_registry(desk: Desk) -> None:
    with pytest.raises(RegistryError, match="a controller is alive") as caught:
        rebuild(desk.path, [desk.root], now=50.0)
    assert "orch controller stop" in caught.value.hint
    assert desk.store.lease() == desk.lease


def test_a_controller_of_this_host_is_judged_by_its_process_not_by_its_lease(desk: Desk) -> None:
    begin(desk)
    desk.store.drop_lease(desk.lease)
    parent = os.getppid()
    alive = Holder(host=host_name(), pid=parent, started=start_time(parent) or "")
    held = take_lease(desk.store, str(alive), 0.0, 1.0)
    with pytest.raises(RegistryError, match="a controller is alive"):
        rebuild(desk.path, [desk.root], now=5000.0)
    desk.store.drop_lease(held)
    killed = Holder(host=host_name(), pid=parent, started="1")
    assert desk.store.take_lease(str(killed), 0.0, 1e9) is not None
    desk.store.close()
    assert rebuild(desk.path, [desk.root], now=5000.0) == 1


def test_any_cluster_s_live_controller_refuses_a_rebuild(desk: Desk) -> None:
    desk.store.drop_lease(desk.lease)
    for name in ("a", "b"):
        desk.store.take_lease(f"{host_name()}:{os.getppid()}:{start_time(os.getppid())}", 1.0, 60.0, name)
    held = next(lease for lease in desk.store.leases() if lease.scheduler == "b")
    desk.store.drop_lease(held)
    with pytest.raises(RegistryError, match="a controller of a is alive"):
        rebuild(desk.path, [desk.root])
