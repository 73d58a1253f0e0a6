"""A wheel in an empty environment, used from an empty folder."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.multi
@pytest.mark.timeout(600)
def test_a_wheel_in_an_empty_environment_runs_the_demo(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, env={**os.environ, "PIP_CONSTRAINT": ""})
    (wheel,) = (tmp_path / "dist").glob("orch-*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)

    empty = tmp_path / "empty"
    empty.mkdir()
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "ORCH_", "VIRTUAL"))}
    environment = {**clean, "ORCH_HOME": str(tmp_path / "home"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    orch = str(tmp_path / "venv" / "bin" / "orch")
    demo = subprocess.run([orch, "demo"], cwd=empty, env=environment, capture_output=True, text=True, timeout=240)
    subprocess.run([orch, "controller", "stop"], cwd=empty, env=environment, capture_output=True, check=False)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "SUCCEEDED" in demo.stdout
    assert not list(empty.iterdir())
