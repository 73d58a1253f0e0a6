"""Modules of PYTHONPATH that have the name of one of orch's packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.config.compose import compose
from orchestrator.errors import ConfigError
from orchestrator.submission import user_code

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "from orchestrator.cli.entry import main; main()"
CONTROLLER = "import orchestrator.controller.service, checkpointing, trainer; print(trainer.__path__[0])"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of somebody who calls his modules what orch calls its packages."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("trainer", "checkpointing"):
        (folder / f"{name}.py").write_text("x = 1\n")
    return folder


@pytest.mark.parametrize(("code", "printed"), [(PROGRAM, "registry.db"), (CONTROLLER, str(ROOT / "trainer"))])
def test_orch_finds_its_own_packages_whatever_pythonpath_has(
    folder: Path, tmp_path: Path, code: str, printed: str
) -> None:
    environ = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "ORCH_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "db", "path"], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


def test_a_job_is_not_given_a_pythonpath_that_hides_them(folder: Path) -> None:
    """The shell's own does not reach a job; one of the configuration does."""
    config = compose("tiny-gpt", [f"+env.PYTHONPATH=/other:{folder}"]).config
    with pytest.raises(ConfigError, match=f"{folder / 'trainer.py'} has the name of one of orch's own") as refused:
        user_code.check(config)
    assert refused.value.where == "env.PYTHONPATH"
    assert f"without {folder}" in refused.value.hint


def test_a_job_is_not_given_such_a_pythonpath_of_the_shell(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    user_code.check(compose("tiny-gpt", []).config)
    with pytest.raises(ConfigError, match=r"trainer\.py"):
        user_code.check(compose("tiny-gpt", ["env_from=[PYTHONPATH]"]).config)
