"""Pipeline ranks hold exactly the states of the formula, and their peaks match it within 3 %."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.trainer.parallel.pipeline.memory_ranks import job
from tests.trainer.worker import forked_ranks
from tests.warm_programs import WarmPrograms
from trainer.costs.peak_bytes import state_bytes
from trainer.costs.stage_memory import parameters_of_rank, pipeline_peak_bytes
from trainer.parallel.apply.pipeline_stage import with_communication
from trainer.protocol.config import JobConfig

pytestmark = pytest.mark.multi

PROGRAM = "tests.trainer.parallel.pipeline.memory_ranks"

MODEL = {"dim": 256, "layers": 4, "heads": 4, "kv_heads": 4, "ffn_dim": 1024, "vocab_size": 320}
"""Activations are up to half of the peak, so that extra ones exceed the bound."""
LARGE = {**MODEL, "kv_heads": 2, "vocab_size": 4096}
WITH_EXPERTS = {**MODEL, "experts": {"count": 8, "per_token": 2, "ffn_dim": 512}}
EVEN = {**MODEL, "experts": {"count": 4, "per_token": 4, "ffn_dim": 512}}
"""Every token uses all experts, because the formula assumes equal loads."""
UNEVEN = {**MODEL, "dim": 200, "layers": 5, "ffn_dim": 1010}
"""Stages of three and two layers; 1010 rows and those of norms leave shards of different sizes on three ranks."""


def case(
    world: int, stages: int, schedule: str, micro_batches: int, model: Mapping[str, Any] = MODEL, **keys: Any
) -> Any:
    return {
        "cluster": {"ranks_per_node": world},
        "parallel": {"pipeline": {"stages": stages, "schedule": schedule, "micro_batches": micro_batches}, **keys},
        "model": dict(model),
        "train": {"batch_size": 24, "seq_len": 32, "dtype": "float32"},
    }


LAYOUTS: dict[str, Any] = {
    "1f1b": case(2, 2, "1f1b", 4, strategy="ddp"),
    "zbv, fsdp": case(2, 4, "zbv", 4),
    "1f1b, 8 micro-batches": case(2, 2, "1f1b", 8),
    "gpipe": case(2, 2, "gpipe", 4, strategy="ddp"),
    "gpipe, 8 micro-batches": case(2, 2, "gpipe", 8),
    "interleaved": case(2, 4, "interleaved_1f1b", 8, strategy="ddp"),
    "interleaved, zero bubble": case(2, 4, "interleaved_zero_bubble", 8, strategy="ddp"),
    "zbv": case(2, 4, "zbv", 8, strategy="ddp"),
    "1f1b, large vocabulary": case(2, 2, "1f1b", 4, LARGE, strategy="ddp"),
    "interleaved, large vocabulary": case(2, 4, "interleaved_1f1b", 4, LARGE),
    "4 stages": case(4, 4, "1f1b", 8),
    "4 stages, gpipe": case(4, 4, "gpipe", 8, strategy="ddp"),
    "pp 2 x fsdp 2": case(4, 2, "1f1b", 4),
    "pp 2 x zero1 2": case(4, 2, "gpipe", 4, strategy="zero1"),
    "pp 2 x ddp 2": case(4, 2, "1f1b", 4, strategy="ddp"),
    "pp 2 x hsdp 2": case(4, 2, "1f1b", 4, strategy="hsdp", dp_replicate=2),
    "pp 2 x tp 2": case(4, 2, "1f1b", 4, tp=2),
    "zbv x fsdp 2": case(4, 4, "zbv", 4),
    "pp 2 x fsdp 3, uneven": case(6, 2, "1f1b", 4, UNEVEN),
    "1f1b, experts": case(2, 2, "1f1b", 4, WITH_EXPERTS, strategy="ddp"),
    "gpipe, 8 micro-batches, experts": case(2, 2, "gpipe", 8, WITH_EXPERTS),
    "interleaved, experts": case(2, 4, "interleaved_1f1b", 8, WITH_EXPERTS),
    "zbv, experts": case(2, 4, "zbv", 4, WITH_EXPERTS),
    "pp 2 x fsdp 2, experts": case(4, 2, "1f1b", 4, WITH_EXPERTS),
    "pp 2 x ep 2": case(4, 2, "1f1b", 4, EVEN, ep=2),
    "pp 2 x tp 2, experts": case(4, 2, "1f1b", 4, WITH_EXPERTS, tp=2),
    "pp 2 x tp 2, ep 2": case(4, 2, "1f1b", 4, EVEN, tp=2, ep=2),
    "zbv x ep 2": case(4, 4, "zbv", 4, EVEN, ep=2),
    "pp 2 x fsdp 2 x ep 2": case(8, 2, "1f1b", 3, EVEN, ep=2),
}
SAMPLE = ("1f1b",)


@pytest.fixture(scope="module")
def measured(programs: WarmPrograms) -> Callable[[str], list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}

    def get(name: str) -> list[dict[str, Any]]:
        if name not in found:
            world = LAYOUTS[name]["cluster"]["ranks_per_node"]
            (told,) = forked_ranks.found(programs, PROGRAM, world, [LAYOUTS[name]])
            found[name] = [result for (result,) in told]
        return found[name]

    return get


def sampled() -> list[Any]:
    return [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.proof) for name in LAYOUTS]


def due_peak(config: JobConfig, rank: int) -> int:
    pipeline = config.parallel.pipeline
    return pipeline_peak_bytes(config, with_communication(pipeline, pipeline.micro_batches), rank)


@pytest.mark.parametrize("name", sampled())
def test_every_rank_holds_what_the_formula_says(measured: Callable[..., Any], name: str) -> None:
    config = job(LAYOUTS[name])
    for rank, found in enumerate(measured(name)):
        own = parameters_of_rank(config, rank)
        due = state_bytes(own, config.parallel, config.cluster.world_size, rank)
        assert found["held"] == {
            "parameters": due.parameters, "gradients": due.gradients, "optimizer": due.optimizer, "on_host": [],
        }  # fmt: skip


@pytest.mark.parametrize("name", sampled())
def test_peaks_are_within_three_hundredths_of_the_formula(
    measured: Callable[..., Any], name: str, record_property: Callable[[str, object], None]
) -> None:
    config = job(LAYOUTS[name])
    ratios = [found["peak"] / due_peak(config, rank) for rank, found in enumerate(measured(name))]
    record_property("peak of a step, measured / formula, stages", f"{name} {min(ratios):.3f} to {max(ratios):.3f}")
    assert ratios == pytest.approx([1.0] * len(ratios), abs=0.03)


def test_stages_of_all_ranks_are_the_whole_model_once() -> None:
    config = job(case(2, 4, "zbv", 4))
    names = [[one.name for one in parameters_of_rank(config, rank)] for rank in range(2)]
    assert [config.parallel.locate_work(2, rank)[0] for rank in range(2)] == [0, 1]
    assert {"embedding.weight", "norm.weight", "output.weight"} <= set(names[0])  # a V comes back to where it began
    assert not set(names[0]) & set(names[1])
    assert len(names[0]) + len(names[1]) == 3 + 9 * 4
