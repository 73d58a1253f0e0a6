"""Dimensions of a layout are applied from the inside of a layer outwards."""

from types import SimpleNamespace
from typing import Any

import pytest

from trainer.models import parallelize
from trainer.parallel.apply import (
    context_parallel,
    data_parallel,
    expert_parallel,
    tensor_parallel,
)
from trainer.parallel.apply.fsdp_units import CannotShard
from trainer.parallel.parallel_config import ParallelConfig
from trainer.protocol.config_sections.recipe_config import ExpertsConfig, ModelConfig
from trainer.worker.workload import WorkloadError


def divide(
    monkeypatch: pytest.MonkeyPatch, *, refuses: bool = False, compiles: bool = False, **sizes: Any
) -> list[str]:
    calls: list[str] = []
    for module in (tensor_parallel, context_parallel, expert_parallel):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "apply", lambda model, layout, config, name=name: calls.append(name))
    monkeypatch.setattr(data_parallel, "compile_forward", lambda layer: calls.append("compile_forward"))

    def apply_data_parallel(layers: Any, model: Any, layout: Any, config: Any, policy: Any) -> None:
        assert (layers, policy.cast_forward_inputs) == (model.layers, False)
        calls.append("data_parallel")
        if refuses:
            raise CannotShard("no dimension")

    monkeypatch.setattr(data_parallel, "apply_data_parallel", apply_data_parallel)
    train = SimpleNamespace(compile=compiles, dtype="bfloat16")
    config: Any = SimpleNamespace(parallel=ParallelConfig(**sizes), train=train)
    model: Any = SimpleNamespace(layers=["layer 0", "layer 1"])
    parallelize.shard(model, SimpleNamespace(), config)  # type: ignore[arg-type]
    return calls


@pytest.mark.parametrize(
    ("sizes", "due"),
    [
        ({}, []),
        ({"tp": 2}, ["tensor_parallel"]),
        ({"cp": 2}, ["context_parallel"]),
        ({"tp": 2, "cp": 2, "ep": 2}, ["tensor_parallel", "context_parallel", "expert_parallel"]),
        ({"compiles": True, "ep": 2}, ["expert_parallel", "compile_forward", "compile_forward"]),
    ],
)
def test_a_model_is_divided_in_the_ways_of_its_layout(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], due: list[str]
) -> None:
    assert divide(monkeypatch, **sizes) == [*due, "data_parallel"]


def test_what_cannot_be_sharded_is_an_error_of_the_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkloadError, match="^no dimension$"):
        divide(monkeypatch, refuses=True)


@pytest.mark.parametrize(("tp", "experts", "due"), [(2, 0, ["split", "tie"]), (2, 4, ["split", "tie", "share_tokens"])])
def test_tensor_parallel_ranks_share_the_tokens_of_experts(
    monkeypatch: pytest.MonkeyPatch, tp: int, experts: int, due: list[str]
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(tensor_parallel, "split_matrices", lambda *_, **__: calls.append("split"))
    monkeypatch.setattr(tensor_parallel, "share_tokens", lambda *_: calls.append("share_tokens"))
    config: Any = SimpleNamespace(model=ModelConfig(experts=ExpertsConfig(count=experts)))
    model = SimpleNamespace(tie=lambda: calls.append("tie"))
    tensor_parallel.apply(model, SimpleNamespace(tp=tp), config)  # type: ignore[arg-type]
    assert calls == due
