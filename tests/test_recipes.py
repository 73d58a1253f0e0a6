"""The recipes of CONTRIBUTING.md in a copy of the tree: each extension is a file, a row, or both.

A scheduler is added in tests/orchestrator/scheduler/test_third_scheduler.py, a notification channel in
tests/orchestrator/notifications/test_channels.py.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("orch", "orchestrator", "trainer", "checkpointing", "configs", "sbatch_templates")
VERB = '''"""`orch states`: a screen of one line for each run."""

import click

from orchestrator.cli.terminal.render import Screen
from orchestrator.run_view import RunView, newest_runs


def render(view: RunView) -> str:
    return f"{view.run} is {view.state} at step {view.step}"


@click.command()
@click.pass_obj
def states(screen: Screen) -> None:
    """Print the state of each run."""
    for view in newest_runs(10):
        screen.say(render(view))
'''
DIMENSION = '''"""Ranks that share sequences in a new way."""

from dataclasses import dataclass

from trainer.parallel.dimension import Dimension, Section, Splits, check_size


@dataclass(frozen=True, kw_only=True)
class ExtraSection(Section):
    """Keys of the new dimension."""

    xp: int = 1
    """Ranks along it."""

    def check(self) -> None:
        check_size("xp", self.xp)


class ExtraParallelism(Dimension):
    """A dimension of its own."""

    name, key, splits = "xp", "xp", Splits.SEQUENCE


EXTRA = ExtraParallelism()
'''


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} is not once in {path}"
    path.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("extended")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "orchestrator/cli/states.py").write_text(VERB)
    main = copy / "orchestrator/cli/main.py"
    replace(main, "VERBS = {\n", 'VERBS = {\n    "states": ("states:states", "Print the state of each run."),\n')
    outcome = copy / "trainer/protocol/failures/outcome.py"
    replace(
        outcome, '    RANK_KILLED = "rank_killed"\n', '    POWER_CUT = "power_cut"\n    RANK_KILLED = "rank_killed"\n'
    )
    traits = "budget=Budget.TRIES, losses=Losses.CLUSTER, slurm_states=('DARK',)"
    row = f"    FailureKind.POWER_CUT: FailureTraits({traits}),\n"
    head = "TRAITS: dict[FailureKind, FailureTraits] = {\n"
    replace(outcome, head, head + row)
    events = copy / "trainer/protocol/events.py"
    replace(events, "class EventKind(StrEnum):\n", 'class EventKind(StrEnum):\n    ECLIPSE = "eclipse"\n')
    recipe = copy / "trainer/protocol/config_sections/recipe_config.py"
    replace(
        recipe,
        "    steps: int = 200\n",
        '    patience_steps: int = 5\n    """Steps of patience."""\n    steps: int = 200\n',
    )
    contract = copy / "orchestrator/submission/resume_contract.py"
    replace(contract, "train.recompute train.peak_tflops", "train.recompute train.peak_tflops train.patience_steps")
    (copy / "trainer/parallel/extra.py").write_text(DIMENSION)
    table = copy / "trainer/parallel/parallel_config.py"
    replace(table, "    CONTEXT,\n", "    CONTEXT,\n    EXTRA,\n")
    replace(table, "    ContextSection,\n", "    ContextSection,\n    ExtraSection,\n")
    first = "from trainer.parallel.context import"
    replace(table, first, f"from trainer.parallel.extra import EXTRA, ExtraSection\n{first}")
    return copy


CHECKS = {
    "verb and screen": """
from orchestrator.cli.main import run
assert run(["states"]) == 0
""",
    "failure kind": """
from orchestrator.recovery.classify_failure import _SLURM_KINDS
from trainer.protocol.failures.outcome import TRAITS, FailureKind
assert _SLURM_KINDS["DARK"] is FailureKind.POWER_CUT
assert TRAITS[FailureKind.POWER_CUT].final == "{reason}"
""",
    "event": """
import pathlib
from trainer.protocol.events import EventKind, EventLog, read_events
path = pathlib.Path("events.jsonl")
log = EventLog(path, "test", 1)
log.write(EventKind.ECLIPSE, reason="dark")
(event,), _ = read_events(path)
assert (event.kind, event.data) == ("eclipse", {"reason": "dark"})
""",
    "config key": """
from orchestrator.config.compose import compose
from orchestrator.submission.resume_contract import CONFIG, HARMLESS
words = ["train.patience_steps=7", "cluster.kind=local"]
config = compose("tiny-gpt", words, environ={"HOME": ".", "ORCH_SITE_CONFIG": ""})
assert config.config.train.patience_steps == 7
assert CONFIG["train.patience_steps"] is HARMLESS
""",
    "dimension": """
from orchestrator.submission.resume_contract import CONFIG
from trainer.parallel.layout import refusal
from trainer.protocol.config import JobConfig
from trainer.protocol.plain_data import build
job = build(JobConfig, {"parallel": {"xp": 2, "tp": 2}, "cluster": {"ranks_per_node": 8}})
assert job.parallel.mesh_sizes(8) == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "xp": 2, "tp": 2}
assert job.parallel.parameter_sizes(8)["dp_shard"] == 4
assert job.parallel.place_words(8, 3) == "dp_shard 0, xp 1, tp 1"
assert refusal(job) is None
odd = build(JobConfig, {"parallel": {"xp": 3}, "cluster": {"ranks_per_node": 8}})
assert "xp=3" in str(refusal(odd))
assert refusal(odd).hint == "type parallel.xp=4"
assert "parallel.xp" in CONFIG
""",
}


@pytest.mark.parametrize("extension", CHECKS)
def test_an_extension_is_one_file_and_one_row(tree: Path, tmp_path: Path, extension: str) -> None:
    program = f"import sys; sys.path.insert(0, {str(tree)!r})\n{CHECKS[extension]}"
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", program], cwd=tmp_path, check=False, text=True,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
