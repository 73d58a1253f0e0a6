"""A third scheduler is a module and a row in each of two tables; no other code names schedulers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("orch", "orchestrator", "trainer", "checkpointing")
TRAITS, FACTORIES = (
    "trainer/protocol/config_sections/scheduler_kinds.py",
    "orchestrator/scheduler/available_schedulers.py",
)
ROWS = {
    TRAITS: ("KINDS = {\n", '    "spool": SchedulerKind(simulated_nodes=True, go_seconds=600.0),\n'),
    FACTORIES: (
        "FACTORIES = _Factories(\n    {\n",
        '    "spool": SchedulerFactory(\n'
        "        is_here=lambda: True, make=SpoolScheduler, instance=SpoolInstance, check=script, script=script\n"
        "    ),\n",
    ),
}
IMPORT = "from orchestrator.scheduler.spool import SpoolInstance, SpoolScheduler, script\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    place = tmp_path / "tree"
    for folder in (*PACKAGES, "configs", "sbatch_templates"):
        shutil.copytree(ROOT / folder, place / folder)  # what is compiled of it stays valid
    shutil.copy(ROOT / "tests" / "fakes" / "spool_scheduler.py", place / "orchestrator" / "scheduler" / "spool.py")
    for name, (before, row) in ROWS.items():
        text = (place / name).read_text()
        assert text.count(before) == 1
        (place / name).write_text(text.replace(before, before + row))
    factories = place / FACTORIES
    factories.write_text(factories.read_text().replace("\nfrom trainer", f"\n{IMPORT}from trainer", 1))
    return place


def typed(tree: Path, *words: str) -> Any:
    """Return the answer of `orch WORDS --json` in that tree."""
    return answers(tree, words)[0]


def answers(tree: Path, *lines: tuple[str, ...]) -> list[Any]:
    """Return the answers of these command lines, all run in one process."""
    all_typed = f"print(*[run([*words, '--json']) for words in {lines!r}], file=sys.stderr)"
    program = f"import sys; sys.path.insert(0, {str(tree)!r}); from orchestrator.cli.main import run; {all_typed}"
    home = tree.parent
    environ = {**os.environ, "ORCH_HOME": str(home / "home"), "XDG_CONFIG_HOME": str(home / "config")}
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env=environ, cwd=home, capture_output=True, text=True, timeout=200, check=False)
    assert done.stderr.splitlines()[-1:] == [" ".join("0" for _ in lines)], done.stdout + done.stderr
    found, rest = [], done.stdout
    while rest.strip():
        answer, end = json.JSONDecoder().raw_decode(rest.lstrip())
        found, rest = [*found, answer["data"]], rest.lstrip()[end:]
    return found


def test_it_is_chosen_checked_and_shown_by_its_rows_alone(tree: Path) -> None:
    named = ("submit", "tiny-gpt", "--cluster", "spool", "--dry-run")
    shown, of_itself = answers(tree, named, ("submit", "tiny-gpt", "cluster.kind=auto", "--dry-run"))
    assert shown["cluster"] == "spool"
    assert shown["sbatch"] == "#SPOOL name=orch-tiny-gpt-N-1-00000000 nodes=2\n"
    assert of_itself["cluster"] == "spool"


@pytest.mark.proof
@pytest.mark.multi
@pytest.mark.timeout(300)
def test_a_run_goes_through_it_to_its_end(tree: Path) -> None:
    python = tree.parent / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tree} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    small = ["cluster.nodes=1", "cluster.ranks_per_node=2", "parallel.tp=1", "train.steps=6"]
    done = typed(
        tree, "submit", "tiny-gpt", "--cluster", "spool", f"cluster.root={tree.parent / 'runs'}",
        f"cluster.python={python}", *small, "--wait",
    )  # fmt: skip
    assert (done["cluster"], done["state"], done["step"]) == ("spool", "SUCCEEDED", 6)
    (controller,) = typed(tree, "controller", "status")["controllers"]
    assert controller["scheduler"].startswith("spool@")
    typed(tree, "controller", "stop")
