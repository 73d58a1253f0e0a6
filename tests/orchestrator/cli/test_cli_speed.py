"""Modules that a verb loads, state folders that it makes, and modules that hide those of orch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli import main
from orchestrator.config.compose import compose
from orchestrator.errors import ConfigError
from orchestrator.submission import user_code
from tests.orchestrator.cli.conftest import Seeds, Type

HEAVY = [
    "torch",
    "sqlalchemy",
    "omegaconf",
    "submitit",
    "rich",
    "jinja2",
    "ClusterShell",
    "fsspec",
]


def loaded_by(*lines: str) -> dict[str, set[str]]:
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


def test_table_of_verbs(orch: Type) -> None:
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


READING = [
    "status", "status --all", "status x", "show x", "show @last", "wait x", "events x", "logs x --controller", "top x",
    "compare x y", "attach x", "ckpt ls x", "ckpt verify x", "tag x", "nodes ls", "db path", "db backup copy.db",
    "doctor", "controller status", "controller stop", "controller install --print --via cron", "config show tiny-gpt",
    "restore-tests ls",
]  # fmt: skip
OF_A_KNOWN_RUN = ["save x", "cancel x", "resume x", "tag x y", "rm x", "ckpt pin x", "ckpt gc x", "ckpt restore-test x"]


@pytest.mark.parametrize("command", [*READING, *OF_A_KNOWN_RUN])
def test_reading_verbs_create_no_state_folder(orch: Type, home: Path, command: str) -> None:
    assert orch(*command.split()).code in (0, 3, 4), "its words are right"
    assert not home.exists()


def test_the_first_write_makes_the_state_folder_private(orch: Type, home: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert orch("db", "rebuild", "--root", tmp_path / "run").code == 0
    assert home.stat().st_mode & 0o777 == 0o700


def test_doctor_probes_parent_of_state_folder(orch: Type, home: Path) -> None:
    state = [line for line in orch("doctor").out.splitlines() if "state folder" in line]
    assert state == [f"ok    state folder {home}; it will be created"]
    assert not [name for name in os.listdir(home.parent) if "probe" in name]


ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "from orchestrator.cli.entry import main; main()"
CONTROLLER = "import orchestrator.controller.service, checkpointing, trainer; print(trainer.__path__[0])"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("trainer", "checkpointing"):
        (folder / f"{name}.py").write_text("x = 1\n")
    return folder


@pytest.mark.parametrize(("code", "printed"), [(PROGRAM, "registry.db"), (CONTROLLER, str(ROOT / "trainer"))])
def test_own_packages_come_first(folder: Path, tmp_path: Path, code: str, printed: str) -> None:
    environ = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "ORCH_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "db", "path"], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


def test_job_does_not_inherit_pythonpath(folder: Path) -> None:
    config = compose("tiny-gpt", [f"+env.PYTHONPATH=/other:{folder}"]).config
    with pytest.raises(ConfigError, match=f"{folder / 'trainer.py'} has the name of one of orch's own") as refused:
        user_code.check(config)
    assert refused.value.where == "env.PYTHONPATH"
    assert f"remove {folder} from PYTHONPATH" in refused.value.hint


def test_a_job_is_not_given_such_a_pythonpath_of_the_shell(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    user_code.check(compose("tiny-gpt", []).config)
    with pytest.raises(ConfigError, match=r"trainer\.py"):
        user_code.check(compose("tiny-gpt", ["env_from=[PYTHONPATH]"]).config)
