"""The pipeline's interface, with one stage on one rank."""

import pytest
import torch
import torch.distributed as dist

from trainer.costs.stage_split import split_model
from trainer.models.llama import Llama
from trainer.models.pipelined_llama import LlamaStage, stage
from trainer.parallel.apply.pipeline_runtime import Pipeline
from trainer.parallel.apply.pipeline_stage import Call, LocalStage
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.pipeline_config import PipelineConfig
from trainer.protocol.config_sections.recipe_config import ModelConfig, TrainConfig
from trainer.protocol.rank_progress.progress import Activity, StageActivity

CPU = torch.device("cpu")
JOB = JobConfig(
    model=ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=16), train=TrainConfig(seq_len=8, dtype="float32")
)
SEQUENCES, MICRO_BATCHES = 2, 3


class Broken(Exception):
    """Raised in the midst of a stage."""


class Watch:
    def __init__(self) -> None:
        self.told: list[tuple[str, StageActivity]] = []

    def begin_callback(self, moment: StageActivity) -> Call:
        return lambda: self.told.append(("begin", moment))

    def end_callback(self, moment: StageActivity) -> Call:
        return lambda: self.told.append(("end", moment))


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def pipeline(group: dist.ProcessGroup, watch: Watch) -> Pipeline:
    config = PipelineConfig()
    with torch.device("meta"):
        module = LlamaStage(JOB.model, JOB.train, split_model(config, JOB.model, JOB.train).parts[0])
    module.materialize(CPU, JOB.train.seed)
    return Pipeline(config, [stage(module, JOB.train, group, CPU, sequences=SEQUENCES)], MICRO_BATCHES, [watch])


def batches(count: int = MICRO_BATCHES, sequences: int = SEQUENCES) -> list[torch.Tensor]:
    return [torch.full((sequences, 9), number) for number in range(count)]


def test_three_micro_batches_have_the_loss_and_the_gradients_of_the_loop(pipeline: Pipeline) -> None:
    model = Llama(JOB.model, JOB.train)
    model.materialize(CPU, JOB.train.seed)
    total = torch.zeros(())
    for batch in batches():
        loss = model(batch[:, :-1], batch[:, 1:]) / MICRO_BATCHES
        loss.backward()
        total += loss.detach()
    assert torch.equal(pipeline.step(batches()), total)
    expected = dict(model.named_parameters())
    for name, parameter in pipeline.stages[0].submod.named_parameters():
        assert torch.equal(parameter.grad, expected[name].grad), name
    assert torch.equal(pipeline.evaluate(batches()), total)


def test_another_number_of_micro_batches_is_refused(pipeline: Pipeline) -> None:
    with pytest.raises(ValueError, match=r"^2 micro-batches for a pipeline built for 3$"):
        pipeline.step(batches(2))


def test_micro_batches_of_several_sizes_are_refused_and_not_divided_anew(pipeline: Pipeline) -> None:
    with pytest.raises(ValueError, match=r"^micro-batches of 2 shapes: a pipeline needs a single shape$"):
        pipeline.step([*batches(2, sequences=1), *batches(1, sequences=4)])


def test_an_evaluation_keeps_no_activations_and_no_gradients(pipeline: Pipeline) -> None:
    pipeline.evaluate(batches())
    assert not pipeline.stages[0].outputs
    assert pipeline.stages[0].inputs_held == 0
    assert all(parameter.grad is None for parameter in pipeline.stages[0].submod.parameters())


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_stage_that_raises_stays_in_what_it_did_and_its_error_is_not_wrapped(
    pipeline: Pipeline, watch: Watch, when: str
) -> None:

    def fail(*_: object) -> None:
        raise Broken

    layer = pipeline.stages[0].submod.layers[1]
    if when == "forward":
        layer.register_forward_pre_hook(fail)
    else:
        layer.attention.wq.weight.register_hook(fail)
    with pytest.raises(Broken):
        pipeline.step(batches())
    activity = Activity.FORWARD if when == "forward" else Activity.BACKWARD
    assert watch.told[-1] == ("begin", StageActivity(activity, 0, 0))


def test_an_output_of_another_type_is_not_sent(group: dist.ProcessGroup) -> None:
    activation = torch.empty(2, 4, device="meta", dtype=torch.bfloat16)
    first = LocalStage(torch.nn.Identity(), 0, 2, inputs=activation, output=activation, group=group, device=CPU)
    with pytest.raises(ValueError, match=r"^stage 0: its output is torch.float32 \[2, 4\], but the next stage"):
        first.forward(0, torch.ones(2, 4))
    assert torch.equal(first.forward(0, torch.ones(2, 4).bfloat16()), torch.ones(2, 4).bfloat16())


def test_a_profiler_sees_each_action_by_its_name(pipeline: Pipeline) -> None:
    with torch.autograd.profiler.profile(use_kineto=False) as found:
        pipeline.step(batches())
    names = {event.name for event in found.function_events}
    assert {f"PP:0F{number}" for number in range(MICRO_BATCHES)} <= names
