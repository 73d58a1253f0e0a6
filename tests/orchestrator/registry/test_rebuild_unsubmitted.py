"""A registry made anew, and a run that was never handed to Slurm: it can be cancelled without Slurm's answer."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller.ownership import never_submitted
from orchestrator.registry.run_record import write_records
from orchestrator.registry.store import Store
from orchestrator.registry_rebuild.rebuild import rebuild
from orchestrator.states import RunState
from tests.orchestrator.registry.test_rebuild import begin, lose
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.run_dir import AttemptDir

Desk = Any


def test_a_run_that_was_never_submitted_is_known_to_be_that(desk: Desk) -> None:
    folder = begin(desk)
    write_records(desk.store, [folder.name])
    lose(desk)
    rebuild(desk.path, [desk.root], now=50.0)
    with Store.open(desk.path) as store:
        assert store.run(folder.name).state is RunState.CREATED
        assert never_submitted(store.attempts(folder.name))


def submitted(place: AttemptDir) -> Path:
    return place.submission / "submission.sh"


def started(place: AttemptDir) -> Path:
    return place.logs / "agent-0000.log"


@pytest.mark.parametrize("file", [submitted, started])
def test_a_record_that_missed_the_submission_is_not_believed(desk: Desk, file: Any) -> None:
    folder = begin(desk)
    write_records(desk.store, [folder.name])
    file(folder.attempt(1)).write_text("")
    lose(desk)
    rebuild(desk.path, [desk.root], now=50.0)
    with Store.open(desk.path) as store:
        assert not never_submitted(store.attempts(folder.name))


def test_a_job_that_was_let_go_is_enough(desk: Desk) -> None:
    folder = begin(desk)
    write_records(desk.store, [folder.name])
    LaunchToken(attempt=1, epoch=1, job_id="7", nonce="00000000").write(folder.attempt(1).go)
    lose(desk)
    rebuild(desk.path, [desk.root], now=50.0)
    with Store.open(desk.path) as store:
        assert not never_submitted(store.attempts(folder.name))
