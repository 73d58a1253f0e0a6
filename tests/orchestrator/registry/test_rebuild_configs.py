"""Runs whose configuration a person has changed, after `orch db rebuild`: every attempt has its own again."""

from typing import Any

import pytest

from orchestrator.controller.run_dirs.run_folder import ensure_attempt_dir
from orchestrator.registry.store import Store
from orchestrator.registry_rebuild.rebuild import rebuild
from orchestrator.states import AttemptState, RunState
from tests.orchestrator.registry.test_rebuild import CONFIG, begin, lose
from trainer.contract.run_dir import RunDir

Desk = Any
LONGER = {**CONFIG, "train": {"steps": 200}}


def change(desk: Desk) -> tuple[RunDir, str, str]:
    """A run whose first attempt is over and whose next one is to train longer; both digests."""
    folder = begin(desk)
    first, second = desk.store.run(folder.name).config_digest, desk.store.put_config(LONGER)
    desk.store.move_attempt(folder.name, 1, AttemptState.ENDED, "done", **desk.stamp)
    desk.store.move_run(folder.name, RunState.HELD, "", **desk.stamp, config_digest=second, total_steps=200)
    return folder, first, second


def begin_next(desk: Desk, folder: RunDir) -> None:
    attempt = desk.store.add_attempt(folder.name, nonce="11111111", excluded=(), **desk.stamp)
    ensure_attempt_dir(folder, attempt, LONGER)


def rebuilt(desk: Desk, folder: RunDir, *, recorded: bool = True) -> Store:
    desk.store.move_run(folder.name, RunState.RECOVERING, "", **desk.stamp)
    if not recorded:
        folder.record.unlink()
    lose(desk)
    rebuild(desk.path, [desk.root])
    return Store.open(desk.path)


@pytest.mark.parametrize("recorded", [True, False])
def test_every_attempt_has_its_own_config_again(desk: Desk, recorded: bool) -> None:
    folder, first, second = change(desk)
    begin_next(desk, folder)
    with rebuilt(desk, folder, recorded=recorded) as store:
        assert [item.config_digest for item in store.attempts(folder.name)] == [first, second]
        assert store.run(folder.name).config_digest == second
        assert store.config(second) == LONGER


def test_a_change_that_no_attempt_was_begun_with_is_said_to_be_lost(desk: Desk) -> None:
    folder, first, _ = change(desk)
    with rebuilt(desk, folder) as store:
        run = store.run(folder.name)
        assert (run.state, run.config_digest, run.total_steps) == (RunState.HELD, first, 100)
        assert "a change of its configuration is lost" in run.reason


def test_an_attempt_that_was_about_to_begin_has_the_config_of_the_one_before(desk: Desk) -> None:
    folder, first, second = change(desk)
    begin_next(desk, folder)
    desk.store.move_attempt(folder.name, 2, AttemptState.ENDED, "done", **desk.stamp)
    desk.store.add_attempt(folder.name, nonce="22222222", excluded=(), **desk.stamp)  # killed before its folder
    with rebuilt(desk, folder) as store:
        assert [item.config_digest for item in store.attempts(folder.name)] == [first, second, second]
        assert store.run(folder.name).config_digest == second
