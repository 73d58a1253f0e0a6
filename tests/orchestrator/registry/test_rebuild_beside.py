"""A registry made from run directories that another registry's controller serves."""

import os
from pathlib import Path

import pytest

from orchestrator.controller.leasing.lease import host_name, start_time
from orchestrator.errors import RegistryError
from orchestrator.registry_rebuild.rebuild import rebuild
from orchestrator.states import RunState
from tests.orchestrator.registry.test_rebuild import begin, lose


def serve(desk) -> None:
    """By a process that lives for as long as this test."""
    desk.store.drop_lease(desk.lease)
    desk.lease = desk.store.take_lease(f"{host_name()}:{os.getppid()}:{start_time(os.getppid())}", 1.0, 60.0)


def test_live_runs_of_another_registrys_controller_are_refused(desk, tmp_path: Path) -> None:
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
