"""Inspection of a workload before its run exists: imports, unsupported settings, failures."""

import io
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from trainer.parallel.data import FsdpConfig
from trainer.parallel.parallel_config import ParallelConfig
from trainer.protocol.config import JobConfig, WorkloadConfig
from trainer.protocol.config_sections.pipeline_config import PipelineConfig
from trainer.worker.startup import inspect_workload

WORKLOAD = """
import torch
from torch import nn
import orch
from inspected_part import Block

class Mine(orch.BaseWorkload):
    def build_model(self):
        return nn.Sequential(Block(), Block())

class Needy(Mine):
    def build_model(self):
        return nn.Linear(int(torch.ones(1).item()), 1)

class Strict(Mine):
    def __init__(self, config, *, size):
        super().__init__(config)

class Planned(Mine):
    def parallelize(self, model, layout):
        return model
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "inspected.py").write_text(WORKLOAD)
    (tmp_path / "inspected_part.py").write_text(
        "from torch import nn\nclass Block(nn.Linear):\n    def __init__(self):\n        super().__init__(2, 2)\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("inspected", "inspected_part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def inspected(
    folder: Path, monkeypatch: pytest.MonkeyPatch, target: str = "inspected:Mine", *,
    args: dict[str, Any] | None = None, **parallel: Any,
) -> dict[str, Any]:  # fmt: skip
    workload = WorkloadConfig(target=target, path=(str(folder),), args=args or {})
    config = JobConfig(workload=workload, parallel=ParallelConfig(**parallel))
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asdict(config))))
    ours, theirs = os.pipe()
    inspect_workload.main([str(theirs)])
    with os.fdopen(ours) as answer:
        return {key: value for line in answer for key, value in json.loads(line).items()}


def test_its_modules_are_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = inspected(folder, monkeypatch)
    assert set(found["code"]["files"]) == {"inspected", "inspected_part"}
    assert (found["refused"], found["done"]) == ([], True)


@pytest.mark.parametrize(
    ("target", "args", "words"),
    [
        ("inspected:Strict", {}, "workload.args do not fit Strict: missing a required argument: 'size'"),
        ("inspected:Strict", {"size": 1, "odd": 2}, "got an unexpected keyword argument 'odd'"),
        ("inspected:Strict", {"size": 1}, ""),
        ("hf", {}, "workload.args do not fit HfWorkload: missing a required argument: 'name_or_path'"),
        ("hf", {"name_or_path": "x", "task": "chat"}, "workload.args.task=chat: must be one of causal-lm, "),
        ("hf", {"name_or_path": "/only/on/nodes"}, ""),
    ],
)
def test_arguments_that_the_class_does_not_take_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, target: str, args: dict[str, Any], words: str
) -> None:
    found = inspected(folder, monkeypatch, target, args=args)["refused"]
    assert bool(found) == bool(words)
    assert words in " ".join(found)


@pytest.mark.parametrize(
    ("parallel", "name"),
    [
        ({"tp": 2}, "tp"), ({"cp": 2}, "cp"), ({"ep": 2}, "ep"),
        ({"pipeline": PipelineConfig(stages=2)}, "pipeline.stages"),
    ],
)  # fmt: skip
def test_a_layout_that_needs_a_method_of_its_own_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any], name: str
) -> None:
    (what, remedy) = inspected(folder, monkeypatch, **parallel)["refused"]
    assert what == f"parallel.{name}=2, but Mine does not override `parallelize`"
    assert remedy == f"write one, or set parallel.{name}=1"
    for name in ("inspected", "inspected_part"):
        monkeypatch.delitem(sys.modules, name)
    assert inspected(folder, monkeypatch, "inspected:Planned", **parallel)["refused"] == []


@pytest.mark.parametrize(
    ("target", "wrap", "refused"),
    [
        ("Mine", "Block", False),
        ("Mine", "Nope", True),
        ("Mine", "TransformerEncoderLayer", True),
        ("Needy", "Nope", False),  # its model needs real tensors: the job finds out
        ("Mine", "1000", False),
    ],
)
def test_a_class_that_the_model_does_not_have_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, target: str, wrap: str, refused: bool
) -> None:
    found = inspected(folder, monkeypatch, f"inspected:{target}", fsdp=FsdpConfig(wrap=wrap))["refused"]
    assert bool(found) == refused
    if refused:
        assert found[0].startswith(f"parallel.fsdp.wrap: the model has no module of class {wrap}, only Block")


@pytest.mark.parametrize(
    ("text", "words", "is_import"),
    [
        ("import no_such_module_here\n", "No module named 'no_such_module_here'", True),
        ("def broken(:\n", "invalid syntax", True),
        ("raise RuntimeError('no GPU here')\n", "raised RuntimeError: no GPU here", False),
        ("import sys\nsys.exit(3)\n", "raised SystemExit: 3", False),
    ],
)
def test_a_failed_import_is_told_with_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str, is_import: bool
) -> None:
    (folder / "inspected_part.py").write_text(text)
    found = inspected(folder, monkeypatch)
    assert words in found["failed"]
    assert "inspected_part.py:" in found["failed"]
    assert (found["is_import"], found["done"]) == (is_import, True)
