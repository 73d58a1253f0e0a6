"""A parallel dimension is one file and its rows: without context parallelism everything else works."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("orch", "orchestrator", "trainer", "checkpointing", "configs", "sbatch_templates", "tests")
FILES = ("context.py", "apply/context_parallel.py")
"""Files of the dimension, without and with torch."""
TESTS = (
    "tests/trainer/parallel/apply/test_mesh.py::test_one_rank_has_a_group_for_every_dimension",
    "tests/trainer/costs/test_state_bytes.py",
    "tests/orchestrator/config/test_restore_layouts.py",
)
MORE_TESTS = (
    "tests/trainer/parallel/pipeline",
    "tests/trainer/parallel/apply/test_expert_strategies.py",
    "tests/trainer/parallel/apply/test_layouts.py",
    "tests/trainer/worker/train_loop",
    "tests/trainer/agent/watch",
    "tests/orchestrator/submission",
)
USE = re.compile(r"\bcp\b|CpMethod|context_parallel|CONTEXT\b|[Ss]equence_part|locate_work|Dimensions\(")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tree without context parallelism."""
    copy = tmp_path_factory.mktemp("without-cp")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, copy)
    for name in FILES:
        (copy / "trainer" / "parallel" / name).unlink()
    table = copy / "trainer" / "parallel" / "parallel_config.py"
    rows = [line for line in table.read_text().splitlines() if not re.search(r"CONTEXT|ContextSection", line)]
    table.write_text("\n".join(rows) + "\n")
    return copy


def run(tree: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_nothing_else_names_its_types(tree: Path) -> None:
    program = """
import importlib, pathlib
for path in sorted(pathlib.Path().glob("trainer/**/*.py")) + sorted(pathlib.Path().glob("orchestrator/**/*.py")):
    name = ".".join(path.with_suffix("").parts)
    if not name.endswith(("__main__", "migrations.env")) and ".versions." not in name:
        importlib.import_module(name)
from trainer.parallel.layout import refusal
from trainer.protocol.config import JobConfig
from trainer.protocol.plain_data import build
over = {"parallel": {"tp": 2, "pipeline": {"stages": 2}}, "cluster": {"ranks_per_node": 4}}
assert refusal(build(JobConfig, over)) is None
assert "cp" not in build(JobConfig, over).parallel.mesh_sizes(4)
"""
    run(tree, "-W", "ignore", "-c", program)


@pytest.mark.parametrize("tests", [TESTS, pytest.param(MORE_TESTS, marks=pytest.mark.proof)], ids=["some", "more"])
def test_what_does_not_name_it_passes(tree: Path, tests: tuple[str, ...]) -> None:
    unrelated = [
        str(path.relative_to(tree)) + selected
        for name, _, case in (test.partition("::") for test in tests)
        for path in (sorted((tree / name).rglob("test_*.py")) if (tree / name).is_dir() else [tree / name])
        for selected in [f"::{case}" if case else ""]
        if case or not USE.search(path.read_text())
    ]
    assert unrelated
    assert " passed" in run(
        tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "not proof", *unrelated
    )
