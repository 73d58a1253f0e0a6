"""Runs with experts: loads that become even, half precision."""

from collections.abc import Callable

import pytest

from tests.trainer.conftest import Run, merged
from tests.trainer.parallel.apply.layout_table import WITH_EXPERTS

pytestmark = [pytest.mark.multi, pytest.mark.proof]


def loads(run: Run) -> list[dict[str, float]]:
    return [line["experts"] for line in run.metrics().values() if "experts" in line]


def test_balancing_makes_uneven_experts_even(
    undisturbed: Callable[..., Run], record_property: Callable[[str, object], None]
) -> None:
    """A bias that never moves beside one that does, with the same weights and data at the beginning."""

    def most(rate: float) -> list[float]:
        over = {"model": {"experts": {"count": 8, "balance_rate": rate}}, "train": {"steps": 150}}
        return [one["most"] for one in loads(undisturbed(**merged(WITH_EXPERTS["ep 2"].settings, over)))]

    never, moved = most(0.0), most(1e-3)
    record_property("most tokens of an expert beside the mean, without and with balancing", (never, moved))
    assert len(moved) == 3
    assert moved[-1] < 1.5 < never[-1]


@pytest.mark.parametrize("name", ["pp 2", "tp 2, ep 2", "pp 2 x ep 2"])
def test_figures_are_of_the_layers_of_the_whole_model(undisturbed: Callable[..., Run], name: str) -> None:
    """Of tokens that are counted once, in whichever stage and on whichever rank."""
    whole, shared = (
        loads(undisturbed(**merged(WITH_EXPERTS[each].settings, {"train": {"steps": 50}}))) for each in ("one", name)
    )
    assert len(whole) == 1
    assert shared == [pytest.approx(whole[0], abs=0.02)]
    assert {key: shared[0][key] for key in ("layer", "expert")} == {key: whole[0][key] for key in ("layer", "expert")}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(undisturbed: Callable[..., Run], dtype: str) -> None:
    def losses(kind: str) -> dict[int, float]:
        over = {"train": {"steps": 8, "dtype": kind, "micro_batch_size": 2, "activation_checkpointing": True}}
        return undisturbed(**merged(WITH_EXPERTS["ep 2"].settings, over)).losses()

    full, half = losses("float32"), losses(dtype)
    assert half == pytest.approx(full, rel=2e-2)
    assert half != full
