"""User code on a login node: what it may do, and whose error it raises."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing.engine.interchange.importer import TorchTensors
from tests.trainer.models import odd_workloads
from trainer.models.weights_import import ImportPlan, ImportSource, plan_import
from trainer.protocol.config import JobConfig
from trainer.protocol.plain_data import build
from trainer.worker.workload import WorkloadError

WEIGHTS = {"weight": torch.ones(2, 4), "bias": torch.ones(2)}


def plan(target: str, path: tuple[str, ...] = (), **args: Any) -> ImportPlan:
    workload = {"target": target, "args": args, "path": list(path)}
    source = ImportSource(place=Path("weights.pt"), model=TorchTensors(WEIGHTS))
    return plan_import(source, build(JobConfig, {"workload": workload}), weights_only=True)


@pytest.mark.parametrize("name", ["WithData", "ReadsValues"])
def test_tensors_of_its_own_are_no_trouble(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(f"{odd_workloads.__name__}:{name}")
    assert found.complaints == []
    assert {"model/weight", "model/bias"} <= found.tensors.keys()
    assert capsys.readouterr().out == "", "stdout belongs to the command"


@pytest.mark.parametrize(("at", "line", "said"), [
    ("init", 'raise KeyError("no such thing")', "Fails raised KeyError: 'no such thing' at "),
    ("value", 'raise ValueError("bad value")', "Fails cannot be created: bad value at "),
    ("exit", 'sys.exit("not today")', "Fails raised SystemExit: not today at "),
    ("model", "return self.no_such_attribute", "object has no attribute 'no_such_attribute' at "),
])  # fmt: skip
def test_its_errors_are_its_own_with_their_line(at: str, line: str, said: str) -> None:
    source = inspect.getsource(odd_workloads).splitlines()
    number = next(index for index, text in enumerate(source, start=1) if line in text)
    with pytest.raises(WorkloadError) as raised:
        plan(f"{odd_workloads.__name__}:Fails", at=at)
    assert said in str(raised.value)
    assert str(raised.value).endswith(f"{odd_workloads.__file__}:{number}")


@pytest.mark.parametrize(("text", "said"), [
    ("x = 1\nprint(undefined)\n", "raised NameError: name 'undefined' is not defined at {file}:2"),
    ("x = 1\ndef f(:\n", "raised SyntaxError: invalid syntax (MODULE.py, line 2) at {file}:2"),
    ("import no_such_package\n", "cannot import MODULE: No module named 'no_such_package' at {file}:1"),
])  # fmt: skip
def test_a_module_that_does_not_import(tmp_path: Path, text: str, said: str) -> None:
    module = f"broken_{abs(hash(text))}"
    file = tmp_path / f"{module}.py"
    file.write_text(text)
    with pytest.raises(WorkloadError) as raised:
        plan(f"{module}:Mine", (str(tmp_path),))
    assert said.replace("MODULE", module).format(file=file) in str(raised.value)


def test_arguments_that_it_does_not_take_have_no_line() -> None:
    with pytest.raises(WorkloadError, match="cannot be created: .*unexpected keyword argument 'bogus'$"):
        plan(f"{odd_workloads.__name__}:NoArguments", bogus=1)
