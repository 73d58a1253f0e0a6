"""One stage alone: its stored data, and backward passes in two halves."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer.costs.stage_split import split_model
from trainer.models.pipelined_llama import LlamaStage, stage_module
from trainer.parallel.apply import mesh
from trainer.parallel.apply.pipeline_stage import LocalStage
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.pipeline_config import PipelineConfig
from trainer.protocol.config_sections.recipe_config import ModelConfig, TrainConfig

CPU = torch.device("cpu")
STAGES, SEQUENCES, LENGTH, MICRO_BATCHES = 3, 2, 4, 6
MODEL = ModelConfig(dim=16, layers=3, heads=2, kv_heads=1, ffn_dim=16)


def stage(group: dist.ProcessGroup, number: int, *, half: bool = False) -> LocalStage:
    job = JobConfig(model=MODEL, train=TrainConfig(seq_len=LENGTH, dtype="bfloat16" if half else "float32"))
    part = split_model(PipelineConfig(stages=STAGES), job.model, job.train).parts[number]
    if half:
        module = stage_module(job, part, mesh.build(job.parallel, CPU, 0, 1))
        module.set_initial_weights(3)
    else:
        with torch.device("meta"):
            module = LlamaStage(job.model, job.train, part)
        module.materialize(CPU, 3)
    kind = torch.bfloat16 if half else torch.float32
    output = torch.empty(SEQUENCES, LENGTH, MODEL.dim, device="meta", dtype=kind)
    tokens = torch.empty(SEQUENCES, LENGTH, device="meta", dtype=torch.int64)
    return LocalStage(
        module, number, STAGES, inputs=output if number else tokens, output=output, group=group, device=CPU
    )


def train(made: LocalStage, *, halves: bool) -> list[torch.Tensor]:
    made.gather()
    for number in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(number)
        x, gradient = made.input_buffer(), made.gradient_buffer()
        x.copy_(torch.randn(x.shape, generator=generator) if x.is_floating_point() else torch.full(x.shape, number))
        gradient.copy_(torch.randn(gradient.shape, generator=generator))
        made.forward(number, x)
        if halves:
            made.input_gradient(number, gradient)
        else:
            made.backward(number, gradient)
        assert made.inputs_held == (number + 1 if halves else 0)
    for number in range(MICRO_BATCHES if halves else 0):  # late, as a schedule without bubbles has them
        made.weight_gradient(number)
    assert made.inputs_held == 0
    made.reduce_gradients()
    made.reshard()
    found = []
    for parameter in made.submod.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad)
    return found


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_backward_passes_in_halves_have_the_bits_of_whole_ones(
    group: dist.ProcessGroup, number: int, half: bool
) -> None:
    whole, halves = stage(group, number, half=half), stage(group, number, half=half)
    for found, expected in zip(train(halves, halves=True), train(whole, halves=False), strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)
    assert whole.gradients.keys() == halves.gradients.keys() == set(range(MICRO_BATCHES) if number else ())
    for micro_batch, gradient in whole.gradients.items():
        assert torch.equal(gradient, halves.gradients[micro_batch])


def test_what_an_evaluation_leaves_is_forgotten(group: dist.ProcessGroup) -> None:
    made = stage(group, 1)
    with torch.no_grad():
        out = made.forward(0, torch.ones(SEQUENCES, LENGTH, MODEL.dim))
    assert made.inputs_held == 0
    assert not out.requires_grad
    made.forward(1, torch.ones(SEQUENCES, LENGTH, MODEL.dim))
    made.gradients[1] = torch.ones(1)
    made.input_gradient(1, torch.ones(SEQUENCES, LENGTH, MODEL.dim))
    made.clear()
    assert (made.inputs_held, made.outputs, made.gradients) == (0, {}, {})


def test_parameters_that_are_being_gathered_are_waited_for_once() -> None:
    waited: list[int] = []
    stage: Any = SimpleNamespace(
        _gathers=[SimpleNamespace(wait=lambda number=number: waited.append(number)) for number in range(2)]
    )
    for _ in range(2):
        LocalStage._wait_for_gathers(stage)
    assert waited == [0, 1]


def test_gradients_add_up_from_the_first_backward_pass_on_once_parameters_are_there() -> None:
    calls: list[Any] = []
    names = ("set_is_last_backward", "set_reshard_after_backward", "set_requires_gradient_sync")
    units = SimpleNamespace(**{name: lambda value, name=name: calls.append((name, value)) for name in names})
    stage: Any = SimpleNamespace(
        _units=[units], submod=units, _keeps_gradients=False, _wait_for_gathers=lambda: calls.append("wait")
    )
    for _ in range(2):
        LocalStage._begin_backward(stage)
    assert calls == ["wait", *((name, False) for name in names), "wait"]
