"""The lines that each test runs, recorded once per test file until code that it runs changes."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coverage import CoverageData
from coverage.exceptions import DataError

from tests.mutants.areas import AREAS, ROOT, sources, test_files

TREE = (
    "orch", "orchestrator", "trainer", "checkpointing", "tests", "benchmarks", "configs", "sbatch_templates",
    "examples",
)  # fmt: skip
FAST = "not slurm and not proof"


@dataclass(frozen=True)
class TestRun:
    """A test in the recorded run."""

    seconds: float
    passed: bool
    ranks: bool
    """Whether it starts real ranks."""
    lines: dict[str, list[int]] = field(default_factory=dict)
    """Executed lines by source file."""


def copy_tree(folder: Path) -> None:
    """Copy everything that tests import, with bytecode."""
    for name in TREE:
        shutil.copytree(ROOT / name, folder / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")  # with what `make test` installs beside it


def environment(tree: Path) -> dict[str, str]:
    """Return the environment of tests that import `tree` only."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("COV_", "COVERAGE_", "PYTEST_"))}
    return {**kept, "PYTHONPATH": str(tree)}


def tests_by_line(cache: Path, areas: Iterable[str]) -> dict[str, TestRun]:
    """Return all fast tests of these areas by id; record those in changed files again."""
    wanted: dict[str, set[str]] = defaultdict(set)
    for source in (source for area in areas for source in sources(area)):
        for file in test_files(source):
            wanted[file] |= {file, source}
    known: dict[str, Any] = json.loads(cache.read_text()) if cache.exists() else {}
    stale = [file for file in sorted(wanted) if file not in known or _has_changed(known[file]["digests"], wanted[file])]
    if stale:
        sys.stdout.write(f"recording which lines {len(stale)} test files run\n")
        sys.stdout.flush()
        known |= _recorded(stale)
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps(known))
    return {name: TestRun(**test) for file in wanted for name, test in known[file]["tests"].items()}


def _has_changed(digests: dict[str, str], files: set[str]) -> bool:
    """Return whether one of these files has changed since the recorded run."""
    recorded = {file: known for file, known in digests.items() if file in files}
    return recorded != _digests(recorded)


def _digests(files: Iterable[str], tree: Path = ROOT) -> dict[str, str]:
    return {
        file: hashlib.sha256((tree / file).read_bytes()).hexdigest() if (tree / file).exists() else "" for file in files
    }


def _recorded(files: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="orch-mutants-") as temporary:
        tree = Path(temporary)
        copy_tree(tree)
        shutil.copy2(ROOT / "tests/mutants/recorded/sitecustomize.py", tree)
        (tree / "lines").mkdir()
        (tree / "current").write_text("")
        include = "\n    ".join(source for area in AREAS for source in sources(area))
        (tree / "coverage.ini").write_text(
            f"[run]\npatch = _exit\nsigterm = true\ndisable_warnings = no-data-collected\nrelative_files = true\n"
            f"include =\n    {include}\n"
        )
        subprocess.run(
            [
                sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.recorder", "-p", "no:cacheprovider",
                "-p", "no:cov", "-p", "no:xdist", "-m", FAST, *files,
            ],
            cwd=tree, env=environment(tree), stdout=(tree / "out").open("w"), stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        ended = json.loads((tree / "ended.json").read_text())
        lines = _lines(tree)
        found: dict[str, Any] = {file: {"tests": {}} for file in files}
        for name, how in ended.items():
            found[name.partition("::")[0]]["tests"][name] = asdict(TestRun(**how, lines=lines[name]))
        for file, one in found.items():
            sources_run = (source for test in one["tests"].values() for source in test["lines"])
            one["digests"] = _digests({file, *sources_run}, tree)
    return found


def _lines(tree: Path) -> dict[str, dict[str, list[int]]]:
    """Return the lines by test and source file, of all recorded processes."""
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in (tree / "lines").iterdir():
        data = CoverageData(basename=str(path))
        try:
            data.read()
        except DataError:  # of a process that was killed while it wrote this file
            continue
        for test in data.measured_contexts():
            data.set_query_context(test)
            for file in data.measured_files():
                source = str(Path(file).relative_to(tree) if Path(file).is_absolute() else file)
                found[test][source].update(data.lines(file) or [])
    plain = {test: {file: sorted(at) for file, at in files.items() if at} for test, files in found.items()}
    return defaultdict(dict, plain)
