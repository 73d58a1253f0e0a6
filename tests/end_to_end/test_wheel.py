"""A wheel in an empty environment, used from an empty folder."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.end_to_end.user import ONE_NODE, User

ROOT = Path(__file__).resolve().parent.parent.parent


pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]


def build(folder: Path) -> Path:
    """Return a wheel built as by `make wheel`."""
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PIP_CONSTRAINT": ""})
    (wheel,) = folder.glob("orch-*.whl")
    return wheel


def install(folder: Path, wheel: Path, *, whole: bool) -> Path:
    """Return `orch` of a new environment with the wheel; dependencies are installed, or borrowed from this one."""
    venv.create(folder, with_pip=whole)
    python = folder / "bin" / "python"
    words = ["install", "-q", "-c", str(ROOT / "constraints.txt")] if whole else ["install", "-q", "--no-deps"]
    command = [sys.executable, "-m", "pip", f"--python={python}", *words, "--no-compile", str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    if not whole:
        (places,) = (folder / "lib").glob("python*/site-packages")
        places.joinpath("borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "orch"


SMALL_RUN = ("submit", "tiny-gpt", "--wait", *ONE_NODE, "train.steps=2")


@pytest.mark.parametrize(
    ("whole", "words"), [(False, SMALL_RUN), pytest.param(True, ("demo",), marks=pytest.mark.proof)]
)
def test_a_wheel_in_an_empty_environment_trains(tmp_path: Path, whole: bool, words: tuple[str, ...]) -> None:
    orch = install(tmp_path / "venv", build(tmp_path / "dist"), whole=whole)
    empty = tmp_path / "empty"
    empty.mkdir()
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "ORCH_", "VIRTUAL"))}
    user = User(tmp_path, "local")
    environment = {**clean, "ORCH_HOME": user.environment["ORCH_HOME"], "XDG_CONFIG_HOME": str(tmp_path / "config")}
    where = subprocess.run(
        [orch.with_name("python"), "-c", "import orch.runs, orchestrator; print(orchestrator.__file__)"],
        cwd=empty, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert where.stdout.startswith(str(tmp_path / "venv")), "the wheel's own files run, not the checkout's"
    command = [orch, *words, *([] if whole else [f"cluster.root={tmp_path}"])]
    trained = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=240)
    user.leave()
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert ("SUCCEEDED" if whole else "succeeded: step 2 of 2") in trained.stdout + trained.stderr
    assert not list(empty.iterdir())
