"""A DataLoader opened late by a restart is reported if it shifts the random numbers of training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from tests.trainer.worker.my_workload import Plane, Points
from tests.trainer.worker.train_loop.one_rank import OneRank
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.rank_progress.progress import StopReason
from trainer.worker.data import REASON, LoaderDraws

NUMBERS = torch.arange(8)
OPENED: dict[str, Callable[[], Any]] = {
    "DataLoader": lambda: next(iter(DataLoader(NUMBERS))),
    "DataLoader that shuffles": lambda: next(iter(DataLoader(NUMBERS, shuffle=True))),
    "two": lambda: [next(iter(DataLoader(NUMBERS))) for _ in range(2)],
}
OTHERWISE: dict[str, Callable[[], Any]] = {
    "nothing": lambda: NUMBERS,
    "a generator of its own": lambda: next(iter(DataLoader(NUMBERS, generator=torch.Generator()))),
    "a sampler of its own": lambda: list(RandomSampler(NUMBERS, generator=torch.Generator())),
    "augmentation": lambda: torch.rand(3),
    "a noisy sample": lambda: torch.randn(20),
    "an index": lambda: torch.randint(8, (1,)),
}


def reason(*takes: Callable[[], Any], passes: Callable[[], Any] = lambda: torch.rand(1), restored: int = 5) -> str:
    draws, found = LoaderDraws(restored=restored), []
    for take in [*takes, OTHERWISE["nothing"], OPENED["DataLoader"], OTHERWISE["nothing"]]:
        draws.take(take)
        passes()
        found.append(draws.reason())
    assert [one for number, one in enumerate(found) if number != 1] == [""] * (len(found) - 1)
    return found[1]


@pytest.mark.parametrize("name", OPENED)
def test_a_loader_that_was_opened_is_seen(name: str) -> None:
    assert reason(OPENED[name]) == REASON


@pytest.mark.parametrize("name", OTHERWISE)
def test_other_draws_are_none_of_a_loader(name: str) -> None:
    assert reason(OTHERWISE[name]) == ""


def test_nothing_is_reported_where_the_training_draws_no_numbers() -> None:
    assert reason(OPENED["DataLoader"], passes=lambda: None) == ""


@pytest.mark.parametrize("name", [*OPENED, "augmentation"])
def test_data_that_draws_in_every_step_is_as_in_an_undisturbed_run(name: str) -> None:
    assert reason(OPENED["DataLoader"], {**OPENED, **OTHERWISE}[name]) == ""


def test_nothing_is_reported_in_a_run_that_begins() -> None:
    assert reason(OPENED["DataLoader"], restored=0) == ""


class OpensLate(Points):
    loader: Any = None

    def take(self) -> Any:
        if self.loader is None:
            self.loader = iter(DataLoader(torch.arange(100)))
        next(self.loader)
        return super().take()


class Loaded(Plane):
    def build_data(self, layout: Any) -> Any:
        self.data = OpensLate(layout.dp_rank, layout.dp_size)
        return self.data


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_run_reports_it_in_its_first_step_after_a_restart(one_rank: Callable[..., OneRank], is_closed: bool) -> None:
    run = one_rank(workload={"target": f"{__name__}:Loaded", "args": {"width": 8}})
    run.cell.ask_stop(StopReason.PREEMPTION)
    assert run.train() == ExitCode.STOPPED_AFTER_SAVE
    assert run.events("checkpoint.incomplete") == []
    stopped = run.state.step
    run.restart()
    if is_closed:
        run.session.objects.workload.data.loader = None
    assert run.train() == ExitCode.FINISHED
    found = [(event.data["step"], event.data["reason"]) for event in run.events("checkpoint.incomplete")]
    assert found == ([(stopped, REASON)] if is_closed else [])
