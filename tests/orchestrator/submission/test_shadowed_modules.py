"""Shadowed modules of a workload: refused for the workload itself, a warning for others."""

from pathlib import Path

import pytest

from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError
from orchestrator.submission.user_code import check, shadowed_helpers
from trainer.protocol.config import WorkloadConfig

WORKLOAD = "import orch\n{}\nclass Mine(orch.BaseWorkload):\n    build_model = loss = None\n"


def config(target: str, folder: Path) -> RunConfig:
    return RunConfig(workload=WorkloadConfig(target=f"{target}:Mine", path=(str(folder),)))


@pytest.mark.parametrize("name", ["sched", "time", "queue", "yaml"])  # in a file, built in, and installed
@pytest.mark.parametrize("package", [False, True])
def test_a_workload_with_the_name_of_another_module_is_refused(tmp_path: Path, name: str, package: bool) -> None:
    own = tmp_path / (f"{name}/__init__.py" if package else f"{name}.py")
    own.parent.mkdir(exist_ok=True)
    own.write_text(WORKLOAD.format(""))
    with pytest.raises(ConfigError, match=f"as {name}, which comes before {own}") as caught:
        check(config(name, tmp_path))
    assert caught.value.hint.startswith(f"rename it, for example to my_{name}")


def test_a_name_of_ones_own_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_shadowed.py").write_text(WORKLOAD.format("import helper_shadowed, json"))
    (tmp_path / "helper_shadowed.py").write_text("")
    check(config("mine_shadowed", tmp_path))
    assert shadowed_helpers(config("mine_shadowed", tmp_path)) == []
    monkeypatch.syspath_prepend(str(tmp_path))  # an editable install of the same folder
    check(config("mine_shadowed", tmp_path))


def test_a_helper_that_is_found_elsewhere_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "mine_shadowed.py").write_text(WORKLOAD.format("import queue, statistics"))
    for name in ("queue", "profile"):  # nothing imports the second one
        (tmp_path / f"{name}.py").write_text("")
    (warning,) = shadowed_helpers(config("mine_shadowed", tmp_path))
    assert warning.startswith("the job imports ")
    assert warning.endswith(f"queue.py as queue, not {tmp_path / 'queue.py'}")
