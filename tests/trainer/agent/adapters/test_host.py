"""Adapters in one program: the highest framework reports and answers, and no error of a hook reaches the program."""

from typing import Any

import pytest

from trainer.agent.adapters.host import ProgramRequests


class Rank:
    """Records the calls that a `ProgramRank` gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *values, **named: self.calls.append((name, *values, *named.values()))


class Agreement:
    """Agrees to every step."""

    def due(self, step: int) -> int:
        return 4

    def leave(self) -> None: ...


@pytest.fixture
def requests() -> ProgramRequests:
    return ProgramRequests(Rank(), lambda rank: Agreement())


def test_a_trainer_reports_and_the_libraries_that_it_uses_do_not(requests: ProgramRequests) -> None:
    trainer, library = requests.make_host("hf", 0), requests.make_host("plain", 5)
    library.answer_requests()
    assert library.due(7) == 4
    trainer.answer_requests()
    assert not library.leads
    assert (library.due(8), trainer.due(8)) == (0, 4)
    library.lead()
    assert trainer.leads


def test_a_save_names_the_adapter_whose_rules_apply(requests: ProgramRequests) -> None:
    requests.make_host("plain", 5).saved(7, "out/model_7.pt")
    assert requests.rank.calls == [("saved", 7, "out/model_7.pt", "plain", False, False)]


def test_an_error_of_a_hook_disables_its_adapter_only(requests: ProgramRequests) -> None:
    host, other = requests.make_host("accelerate", 2), requests.make_host("plain", 5)
    host.answer_requests()
    hook = host.guard(lambda: 1 / 0)
    assert hook() is None
    assert hook() is None
    errors = [call for call in requests.rank.calls if call[0] == "report_error"]
    assert errors == [("report_error", "adapter accelerate: ZeroDivisionError: division by zero")]
    assert (host.due(7), host.leads, other.leads) == (0, False, False)


def test_the_end_after_a_save_is_not_an_error(requests: ProgramRequests) -> None:
    host = requests.make_host("hf", 0)
    with pytest.raises(SystemExit) as end:
        host.guard(host.leave)()
    assert end.value.code == 0
