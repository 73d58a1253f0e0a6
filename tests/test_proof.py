"""`make proof`: a continued run repeats only tests that have not passed; figures, groups and dates of its page."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import proof, slurm_versions

CASES = """
import pathlib
import pytest

pytestmark = pytest.mark.proof
PLACE = pathlib.Path(__file__).parent


def test_one(record_property):
    record_property("kills", 3)
    (PLACE / "one").open("a").write("x")


def test_one_more():
    assert (PLACE / "mended").exists()
"""


@pytest.mark.proof
def test_a_continued_run_repeats_failed_tests_only_whatever_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = proof: long\n")
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "docs").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(proof.ROOT))
    for name, value in (("ROOT", "."), ("PAGE", "docs/proof.md"), ("REPORT", "build/cases.jsonl")):
        monkeypatch.setattr(proof, name, tmp_path / value)

    def continue_run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["proof", *arguments])
        code = proof.main()
        page = (tmp_path / "docs" / "proof.md").read_text()
        return code, next(line for line in page.splitlines() if line.startswith("- result"))

    assert continue_run() == (1, "- result: 1 of 2 passed")
    (tmp_path / "mended").touch()
    assert continue_run("--again") == (0, "- result: 2 of 2 passed")
    assert (tmp_path / "one").read_text() == "x"
    assert proof.saved_results()["test_cases.py::test_one"]["figures"] == {"kills": 3}


def test_the_report_of_a_killed_run_keeps_the_tests_that_had_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "REPORT", tmp_path / "cases.jsonl")
    failed, mended, cut, after = (
        json.dumps(case_with(name) | {"passed": passed})
        for name, passed in (("test_a", False), ("test_a", True), ("test_b", True), ("test_c", True))
    )
    proof.REPORT.write_text(f"{failed}\n{mended}\n{cut[:20]}{after}\n{after}\n")
    assert [case["id"].rpartition("::")[2] for case in proof.earlier([])] == ["test_a", "test_c"]
    assert proof.recorded_cases(len(failed) + len(mended) + 2) == [json.loads(after)]


def test_a_partial_run_keeps_the_other_results_and_dates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = ["   a b", "a  1 ."]
    before = {
        "tests/scenarios/test_traces.py::test_seeds": {
            "cases": 3, "passed": 2, "seconds": 7, "date": "2025-01-02", "figures": {"confusion matrix": matrix},
        }
    }  # fmt: skip
    monkeypatch.setattr(proof, "PAGE", tmp_path / "proof.md")
    proof.write_page(before)
    assert proof.saved_results() == before
    case = case_with(name="test_of_new[1]")
    assert proof.write_page(proof.saved_results() | proof.results([case])) == "3 of 4 passed"
    after = proof.saved_results()
    assert after.pop("tests/slurm/test_runs.py::test_of_new")["cases"] == 1
    assert after == before
    page = (tmp_path / "proof.md").read_text()
    assert "| faults in simulated clusters | 3 | 2 | 2025-01-02 |  |" in page
    assert "| faults on a real Slurm of four nodes, in three versions | 1 | 1 | " in page


def case_with(name: str = "test_figures", **figures: str) -> dict[str, Any]:
    """Return a passed case on Slurm."""
    found = list(figures.items())
    known = {"passed": True, "seconds": 2.0, "date": "2026-01-02"}
    return {"id": f"tests/slurm/test_runs.py::{name}", **known, "figures": found}


def test_figures_of_all_cases_are_added_up_or_listed() -> None:
    cases = [case_with(kills="3", loss="1.1e-07", matrix="a\nb"), case_with(kills="4", loss="1.4e-07")]
    (result,) = proof.results(cases).values()
    assert result["figures"] == {"kills": 7, "loss": ["1.1e-07", "1.4e-07"], "matrix": ["a", "b"]}


@pytest.mark.parametrize(
    ("title", "figures", "cell"),
    [
        ("crashes and disk errors during a save", {"times the job was killed": 2000, "times the rank": 1}, "2,001"),
        ("stragglers are named", {"false names in": ["pair: 0 of 100", "eight: 1 of 100"]}, "1 of 200"),
        ("memory is as", {"peak of a step, stages": ["pp 2 0.976 to 1.001", "zbv 0.986 to 1.024"]}, "0.976 to 1.024"),
        ("all layouts train", {"largest relative difference of 20 losses": ["1.1e-07", "2.7e-07"]}, "2.7e-07"),
    ],
)
def test_a_row_summarizes_the_figures_of_its_group(
    title: str, figures: dict[str, int | list[str]], cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "PAGE", tmp_path / "proof.md")
    group = next(group for group in proof.GROUPS if group.title.startswith(title))
    test = {"cases": 1, "passed": 1, "seconds": 1, "date": "2026-01-02", "figures": figures}
    proof.write_page({f"{group.tests.split()[0]}x": test})
    assert f"| 1 | 1 | 2026-01-02 | {group.label}: {cell} |" in (tmp_path / "proof.md").read_text()


def test_the_page_of_slurm_versions_follows_from_the_results() -> None:
    tests = json.loads((proof.ROOT / "docs" / "proof.json").read_text())["tests"]
    assert slurm_versions.page(tests) == (proof.ROOT / "docs" / "slurm-versions.md").read_text()
    (name,) = [name for name in tests if name.endswith("::test_node_death")]
    del tests[name]["figures"]["Slurm 26.05.5"]
    assert "| node death | SUCCEEDED after node_lost; jobs: 2 | SUCCEEDED after node_lost; jobs: 2 | failed |" in (
        slurm_versions.page(tests)
    )


def test_every_group_has_tests_that_exist() -> None:
    starts = [start.partition("::")[0] for group in proof.GROUPS for start in group.tests.split()]
    assert not [start for start in starts if not list(proof.ROOT.glob(f"{start}*"))]
