"""Runs with experts: balanced loads, half precision, peak memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import TINY, Run, merged
from tests.trainer.parallel.apply.layout_table import WITH_EXPERTS
from tests.trainer.worker.memory.test_state_bytes import LARGE
from trainer.costs.model_flops import parameters
from trainer.costs.peak_bytes import peak_bytes
from trainer.protocol.config import JobConfig
from trainer.protocol.plain_data import build

pytestmark = [pytest.mark.multi, pytest.mark.proof]


def loads(run: Run) -> list[dict[str, float]]:
    return [line["experts"] for line in run.metrics().values() if "experts" in line]


def test_balancing_makes_uneven_experts_even(
    undisturbed: Callable[..., Run], record_property: Callable[[str, object], None]
) -> None:

    def most(rate: float) -> list[float]:
        over = {"model": {"experts": {"count": 8, "balance_rate": rate}}, "train": {"steps": 300}}
        return [one["most"] for one in loads(undisturbed(**merged(WITH_EXPERTS["ep 2"].settings, over)))]

    never, moved = most(0.0), most(1e-3)
    record_property("most tokens of an expert beside the mean, without and with balancing", (never, moved))
    assert len(moved) == 6
    assert moved[-1] < 1.5 < never[-1], (never, moved)


@pytest.mark.parametrize("name", ["pp 2", "tp 2, ep 2", "pp 2 x ep 2"])
def test_figures_are_of_the_layers_of_the_whole_model(undisturbed: Callable[..., Run], name: str) -> None:
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


PEAKS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}), "fsdp 2": (2, {}), "ep 2": (2, {"ep": 2}), "fsdp 4, ep 2": (4, {"ep": 2}),
    "zero1 4, ep 2": (4, {"ep": 2, "strategy": "zero1"}),
}  # fmt: skip


@pytest.mark.parametrize("name", PEAKS)
def test_peaks_are_near_the_formula(
    make_run: Callable[..., Run], tmp_path: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    world, parallel = PEAKS[name]
    target = "tests.trainer.worker.memory.profiled_workload:ProfiledWorkload"
    over = {
        "parallel": parallel, "model": {**LARGE, "experts": {"count": 4, "ffn_dim": 1024}},
        "workload": {"target": target, "args": {"folder": str(tmp_path)}},
        "train": {"steps": 6, "dtype": "float32", "batch_size": 4, "seq_len": 8}, "checkpoint": {"every": 0},
    }  # fmt: skip
    run = make_run(world, "peaks", **over)
    assert run.train(patience=300)["codes"] == [0] * world, run.log()
    config = build(JobConfig, merged(TINY, over))
    due = peak_bytes(parameters(config.model), config.parallel, world)
    found = min(json.loads((tmp_path / "peak-0.json").read_text())[1:])
    record_property(f"peak of a step, measured / formula, experts, {name}", found / due)
    assert found == pytest.approx(due, rel=0.03)
