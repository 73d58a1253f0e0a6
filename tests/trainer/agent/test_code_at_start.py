"""Each attempt records the user's code that it imports, and other code than before is an event."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.installed_distributions import install
from trainer.agent.fork_server.code_at_start import record_code
from trainer.protocol.config import JobConfig, WorkloadConfig
from trainer.protocol.events import EventKind
from trainer.protocol.messages.ranks import CodeAtStart
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.protocol.user_code.code_record import CodeFile, CodeRecord
from trainer.protocol.user_code.installed_packages import find_site_folders, read_versions
from trainer.protocol.user_code.record_code import read_again, record_named


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AttemptDir:
    run = RunDir(tmp_path / "run-1")
    run.make()
    run.attempt(1).make()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NODEID", "0")
    return run.attempt(1)


def submit(run: RunDir, config: JobConfig) -> None:
    record = record_named(config, run.path.parent)
    identity = {"code": {"files": record.to_json()}, "submit_dir": str(run.path.parent)}
    run.run.write_text(json.dumps({"identity": identity}))


def test_code_that_was_edited_after_the_submit_is_named(attempt: AttemptDir, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import helper\n")
    (tmp_path / "helper.py").write_text("width = 1\n")
    config = JobConfig(command=("python", "train.py"))
    submit(attempt.run, config)
    assert record_code(attempt, config).changes == ""
    attempt.code.unlink()
    (tmp_path / "helper.py").write_text("width = 2\n")
    found = record_code(attempt, config)
    recorded = CodeRecord.read(attempt.code)
    assert (found.digest, found.changes) == (recorded.digest, "helper changed since the submit")


def test_the_next_attempt_is_compared_with_what_trained_last(attempt: AttemptDir, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("width = 1\n")
    config = JobConfig(command=("python", "train.py"))
    submit(attempt.run, config)
    script.write_text("width = 2\n")
    assert record_code(attempt, config).changes == "train.py changed since the submit"
    second, third = attempt.run.attempt(2), attempt.run.attempt(3)
    for later in (second, third):
        later.make()
    assert record_code(second, config).changes == "", "the code of attempt 1, not that of the submit"
    script.write_text("width = 3\n")
    assert record_code(third, config).changes == "train.py changed since attempt 2"
    script.write_text("width = 4\n")
    assert record_code(third, config).changes == "train.py changed since the last start in this attempt"


def test_a_workload_is_known_by_what_was_imported(attempt, tmp_path, monkeypatch):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "mine_at_start.py").write_text("import importlib\nhelper = importlib.import_module('deep_at_start')\n")
    (tmp_path / "hidden" / "deep_at_start.py").write_text("width = 1\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), str(tmp_path / "hidden")])
    before = frozenset(sys.modules)
    __import__("mine_at_start")
    config = JobConfig(workload=WorkloadConfig(target="mine_at_start:Mine", path=(str(tmp_path),)))
    record_code(attempt, config, before)
    recorded = CodeRecord.read(attempt.code)
    assert set(recorded.files) == {"mine_at_start", "deep_at_start"}
    for name in recorded.files:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("method", "counts"),
    [("return importlib.import_module(name)", True), ("exec(open(name).read())", True), ("return name.eval()", False)],
)
def test_where_a_method_imports_by_other_means_every_file_of_the_folder_counts(
    attempt: AttemptDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, counts: bool
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    text = f"import importlib\nclass Mine:\n    def build_model(self, name):\n        {method}\n"
    (code / "mine_by_name.py").write_text(text)
    (code / "chosen_by_name.py").write_text("width = 1\n")
    monkeypatch.syspath_prepend(str(code))
    before = frozenset(sys.modules)
    __import__("mine_by_name")
    config = JobConfig(workload=WorkloadConfig(target="mine_by_name:Mine", path=(str(code),)))
    record_code(attempt, config, before)
    recorded, second = CodeRecord.read(attempt.code), attempt.run.attempt(2)
    second.make()
    (code / "chosen_by_name.py").write_text("width = 2\n")
    found = record_code(second, config, before)
    del sys.modules["mine_by_name"]
    assert found.changes == ("chosen_by_name changed since attempt 1" if counts else "")
    assert ("mine_by_name.py imports by other means" in recorded.covers) == counts


def test_a_library_that_imports_by_other_means_leaves_the_folder_of_the_workload_alone(attempt, tmp_path, monkeypatch):
    for folder, name, text in (
        ("lib", "lib_by_name", "def load(name):\n    __import__(name)\n"),
        ("code", "beside", ""),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    before = frozenset(sys.modules)
    __import__("lib_by_name")
    record_code(attempt, JobConfig(workload=WorkloadConfig(target="m:Mine", path=(str(tmp_path / "code"),))), before)
    del sys.modules["lib_by_name"]
    recorded = CodeRecord.read(attempt.code)
    assert set(recorded.files) == {"lib_by_name"}


def test_a_later_attempt_begins_with_the_files_that_a_rank_had_imported_late(attempt, tmp_path):
    late = tmp_path / "chosen_late.py"
    late.write_text("width = 1\n")
    config = JobConfig(workload=WorkloadConfig(target="mine_late:Mine", path=(str(tmp_path),)))
    record_code(attempt, config, frozenset(sys.modules))
    started = CodeRecord.read(attempt.code)
    assert started is not None
    trained = replace(started, files={"chosen_late": CodeFile.read(late)}, late=("chosen_late",))
    trained.write(attempt.code)
    later = [attempt.run.attempt(number) for number in (2, 3, 4)]
    for one in later:
        one.make()
    unchanged = record_code(later[0], config, frozenset(sys.modules))
    assert (unchanged.changes, unchanged.digest) == ("", trained.digest)
    late.write_text("width = 2\n")
    assert record_code(later[1], config, frozenset(sys.modules)).changes == "chosen_late changed since attempt 2"
    late.unlink()
    assert record_code(later[2], config, frozenset(sys.modules)).changes == "", "its import fails, or finds another"
    third, last = CodeRecord.read(later[1].code), CodeRecord.read(later[2].code)
    assert (third.late, last.late, read_again(third).absent) == (("chosen_late",), (), ())


@pytest.mark.parametrize("config", [JobConfig(command=("python", "train.py")), JobConfig()])
def test_other_nodes_record_nothing(attempt: AttemptDir, monkeypatch: pytest.MonkeyPatch, config: JobConfig) -> None:
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert record_code(attempt, config) == CodeAtStart()
    assert not attempt.code.exists()


def test_of_the_built_in_model_the_packages_are_recorded(attempt: AttemptDir) -> None:
    assert record_code(attempt, JobConfig(), frozenset(sys.modules)) == CodeAtStart()
    recorded = CodeRecord.read(attempt.code)
    assert recorded.packages is not None
    assert (recorded.files, recorded.digest, recorded.packages["torch"]) == ({}, "", torch.__version__)
    second = attempt.run.attempt(2)
    second.make()
    replace(recorded, packages={**recorded.packages, "torch": "2.0"}).write(attempt.code)
    found = record_code(second, JobConfig(), frozenset(sys.modules))
    assert found.changes == f"package torch 2.0 -> {torch.__version__} since attempt 1"


def test_other_packages_than_before_are_named(attempt: AttemptDir, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import timm\n")
    install(tmp_path / "site", "timm", "1.0")
    config = JobConfig(command=("python", "train.py"), env={"PYTHONPATH": str(tmp_path / "site")})
    submit(attempt.run, config)
    run_json = json.loads(attempt.run.run.read_text())
    here = read_versions(find_site_folders([str(tmp_path / "site"), *sys.path]))
    env = {"executable": sys.executable, "packages": here}
    attempt.run.run.write_text(json.dumps({"identity": {**run_json["identity"], "env": env}}))
    assert record_code(attempt, config).changes == ""
    attempt.code.unlink()
    install(tmp_path / "site", "timm", "2.0")
    install(tmp_path / "site", "black", "2.0")
    found = record_code(attempt, config)
    assert (found.changes, found.packages) == ("package timm 1.0 -> 2.0 since the submit", {"timm": "2.0"})
    second = attempt.run.attempt(2)
    second.make()
    assert record_code(second, config).changes == "", "compared with what attempt 1 had"
    third = attempt.run.attempt(3)
    third.make()
    install(tmp_path / "site", "timm", "3.0")
    assert record_code(third, config).changes == "package timm 2.0 -> 3.0 since attempt 2"


@pytest.mark.parametrize("other", ["job", "command"])
def test_packages_of_another_interpreter_are_not_compared_with_the_submit(attempt, tmp_path, other):
    (tmp_path / "train.py").write_text("import timm\n")
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    install(tmp_path / "env" / "lib" / "python3.11" / "site-packages", "timm", "2.0")
    config = JobConfig(command=(str(python) if other == "command" else sys.executable, "train.py"))
    submit(attempt.run, config)
    identity = json.loads(attempt.run.run.read_text())["identity"]
    executable = sys.executable if other == "command" else "/opt/other/bin/python"
    env = {"executable": executable, "packages": {"timm": "1.0"}}
    attempt.run.run.write_text(json.dumps({"identity": {**identity, "env": env}}))
    assert record_code(attempt, config).changes == ""


def test_a_command_that_is_edited_between_two_generations_is_an_event(job, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("""import os, sys, time
events = os.path.join(os.environ["ORCH_RUN_DIR"], "attempts", "001", "events", "agent-0000.jsonl")
if os.environ["ORCH_GENERATION"] == "2":
    while "code.changed" not in open(events).read():
        time.sleep(0.01)
    sys.exit(0)
open(__file__, "a").write("# edited while it trains")
sys.exit(3)
""")
    command = [sys.executable, str(script)]
    work = job(nodes=1, ranks=1, command=command, env={"ORCH_SUBMIT_DIR": str(tmp_path)}).ends(0)
    (changed,) = work.events(EventKind.CODE_CHANGED)
    assert changed.data["reason"] == f"{script} changed since the last start in this attempt"
    (recorded,) = work.events(EventKind.CODE_RECORDED)
    assert recorded.data["digest"] != changed.data["digest"]
