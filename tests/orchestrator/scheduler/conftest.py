"""Slurm's commands as shell programs written by tests."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Program = Callable[[str, str], None]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    programs = tmp_path / "bin"
    programs.mkdir()
    for tool in ("sh", "cat", "sleep", "env", "timeout"):
        (programs / tool).symlink_to(shutil.which(tool) or tool)
    monkeypatch.setenv("PATH", str(programs))

    def put(name: str, body: str) -> None:
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o700)

    return put


def printing(folder: Path, name: str, text: str) -> str:
    """Return the body of a program that prints this text."""
    (folder / name).write_text(text)
    return f"cat {folder / name}"
