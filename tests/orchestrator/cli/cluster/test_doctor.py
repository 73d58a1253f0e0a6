"""`orch doctor`: checks of nodes and of this machine."""

from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.cluster import doctor
from orchestrator.errors import SlurmUnreachable
from orchestrator.scheduler.interface import Resources

SINFO = {
    "%P": "low*\nhigh\n",
    "%N|%P|%c|%m|%G|%T": "n1|low*|8|4000|(null)|idle\nn2|low*|8|4000|(null)|idle\nn1|high|8|4000|(null)|idle\n",
}


@pytest.mark.parametrize(
    ("asked", "wanted", "level", "text", "hint"),
    [
        ({"mem": "3G"}, False, "ok", "partition low has what first requests: 2 nodes with 1 core, 3G", ""),
        (
            {"mem": "8G"}, False, "warn", "first requests more than nodes have: cluster.mem=8G on 2 nodes: partition "
            "low has no node with that much", "`orch submit first cluster.mem=4000M`, or write that into",
        ),
        ({"mem": "8G"}, True, "fail", "first requests more than nodes have", "cluster.mem=4000M"),
        (
            {"partition": "nope"}, True, "fail", "first names partition nope, which does not exist; available: low, "
            "high", "`orch submit first cluster.partition=low`, or write that into",
        ),
    ],
)  # fmt: skip
def test_demand_of_a_configuration(asked: dict[str, Any], wanted: bool, level: str, text: str, hint: str) -> None:
    found = doctor.demand("first", Resources(nodes=2, **asked), lambda words: SINFO[words[-1]], wanted=wanted)
    assert (found.name, found.level) == ("nodes", level)
    assert found.text.startswith(text)
    assert hint in found.hint


def test_demand_without_answer() -> None:
    def silent(command: list[str]) -> str:
        raise SlurmUnreachable("sinfo got no answer")

    found = doctor.demand("first", Resources(nodes=2), silent, wanted=True)
    assert (found.level, found.text) == (
        "warn",
        "cannot check whether nodes have what first requests: sinfo got no answer",
    )


def test_requirements_of_train_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c++").write_text("#!/bin/sh\n")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    missing = doctor.compiler(headers=tmp_path)
    assert (missing.level, "there is no" in missing.text, "Python.h" in missing.text) == (doctor.INFO, True, True)
    (tmp_path / "Python.h").touch()
    assert doctor.compiler(headers=tmp_path).level == doctor.OK
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    assert "train.compile=true would fail here: there is no" in doctor.compiler(headers=tmp_path).text
