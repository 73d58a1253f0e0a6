"""Scripts of a `command:` are refused only if they certainly do not exist."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from orchestrator.config.run_config import ClusterConfig, RunConfig
from orchestrator.errors import ConfigError
from orchestrator.submission import user_code


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "go.sh").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        (("python", "trian.py"), True),
        (("python3.11", "-u", "trian.py", "--lr", "1"), True),
        (("/usr/bin/python", "sub/gone.py"), True),
        (("bash", "gone.sh"), True),
        (("./gone.sh",), True),
        (("python", "train.py", "other.py"), False),
        (("bash", "sub/go.sh"), False),
        (("python", "-m", "gone.py"), False),
        (("python", "-W", "gone.py", "train.py"), False),
        (("sh", "-c", "cd /x && python gone.py"), False),
        (("gone.sh",), False),
        (("torchrun", "gone.py"), True),
        (("python", "$HOME/gone.py"), False),
        (("python", "gone"), False),
    ],
)
def test_only_what_is_certain_is_refused(command: tuple[str, ...], refused: bool) -> None:
    with pytest.raises(ConfigError, match="command: no file ") if refused else nullcontext():
        user_code.check(RunConfig(command=command))


def test_the_tried_and_the_nearest_path_are_reported(here: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        user_code.check(RunConfig(command=("python", "./trian.py", "--name", "a b")))
    assert refused.value.what == f"command: no file {here}/trian.py"
    assert refused.value.hint == "did you mean 'command=[python, ./train.py, --name, \"a b\"]'?"


def test_it_is_looked_for_where_the_command_will_run(here: Path) -> None:
    config = RunConfig(command=("bash", "go.sh"))
    with pytest.raises(ConfigError):
        user_code.check(config)
    user_code.check(config, here / "sub")
    user_code.check(RunConfig(command=("bash", "go.sh"), env={"ORCH_SUBMIT_DIR": str(here / "sub")}))
    user_code.check(RunConfig(command=("bash", "go.sh"), env_from=("ORCH_SUBMIT_DIR",)))


@pytest.mark.parametrize(("template", "refused"), [("default", True), ("apptainer", False), ("./own.sh", False)])
def test_a_container_or_a_script_of_ones_own_may_bring_it(template: str, refused: bool) -> None:
    config = RunConfig(command=("python", "gone.py"), cluster=ClusterConfig(kind="slurm", templates=(template,)))
    with pytest.raises(ConfigError) if refused else nullcontext():
        user_code.check(config)


@pytest.mark.parametrize(
    "text",
    [
        "python train.py | tee -a out.log",
        "source env.sh && python train.py 2>&1 | tee out.log",
        "python train.py |& grep -v warning | tee out.log",
        "python train.py; echo finished",
        "python train.py\necho finished",
    ],
)
def test_a_shell_that_hides_the_failure_of_its_program_is_refused(here: Path, text: str) -> None:
    (here / "run.sh").write_text(f"#!/bin/bash\n{text}\n")
    for command in (("bash", "-c", text), ("bash", "run.sh"), ("bash", "-u", "run.sh")):
        with pytest.raises(ConfigError, match=r"would count as done"):
            user_code.check(RunConfig(name="x", command=command), here)


@pytest.mark.parametrize(
    "text",
    [
        "set -o pipefail; python train.py | tee -a out.log",
        "nvidia-smi | tee gpus.log; python train.py",
        "head=$(scontrol show hostnames | head -n 1)\npython train.py",
        "python show.py | tee seen.log\npython train.py",
        "cat list | python train.py",
        "python train.py '--separator=|' tee",
        "python train.py || exit 3; echo finished",
        "set -e\npython train.py\necho finished",
        "set -euo pipefail\npython train.py | tee a\necho finished",
        "python train.py\ncode=$?\necho finished\nexit $code",
        "echo only words",
    ],
)
def test_a_shell_that_ends_with_the_code_of_its_program_is_taken(here: Path, text: str) -> None:
    (here / "run.sh").write_text(f"#!/bin/bash\n{text}\n")
    for command in (("bash", "-c", text), ("bash", "run.sh")):
        user_code.check(RunConfig(name="x", command=command), here)
    user_code.check(RunConfig(name="x", command=("bash", "-e", "-o", "pipefail", "run.sh")), here)
