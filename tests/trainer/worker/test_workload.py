"""Workloads that cannot work are refused before anything starts."""

import sys

import pytest
import torch

from trainer.models.built_in import LlamaWorkload
from trainer.models.llama import generator
from trainer.parallel.parallel_config import ParallelConfig
from trainer.protocol.config import JobConfig, WorkloadConfig
from trainer.protocol.config_sections.recipe_config import ClusterShape, ModelConfig, TrainConfig
from trainer.worker import workload
from trainer.worker.workload import BaseWorkload, WorkloadError


def config(target: str, **args) -> JobConfig:
    return JobConfig(workload=WorkloadConfig(target=target, args=args))


def test_the_built_in_model_is_one_workload_among_others():
    assert isinstance(workload.build(JobConfig()), LlamaWorkload)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_colon", "must look like package.module:Class"),
        ("not_there.at_all:Thing", "cannot import not_there.at_all: No module named 'not_there'"),
        ("json:Nothing", r"json \(.*json/__init__.py\) has no class Nothing"),
        ("json:dumps", r"json \(.*\) has no class dumps"),
    ],
)
def test_a_wrong_target_is_named(target, message):
    with pytest.raises(WorkloadError, match=message):
        workload.build(config(target))


def test_arguments_that_the_class_does_not_take_are_named():
    with pytest.raises(WorkloadError, match="the built-in model accepts none, but got depth"):
        workload.build(config("trainer.models.built_in:LlamaWorkload", depth=3))


def test_a_class_that_is_no_workload_says_so(tmp_path, monkeypatch):
    (tmp_path / "no_workload.py").write_text("class X: pass\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(WorkloadError, match=r"X\(\) takes no arguments; X is not a BaseWorkload: write class X\(orch"):
        workload.build(config("no_workload:X"))


def test_a_users_module_comes_after_ours(tmp_path, monkeypatch):
    (tmp_path / "my_own_workload.py").write_text("class Mine:\n    def __init__(self, config, width):\n"
                                                 "        self.width = width\n")  # fmt: skip
    monkeypatch.setattr(sys, "path", list(sys.path))
    made = workload.build(
        JobConfig(workload=WorkloadConfig(target="my_own_workload:Mine", path=(str(tmp_path),), args={"width": 5}))
    )
    assert made.width == 5
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("model", "train", "message"),
    [
        (ModelConfig(heads=4, kv_heads=1), TrainConfig(), "model.kv_heads=1: must be a multiple of parallel.tp=2"),
        (
            ModelConfig(),
            TrainConfig(seq_len=33),
            "train.seq_len=33: must be a multiple of parallel.tp=2: type parallel.tp=1",
        ),
    ],
)
def test_what_tensor_parallelism_cannot_split_is_refused(model, train, message):
    with pytest.raises(WorkloadError, match=message):
        workload.build(
            JobConfig(cluster=ClusterShape(ranks_per_node=2), model=model, train=train, parallel=ParallelConfig(tp=2))
        )


def test_without_data_the_remedy_is_said():
    with pytest.raises(WorkloadError, match="orch data prepare"):
        BaseWorkload(JobConfig()).build_data(layout=None)


def test_initial_weights_depend_on_seed_and_name():
    def first(seed, name):
        return torch.rand(1, generator=generator(seed, name)).item()

    assert first(1, "a") == first(1, "a")
    assert len({first(1, "a"), first(2, "a"), first(1, "b")}) == 3
