"""`make proof` goes on with a run before: all that has not passed is run, and nothing that has."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import proof

CASES = """
import pathlib
import pytest

pytestmark = pytest.mark.proof
PLACE = pathlib.Path(__file__).parent


def test_one():
    (PLACE / "one").open("a").write("x")


def test_one_more():
    assert (PLACE / "mended").exists()
"""


@pytest.mark.proof
def test_what_has_failed_is_run_again_whatever_the_names_of_those_that_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = proof: long\n")
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "docs").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(proof.ROOT))
    for name, value in (("ROOT", "."), ("TARGET", "docs/proof.md"), ("REPORT", "build/proof.xml")):
        monkeypatch.setattr(proof, name, tmp_path / value)

    def go_on(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["proof", *arguments])
        code = proof.main()
        told = (tmp_path / "docs" / "proof.md").read_text()
        return code, next(line for line in told.splitlines() if line.startswith("- result"))

    assert go_on() == (1, "- result: 1 of 2 passed")
    (tmp_path / "mended").touch()
    assert go_on("--again") == (0, "- result: 2 of 2 passed")
    assert (tmp_path / "one").read_text() == "x"


def test_what_is_not_run_keeps_its_row_and_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = "| of old | 3 | 2 | 7 | 2025-01-02 | seen: 3; a | b |"
    picture = "\n## matrix\n\n```\n| of | rows |\n```"
    monkeypatch.setattr(proof, "TARGET", tmp_path / "proof.md")
    proof.write_page({"of old": before}, {"## matrix": picture})
    page = (tmp_path / "proof.md").read_text()
    assert proof.rows_of_page(page) == {"of old": before}
    assert proof.pictures_of_page(page) == {"## matrix": picture}
    case = ElementTree.fromstring('<testcase name="test_of_new[1]" time="2.0"><properties/></testcase>')
    assert proof.write_page(proof.rows_of_page(page) | proof.rows([case]), {}) == "3 of 4 passed"
    assert before in (tmp_path / "proof.md").read_text()
