"""The traits of each kind of failure fit each other."""

import pytest

from trainer.protocol.failures.outcome import TRAITS, Budget, FailureKind, Losses, NodeBlame


def test_every_kind_has_its_row() -> None:
    assert set(TRAITS) == set(FailureKind)


@pytest.mark.parametrize("kind", FailureKind)
def test_traits_fit_each_other(kind: FailureKind) -> None:
    traits = TRAITS[kind]
    assert not (traits.restarts_in_place and traits.comes_back), "a restart mends it, or it comes back"
    assert not traits.comes_back or traits.budget is Budget.PERSON
    assert not traits.free or traits.asked_to_stop, "only an end that somebody asked for is free"
    assert traits.blame is NodeBlame.NOTHING or traits.budget is not Budget.PERSON
    assert not traits.asked_to_stop or traits.losses in (Losses.NOBODY, Losses.CLUSTER)
