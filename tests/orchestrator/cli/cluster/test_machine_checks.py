"""What `orch doctor` says of this machine."""

from pathlib import Path

import pytest

from orchestrator.cli.cluster.machine_checks import INFO, OK, compiler


def test_what_train_compile_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c++").write_text("#!/bin/sh\n")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    missing = compiler(headers=tmp_path)
    assert (missing.level, "there is no" in missing.text, "Python.h" in missing.text) == (INFO, True, True)
    (tmp_path / "Python.h").touch()
    assert compiler(headers=tmp_path).level == OK
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert "train.compile=true would fail here: there is no" in compiler(headers=tmp_path).text
