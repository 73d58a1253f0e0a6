"""Models with experts in each strategy: equal losses, equal bits after a kill, restores into other layouts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trainer.conftest import Ranks, Run
from tests.trainer.parallel.apply.layout_table import (
    WITH_EXPERTS,
    Layout,
    cases,
    check_killed,
    check_losses,
    check_restored,
    pairs,
)
from trainer.costs.peak_bytes import state_bytes
from trainer.costs.stage_memory import parameters_of_rank
from trainer.protocol.events import EventKind

pytestmark = pytest.mark.multi

SAMPLE = ("fsdp 2 x tp 2, ep 4", "pp 2")
"""Layouts of the fast tests, which share one killed run of each."""
PARTNERS = ("one", "ep 2", "fsdp 2 x ring 2, ep 4", "4 layers, one", "4 layers, ep 2")


@pytest.fixture
def run_of(killed: Callable[[Layout], Run], undisturbed: Callable[..., Run]) -> Callable[[str], Run]:
    def get(name: str) -> Run:
        layout = WITH_EXPERTS[name]
        return killed(layout) if name in SAMPLE else undisturbed(**layout.settings)

    return get


@pytest.mark.proof
@pytest.mark.parametrize("name", cases(WITH_EXPERTS))
def test_losses_are_those_of_one_rank(
    undisturbed: Callable[..., Run], name: str, record_property: Callable[[str, object], None]
) -> None:
    largest = check_losses(undisturbed, WITH_EXPERTS, name)
    record_property("largest relative difference of 20 losses, experts", f"{largest:.1e}")


@pytest.mark.parametrize("name", cases(WITH_EXPERTS, *SAMPLE))
def test_a_killed_rank_changes_no_bit(
    make_run: Callable[..., Run], undisturbed: Callable[..., Run], killed: Callable[[Layout], Run], name: str
) -> None:
    if name in SAMPLE:
        killed(WITH_EXPERTS[name])
        return
    check_killed(make_run, undisturbed, WITH_EXPERTS[name])


@pytest.mark.parametrize(("source", "target"), pairs(WITH_EXPERTS, PARTNERS, (SAMPLE[0], "ep 2")))
def test_every_strategy_restores_into_every_other(
    ranks: Ranks, run_of: Callable[[str], Run], tmp_path: Path, source: str, target: str
) -> None:
    layout = WITH_EXPERTS[target]
    check_restored(ranks, run_of(source), tmp_path, target, layout.short if source in SAMPLE else layout)


@pytest.mark.parametrize("name", [pytest.param("one", marks=pytest.mark.proof), *cases(WITH_EXPERTS, *SAMPLE)])
def test_states_are_what_the_formula_says(run_of: Callable[[str], Run], name: str) -> None:
    layout = WITH_EXPERTS[name].short if name in SAMPLE else WITH_EXPERTS[name]
    event = next(one for one in run_of(name).events() if one.kind == EventKind.GENERATION_FIRST_STEP)
    config = layout.config()
    due = state_bytes(parameters_of_rank(config, 0), config.parallel, layout.world)
    assert event.data["held"] == {
        "parameters": due.parameters, "gradients": due.gradients, "optimizer": due.optimizer,
        "on_host": list(due.on_host),
    }  # fmt: skip


def test_bytes_that_travel_to_experts_are_told_apart(run_of: Callable[[str], Run]) -> None:
    (told,) = [line["bytes"] for line in run_of(SAMPLE[0]).metrics(generation=1).values() if "bytes" in line]
    # One layer, four exchanges: all that a rank sends, or what it receives where that is more.
    sent = 4 * (8 * 16 // 4 * 2) * 32 * 4  # tokens of a rank, each to two experts x width x bytes
    counts = 4 * 8  # for four experts
    assert sent <= told["ep"] - counts <= 2 * sent
    assert told["dp_shard"] > 0
