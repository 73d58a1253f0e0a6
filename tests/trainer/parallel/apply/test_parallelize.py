"""Dividing the built-in model: which ways are taken for a layout, from the inside of a layer to the outside."""

from types import SimpleNamespace
from typing import Any

import pytest

from trainer.models import parallelize
from trainer.parallel.apply.fsdp_units import CannotShard
from trainer.worker.workload import WorkloadError

WAYS = ("tensor_parallel", "share_tokens", "context_parallel", "compile_forward", "expert_parallel")


class Model:
    def __init__(self, calls: list[str]) -> None:
        self.layers = ["layer 0", "layer 1"]
        self.tie = lambda: calls.append("tie")


def divided(monkeypatch: pytest.MonkeyPatch, *, refuses: bool = False, **sizes: Any) -> list[str]:
    """The calls for a layout of these sizes."""
    calls: list[str] = []
    for way in WAYS:
        monkeypatch.setattr(parallelize, way, lambda *what, way=way: calls.append(way))

    def apply_data_parallel(layers: Any, model: Any, layout: Any, config: Any, policy: Any) -> None:
        assert (layers, policy.cast_forward_inputs) == (model.layers, False)
        calls.append("data_parallel")
        if refuses:
            raise CannotShard("no dimension")

    monkeypatch.setattr(parallelize, "apply_data_parallel", apply_data_parallel)
    layout: Any = SimpleNamespace(
        tp=SimpleNamespace(size=lambda: sizes.get("tp", 1)), sizes=SimpleNamespace(cp=sizes.get("cp", 1)),
        expert_mesh=sizes.get("ep"),
    )  # fmt: skip
    config: Any = SimpleNamespace(
        model=SimpleNamespace(experts=SimpleNamespace(count=sizes.get("experts", 0))),
        train=SimpleNamespace(compile=sizes.get("compile", False), dtype="bfloat16"),
    )
    parallelize.shard(Model(calls), layout, config)
    return calls


@pytest.mark.parametrize(
    ("sizes", "due"),
    [
        ({}, []),
        ({"tp": 2}, ["tensor_parallel", "tie"]),
        ({"experts": 4}, []),
        ({"tp": 2, "experts": 4}, ["tensor_parallel", "tie", "share_tokens"]),
        ({"cp": 2}, ["context_parallel"]),
        ({"compile": True}, ["compile_forward", "compile_forward"]),
        ({"ep": "a mesh", "compile": True}, ["compile_forward", "compile_forward", "expert_parallel"]),
    ],
)
def test_a_model_is_divided_in_the_ways_of_its_layout(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], due: list[str]
) -> None:
    assert divided(monkeypatch, **sizes) == [*due, "data_parallel"]


def test_what_cannot_be_sharded_is_an_error_of_the_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkloadError, match="^no dimension$"):
        divided(monkeypatch, refuses=True)
