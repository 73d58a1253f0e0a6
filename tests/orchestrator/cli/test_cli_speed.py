"""What a verb loads: the quick ones must stay quick."""

import json
import os
import subprocess
import sys

import pytest

from orchestrator.cli import main
from tests.orchestrator.cli.conftest import Seeds, Type

HEAVY = [
    "torch",
    "sqlalchemy",
    "alembic",
    "omegaconf",
    "submitit",
    "rich",
    "jinja2",
    "ClusterShell",
    "fsspec",
]


def loaded_by(*lines: str) -> dict[str, set[str]]:
    """The heavy libraries that a real process has loaded when it has done each `orch LINE`, one after the other."""
    code = (
        "import sys, json; from orchestrator.cli import main\n"
        f"for line in {lines!r}:\n"
        "    main.run(line.split())\n"
        f"    print(json.dumps([line, [name for name in {HEAVY!r} if name in sys.modules]]), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    told = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[")]
    assert [line for line, _ in told] == list(lines)
    return {line: set(names) for line, names in told}


def test_help_and_status_load_nothing_heavy(seeds: Seeds) -> None:
    seeds.run()
    for line, names in loaded_by("--help", "submit --help", "status", "status tiny-1 --json", "").items():
        assert names == set(), line


def test_no_verb_of_every_day_loads_torch(seeds: Seeds) -> None:
    seeds.run()
    for line, names in loaded_by("show tiny-1", "ckpt ls tiny-1", "config show tiny-gpt", "doctor").items():
        assert "torch" not in names, line


def test_the_table_of_verbs_tells_what_the_verbs_are(orch: Type) -> None:
    shown = orch("--help").out
    assert orch("-h").out == shown
    for name, (_, purpose) in main.VERBS.items():
        assert purpose in " ".join(shown.split())
        help_of_verb = " ".join(orch(name, "-h").out.split())
        first = purpose.rstrip(".").partition(":")[0].partition(";")[0]
        assert first in help_of_verb, f"orch {name} -h tells something else than the list of verbs"


@pytest.mark.parametrize("verb", main.verbs())
def test_every_verb_explains_itself_and_takes_the_global_options(orch: Type, verb: str) -> None:
    shown = orch(*verb.split(), "--help")
    assert shown.code == 0
    for option in ("--json", "--no-color", "--no-progress", "--utc", "--debug", "-q", "-v", "-h"):
        assert option in shown.out, f"orch {verb} {option}"
    assert orch(*verb.split(), "-h").out == shown.out


def test_version(orch: Type) -> None:
    assert orch("--version").out.startswith("orch 0.")
