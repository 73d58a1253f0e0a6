"""Runs whose configuration a person has changed, after `orch db rebuild`: every attempt has its own again."""

from typing import Any

import pytest

from orchestrator.recovery.elastic_policy import choose_smaller_world
from orchestrator.registry.store import Store
from orchestrator.registry_rebuild.rebuild import rebuild
from orchestrator.run_dirs.run_folder import ensure_attempt_dir
from orchestrator.states import AttemptState, RunState
from tests.orchestrator.registry.test_rebuild import CONFIG, begin, lose
from trainer.protocol.run_dir import RunDir

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
        assert "a change to its configuration is lost" in run.reason


def test_an_attempt_that_was_about_to_begin_has_the_config_of_the_one_before(desk: Desk) -> None:
    folder, first, second = change(desk)
    begin_next(desk, folder)
    desk.store.move_attempt(folder.name, 2, AttemptState.ENDED, "done", **desk.stamp)
    desk.store.add_attempt(folder.name, nonce="22222222", excluded=(), **desk.stamp)  # killed before its folder
    with rebuilt(desk, folder) as store:
        assert [item.config_digest for item in store.attempts(folder.name)] == [first, second, second]
        assert store.run(folder.name).config_digest == second


SMALLER = {**LONGER, "cluster": {"nodes": 3}}


def begin_smaller(desk: Desk, folder: RunDir) -> str:
    """The run's next attempt on three of its four nodes; the digest of its config."""
    base, digest = desk.store.run(folder.name).config_digest, desk.store.put_config(SMALLER)
    world = choose_smaller_world({"nodes": 3}, {"nodes": 4}, base, "1 node was missing for 1h01m")
    attempt = desk.store.add_attempt(
        folder.name, nonce="11111111", excluded=(), config_digest=digest, smaller_world=world, **desk.stamp
    )
    ensure_attempt_dir(folder, attempt, SMALLER, LONGER)
    return str(digest)


@pytest.mark.parametrize("recorded", [True, False])
def test_the_config_of_a_smaller_attempt_is_not_taken_for_that_of_its_run(desk: Desk, recorded: bool) -> None:
    folder, first, second = change(desk)
    smaller = begin_smaller(desk, folder)
    with rebuilt(desk, folder, recorded=recorded) as store:
        assert store.run(folder.name).config_digest == second
        assert store.config(second) == LONGER
        assert [item.config_digest for item in store.attempts(folder.name)] == [first, smaller]
        assert [item.base_digest for item in store.attempts(folder.name)] == [first, second]
        (_, attempt) = store.attempts(folder.name)
        assert attempt.smaller_world is not None
        known = "1 node was missing for 1h01m" if recorded else "nodes were missing when it was begun"
        assert (attempt.smaller_world["nodes"], attempt.smaller_world["reason"]) == (3, known)


def test_what_was_about_to_follow_a_smaller_attempt_is_a_full_one(desk: Desk) -> None:
    folder, first, second = change(desk)
    smaller = begin_smaller(desk, folder)
    desk.store.move_attempt(folder.name, 2, AttemptState.ENDED, "done", **desk.stamp)
    desk.store.add_attempt(folder.name, nonce="22222222", excluded=(), **desk.stamp)  # killed before its folder
    with rebuilt(desk, folder) as store:
        assert [item.config_digest for item in store.attempts(folder.name)] == [first, smaller, second]
        assert store.attempts(folder.name)[2].smaller_world is None


def test_an_attempt_that_is_given_another_config_is_no_smaller_one_any_more(desk: Desk) -> None:
    folder, _, second = change(desk)
    begin_smaller(desk, folder)
    desk.store.note_attempt(folder.name, 2, epoch=desk.stamp["epoch"], config_digest=second, smaller_world=None)
    ensure_attempt_dir(folder, desk.store.attempt(folder.name, 2), LONGER)
    with rebuilt(desk, folder) as store:
        assert store.attempts(folder.name)[1].config_digest == second
        assert store.attempts(folder.name)[1].smaller_world is None
