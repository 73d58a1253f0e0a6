"""Checks in a child process: limited in time, and killed with all of their own children."""

import os
import sys
import textwrap
import time
from pathlib import Path

import pytest

from orchestrator.submission import user_code
from orchestrator.submission.user_code import BoundedChild, ChildAnswer
from tests.trainer.agent.job import until


def child(folder: Path, program: str) -> BoundedChild:
    beginning = "import json, os, sys, time\nanswer = os.fdopen(int(sys.argv[1]), 'w')\norder = json.load(sys.stdin)\n"
    (folder / "checked_child.py").write_text(beginning + textwrap.dedent(program))
    environ = {"PATH": os.defpath, "PYTHONPATH": str(folder)}
    return BoundedChild("checked_child", {"name": "mine"}, environ, "waiting for mine")


def answered(folder: Path, program: str, seconds: float = 60.0) -> ChildAnswer:
    with child(folder, program) as running:
        return running.answer(seconds, lambda words: None)


def test_its_answers_are_one_and_what_it_prints_is_none(tmp_path: Path) -> None:
    program = """
    print("hello")
    answer.write(json.dumps({"name": order["name"]}) + "\\n" + json.dumps({"done": True}) + "\\n")
    """
    assert answered(tmp_path, program) == ChildAnswer(found={"name": "mine"}, ended=True)


@pytest.mark.parametrize(
    ("program", "died"),
    [
        ("sys.exit('no such thing')", "exit code 1: no such thing"),
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("answer.write('half a line'); sys.exit(3)", "exit code 3"),
    ],
)
def test_a_crash_is_reported_with_its_last_line(tmp_path: Path, program: str, died: str) -> None:
    assert answered(tmp_path, program) == ChildAnswer(died=died)


def test_its_children_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "NOTED_AFTER", 0.0)
    program = f"""
    import subprocess
    helper = subprocess.Popen([{sys.executable!r}, "-c", "import time; time.sleep(600)"])
    answer.write(json.dumps({{"helper": helper.pid}}) + "\\n"); answer.flush()
    time.sleep(600)
    """
    noted: list[str] = []
    with child(tmp_path, program) as running:
        until(lambda: os.path.exists(f"/proc/{running._process.pid}"))
        while not (found := running.answer(time.monotonic() - running._started + 0.5, noted.append).found):
            noted.clear()
        assert noted[0].startswith("waiting for mine (at most ")
    until(
        lambda: (
            not os.path.exists(f"/proc/{found['helper']}") or "Z" in Path(f"/proc/{found['helper']}/stat").read_text()
        )
    )
