"""One table says what is true of each kind of failure, and the documentation says the same."""

import re
from pathlib import Path

import pytest

from trainer.protocol.failures.outcome import TRAITS, Budget, FailureKind, Losses, NodeBlame

DOCS = Path(__file__).parents[4] / "docs" / "failures.md"
COUNTED = {"in tries": Budget.TRIES, "in time": Budget.TIME, "-": Budget.PERSON, "not at all": Budget.NOTHING}


def documented() -> dict[str, str]:
    """What the page says of how each kind is counted."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", DOCS.read_text(), re.MULTILINE)
    return dict(rows)


def test_every_kind_has_its_row() -> None:
    assert set(TRAITS) == set(FailureKind)


@pytest.mark.parametrize("kind", FailureKind)
def test_the_page_says_how_a_kind_is_counted(kind: FailureKind) -> None:
    said = documented()[kind]
    (budget,) = {budget for words, budget in COUNTED.items() if said.startswith(words)}
    assert TRAITS[kind].budget is budget, said


@pytest.mark.parametrize("kind", FailureKind)
def test_traits_fit_each_other(kind: FailureKind) -> None:
    traits = TRAITS[kind]
    assert not (traits.restarts_in_place and traits.comes_back), "a restart mends it, or it comes back"
    assert not traits.comes_back or traits.budget is Budget.PERSON
    assert not traits.free or traits.asked_to_stop, "only an end that somebody asked for is free"
    assert traits.blame is NodeBlame.NOTHING or traits.budget is not Budget.PERSON
    assert not traits.asked_to_stop or traits.losses in (Losses.NOBODY, Losses.CLUSTER)
