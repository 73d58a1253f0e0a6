"""The mounted copy of orch's packages: made once per content, and started by a Python without orch."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.scheduler import agent_folder as module
from orchestrator.scheduler.agent_folder import agent_folder, provide_agent
from trainer.agent import start_mounted
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.messages.agents import installed_release


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    return tmp_path


def bare_python(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run this Python without its site packages, as if nothing were installed."""
    return subprocess.run([sys.executable, "-S", *words], capture_output=True, text=True, cwd=folder, check=False)


def test_a_python_without_packages_can_run_it(home: Path) -> None:
    provide_agent()
    folder = agent_folder()
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith("orch-")) == [
        "__main__.py", "checkpointing", "orch", "trainer",
    ]  # fmt: skip
    refused = bare_python("-u", str(folder), "1", str(home / "gone"), str(home / "gone" / "s"), folder=home)
    assert (refused.returncode, refused.stdout) == (ExitCode.NEVER_RETRY, "")
    assert "orch-agent: refuses to start: No such file or directory" in refused.stderr
    imports = "import trainer.agent.fork_server.server, trainer.agent.processes.watchdog"
    assert (
        subprocess.run([sys.executable, "-S", "-c", imports], cwd=folder, capture_output=True, check=False).stderr
        == b""
    )
    show = "from trainer.protocol.messages.agents import installed_release; print(installed_release())"
    (folder / "trainer" / "show.py").write_text(show)
    shown = bare_python(str(folder), "-m", "trainer.show", folder=home)
    assert shown.stdout.strip() == installed_release()


def test_a_program_in_an_image_without_orch_can_call_it(home: Path) -> None:
    provide_agent()
    code = (
        "import sys, importlib.util\n"
        "assert importlib.util.find_spec('trainer') is None\n"
        "import orch, trainer\n"
        "print(orch.__file__, orch.should_save(), orch.step(1))\n"
    )
    startup = agent_folder() / "trainer" / "agent" / "instrument" / "python_path"
    environ = {"PYTHONPATH": str(startup), "ORCH_CELLS": "/dev/null", "LOCAL_RANK": "0"}
    # The interpreter behind this environment has no package of orch's.
    command = [sys._base_executable, "-c", code]  # type: ignore[attr-defined]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=home, check=False)
    assert done.stdout == f"{agent_folder() / 'orch' / '__init__.py'} False None\n", done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_it_is_made_once_and_changed_code_makes_another(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provide_agent()
    before = agent_folder()
    stamp = before.stat().st_ino
    provide_agent()
    assert before.stat().st_ino == stamp
    copy = home / "trainer"
    shutil.copytree(module._PACKAGES["trainer"], copy)
    (copy / "extra.py").touch()
    monkeypatch.setitem(module._PACKAGES, "trainer", copy)
    provide_agent()
    assert agent_folder() != before
    assert {path.name for path in before.parent.iterdir()} == {before.name, agent_folder().name}


def test_a_python_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    assert start_mounted.main(["1", "/run", "/run/s"]) == ExitCode.NEVER_RETRY
    assert "is Python 3.9.18, and orch needs 3.11 or newer" in capsys.readouterr().err
