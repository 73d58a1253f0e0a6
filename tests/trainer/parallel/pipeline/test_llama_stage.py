"""Stages together have the names and values of the whole model's parameters."""

import pytest
import torch

from trainer.costs.stage_split import split_model
from trainer.models.llama import Llama
from trainer.models.pipelined_llama import LlamaStage, StagesOfRank
from trainer.parallel.apply.fsdp_units import chosen_units
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.pipeline_config import PipelineConfig
from trainer.protocol.config_sections.recipe_config import ModelConfig, TrainConfig

CPU = torch.device("cpu")
JOB = JobConfig(
    model=ModelConfig(dim=32, layers=5, heads=4, kv_heads=2, ffn_dim=64),
    train=TrainConfig(seed=3, seq_len=8, dtype="float32"),
)


def stages(count: int) -> list[LlamaStage]:
    made = []
    for part in split_model(PipelineConfig(stages=count), JOB.model, JOB.train).parts:
        with torch.device("meta"):
            made.append(LlamaStage(JOB.model, JOB.train, part))
        made[-1].materialize(CPU, JOB.train.seed)
    return made


@pytest.fixture(scope="module")
def whole() -> Llama:
    model = Llama(JOB.model, JOB.train)
    model.materialize(CPU, JOB.train.seed)
    return model


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_each_parameter_is_in_one_stage_under_its_name_and_with_its_value(whole: Llama, count: int) -> None:
    found = [pair for stage in stages(count) for pair in stage.named_parameters()]
    expected = dict(whole.named_parameters())
    assert sorted(name for name, _ in found) == sorted(expected)
    assert all(torch.equal(value, expected[name]) for name, value in found)


def test_only_the_first_has_the_embedding_and_only_the_last_norm_and_output() -> None:
    rest = [{name.split(".")[0] for name, _ in stage.named_parameters()} - {"layers"} for stage in stages(3)]
    assert rest == [{"embedding"}, set(), {"norm", "output"}]


def test_one_after_the_other_they_compute_what_the_whole_model_does(whole: Llama) -> None:
    tokens = torch.arange(18).reshape(2, 9)
    x = tokens[:, :-1]
    for stage in stages(3):
        x = stage(x, targets=tokens[:, 1:])
    assert torch.equal(x, whole(tokens[:, :-1], tokens[:, 1:]))


def test_the_last_stage_without_targets_gives_logits(whole: Llama) -> None:
    x = torch.arange(8).reshape(1, 8)
    for stage in stages(2):
        x = stage(x)
    assert torch.equal(x, whole(torch.arange(8).reshape(1, 8)))


def test_layers_can_be_wrapped_by_class_and_by_size() -> None:
    stage = stages(2)[1]
    assert chosen_units(stage, "Block", []) == list(stage.layers)
    assert chosen_units(stage, "9000", []) == [*stage.layers, stage.output]


def test_the_stages_of_a_rank_are_one_module_with_the_names_of_the_whole_model(whole: Llama) -> None:
    made = stages(4)
    model = StagesOfRank([made[0], made[3]])
    expected = {"embedding.weight", "norm.weight", "output.weight"}
    expected |= {
        name for name, _ in whole.named_parameters() if name.startswith(("layers.0.", "layers.1.", "layers.4."))
    }
    assert {name for name, _ in model.named_parameters()} == expected
    assert model.layers[0] is made[0].layers[0]
    own = {id(parameter) for stage in (made[0], made[3]) for parameter in stage.parameters()}
    assert {id(parameter) for parameter in model.parameters()} == own
