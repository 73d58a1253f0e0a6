"""Each strategy trains like one rank, survives a kill bit for bit, and restores into the others."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.conftest import Ranks, Run
from tests.trainer.parallel.apply.layout_table import DENSE, cases, check_killed, check_losses, check_restored, pairs

pytestmark = [pytest.mark.multi, pytest.mark.proof]
"""test_expert_strategies.py has a sample for the fast tests."""

PARTNERS = ("one", "fsdp 2 x tp 2", "pp 2 x cp 2")
SAME_ARITHMETIC = ("zero3 4", "zero2 4", "fsdp 4, optimizer on the host", "fsdp 4, all on the host")
"""With one micro-batch per step, gathering and offloading change no sum; the same is true of zero1."""


@pytest.mark.parametrize("name", cases(DENSE))
def test_losses_are_those_of_one_rank(
    undisturbed: Callable[..., Run], name: str, record_property: Callable[[str, object], None]
) -> None:
    largest = check_losses(undisturbed, DENSE, name)
    record_property("largest relative difference of 20 losses", f"{largest:.1e}")


@pytest.mark.parametrize("name", ["zero1 4", *SAME_ARITHMETIC[1:]])
def test_the_same_arithmetic_gives_the_same_bits(undisturbed: Callable[..., Run], name: str) -> None:
    one, other = (undisturbed(**DENSE[each].settings) for each in (SAME_ARITHMETIC[0], name))
    assert other.losses() == one.losses()
    assert other.final()["weights_digest"] == one.final()["weights_digest"]


@pytest.mark.parametrize("name", cases(DENSE))
def test_a_killed_rank_changes_no_bit(make_run: Callable[..., Run], undisturbed: Callable[..., Run], name: str) -> None:
    check_killed(make_run, undisturbed, DENSE[name])


@pytest.mark.parametrize(("source", "target"), pairs(DENSE, PARTNERS))
def test_every_strategy_restores_into_every_other(
    ranks: Ranks, undisturbed: Callable[..., Run], tmp_path: Path, source: str, target: str
) -> None:
    check_restored(ranks, undisturbed(**DENSE[source].settings), tmp_path, target, DENSE[target])
