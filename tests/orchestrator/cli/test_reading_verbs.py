"""A new account has no state folder until a command writes to it: `sudo -E orch status` makes none of root's."""

import os
from pathlib import Path

import pytest

from tests.orchestrator.cli.conftest import Type

READING = [
    "status", "status --all", "status x", "show x", "show @last", "wait x", "events x", "logs x --controller", "top x",
    "compare x y", "attach x", "ckpt ls x", "ckpt verify x", "tag x", "nodes ls", "db path", "db backup copy.db",
    "doctor", "controller status", "controller stop", "controller install --print --via cron", "config show tiny-gpt",
    "restore-tests ls",
]  # fmt: skip
OF_A_KNOWN_RUN = ["save x", "cancel x", "resume x", "tag x y", "rm x", "ckpt pin x", "ckpt gc x", "ckpt restore-test x"]


@pytest.mark.parametrize("command", [*READING, *OF_A_KNOWN_RUN])
def test_a_verb_that_has_nothing_to_write_makes_no_state_folder(orch: Type, home: Path, command: str) -> None:
    assert orch(*command.split()).code in (0, 3, 4), "its words are right"
    assert not home.exists()


def test_the_first_write_makes_the_state_folder_private(orch: Type, home: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert orch("db", "rebuild", "--root", tmp_path / "run").code == 0
    assert home.stat().st_mode & 0o777 == 0o700


def test_doctor_tries_the_folder_in_which_the_state_folder_will_be_made(orch: Type, home: Path) -> None:
    state = [line for line in orch("doctor").out.splitlines() if "state folder" in line]
    assert state == [f"ok    state folder {home}; it will be made"]
    assert not [name for name in os.listdir(home.parent) if "probe" in name]
