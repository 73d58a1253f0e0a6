"""The promised range of versions: the lowest ones are installed apart and used; `doctor` has the same table."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from orchestrator.cli.cluster.doctor import NEEDED

ROOT = Path(__file__).resolve().parents[1]
LOWEST = ROOT / ".venv" / "lowest"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FLOORS = {
    match[1].lower(): match[2] for text in PROJECT["dependencies"] if (match := re.match(r"([\w-]+)>=([\d.]+)", text))
}
FOLDERS = [
    "orchestrator/config", "orchestrator/registry", "orchestrator/cli/completion", "orchestrator/cli/runs",
    "orchestrator/cli/terminal", "orchestrator/scheduler/test_script.py", "orchestrator/scheduler/test_sbatch.py",
    "checkpointing/storage",
]  # fmt: skip
"""Tests of what the dependencies are used for."""


def with_lowest(*words: str, seconds: float, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the lowest versions before all others."""
    if not (LOWEST / ".ready").exists():
        pytest.skip("the lowest versions are not installed apart: `make .venv/lowest/.ready` does that, as `make test`")
    paths = os.pathsep.join([str(LOWEST), str(ROOT)])
    return subprocess.run(
        [sys.executable, *words], env={**os.environ, "PYTHONPATH": paths, **environ}, cwd=ROOT, text=True,
        capture_output=True, timeout=seconds, check=False,
    )  # fmt: skip


def pinned(file: Path) -> dict[str, str]:
    return {name.lower(): version for name, version in re.findall(r"^([\w-]+)==(\S+)$", file.read_text(), re.MULTILINE)}


def numbers(version: str) -> list[int]:
    """A version without zeros at its end: 2.0.0 is 2."""
    found = [int(part) for part in version.split(".")]
    while found and not found[-1]:
        found.pop()
    return found


def test_every_floor_has_a_pin_that_is_tested_and_so_has_the_newest_version() -> None:
    lowest, newest = pinned(ROOT / "tests" / "lowest" / "requirements.txt"), pinned(ROOT / "constraints.txt")
    assert FLOORS.keys() == {re.split(r"[<>=]", text)[0].lower() for text in PROJECT["dependencies"]}
    assert {name: numbers(lowest[name]) for name in FLOORS.keys() - {"torch"}} == {
        name: numbers(floor) for name, floor in FLOORS.items() if name != "torch"
    }
    assert FLOORS.keys() <= newest.keys()


def test_doctor_asks_for_the_same_versions() -> None:
    assert {name.lower(): floor for name, floor in NEEDED.items() if floor} == {
        name: FLOORS[name] for name in (each.lower() for each, floor in NEEDED.items() if floor)
    }
    assert {name.lower() for name in NEEDED} <= FLOORS.keys()


SAMPLE = """
import sys
from pathlib import Path
from orchestrator.cli.main import run
from orchestrator.registry.store import Store

folder = sys.argv[1]
Store.open(Path(folder, "state", "registry.db")).close()
for words in (
    ["config", "validate", "demo", "train.steps=7"], ["config", "diff", "demo", "tiny-gpt"], ["status"],
    ["db", "backup", f"{folder}/copy.db"], ["ckpt", "-h"],
):
    print("---")
    assert run(words) == 0, words
"""


def test_a_sample_of_verbs_runs_on_the_lowest_versions(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "ORCH_HOME": str(tmp_path / "state")}
    done = with_lowest("-P", "-W", "ignore", "-c", SAMPLE, str(tmp_path), seconds=120, **home)
    assert done.returncode == 0, done.stderr
    said = done.stdout.split("---\n")[1:]
    for found, answer in zip(said, ("demo: valid", "train.steps", "RUN", "copy.db", "export"), strict=True):
        assert answer in found


@pytest.mark.proof
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.timeout(1200)
def test_the_lowest_versions_pass_the_tests_of_what_they_are_used_for(folder: str) -> None:
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not proof and not slurm and not multi")
    done = with_lowest(*words, f"tests/{folder}", seconds=1150)
    assert done.returncode == 0, done.stdout[-3000:]
