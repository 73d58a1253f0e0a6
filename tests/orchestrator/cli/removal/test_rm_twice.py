"""Two `orch rm` of one run at the same time: both end well, and the second one says what it was too late for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.removal import rm
from orchestrator.registry.records import Run
from orchestrator.registry.store import Store
from tests.orchestrator.cli.conftest import Seeds, Type
from tests.orchestrator.cli.removal.test_rm import begun


def by_another(do: Callable[..., Any]) -> Callable[..., Any]:
    """The other command does it first."""

    def twice(*given: Any) -> Any:
        do(*given)
        return do(*given)

    return twice


def test_the_rows_are_gone_already(orch: Type, seeds: Seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(seeds)
    monkeypatch.setattr(rm, "remove", by_another(rm.remove))
    said = orch("rm", run, "-y")
    assert (said.code, f"{run}: another command removed it just now, too" in said.err) == (0, True)


def test_the_files_go_while_they_are_deleted(orch: Type, seeds: Seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(seeds)

    def deleted(folder: Path) -> None:
        delete(folder)
        store: Store = seeds.store
        store.delete_run(run)
        raise FileNotFoundError(2, "No such file or directory", str(folder))

    delete = rm.delete_tree
    monkeypatch.setattr(rm, "delete_tree", deleted)
    said = orch("rm", run, "-y")
    assert (said.code, f"{run}: another command removed it just now, too" in said.err) == (0, True)


def test_the_files_go_while_they_are_counted(orch: Type, seeds: Seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(seeds)

    def counted(_: Run, folder: Path) -> int:
        seeds.store.begin_removal(run)
        seeds.store.delete_run(run)
        raise FileNotFoundError(2, "No such file or directory", str(folder))

    monkeypatch.setattr(rm, "bytes_below", counted)
    said = orch("rm", run, "-y")
    assert (said.code, f"{run} has just been removed by another command" in said.err) == (3, True)


def test_what_nobody_finishes_is_said_to_be_left(orch: Type, seeds: Seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(seeds)
    monkeypatch.setattr(rm, "OTHER_WITHIN", 0.2)

    def lost(folder: Path) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(folder))

    monkeypatch.setattr(rm, "delete_tree", lost)
    said = orch("rm", run, "-y")
    assert (said.code, "the same command finishes what was begun" in said.err) == (4, True)
