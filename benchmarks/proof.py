"""Run every test marked `proof`, and those of Slurm on three versions (`make proof`).

Results go to docs/proof.json, and summaries to docs/proof.md and docs/slurm-versions.md.

    python -m benchmarks.proof [--again [PATH ...] | --only PATH ...]

This takes hours, so every result is written as soon as its test ends, and a run that was interrupted, killed or failed
can be continued: `--again` runs the tests that have not passed yet, repeats those below the PATHs, and keeps the other
results. `--only` runs the tests below the PATHs, and leaves all other results, with the dates of their runs, unchanged.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks import slurm_versions
from tests.slurm.suites import CHOICE, GENERATIONS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "proof.md"
REPORT = ROOT / "build" / "proof-cases.jsonl"
PASSED, CASES = "ORCH_PROOF_PASSED", "ORCH_PROOF_CASES"
"""Environment variables for the path of the list of tests to deselect, and for that of the file that gets the cases."""
HEAD = """# Proof

Results of the long tests (`make proof`), one row per group. [proof.json](proof.json) has the figures of every test.
`make test` runs a seeded sample of them.

- machine: {machine}
- result: {result}

| group | cases | passed | date | figure |
|---|---|---|---|---|
"""

Result = dict[str, Any]
"""A test's result: number of cases, how many of them passed, seconds, date, and figures keyed by name."""
Case = dict[str, Any]
"""A run of a test with its parameters: id, passed, seconds, date, figures (name, text)."""


def _total(values: list[str]) -> str:
    """Return the sum of whole numbers, or of both parts of values such as `3 of 4`."""
    parts = [found for value in values if (found := re.search(r"(\d+) of (\d+)$", value))]
    if parts:
        return f"{sum(int(part[1]) for part in parts):,} of {sum(int(part[2]) for part in parts):,}"
    return f"{sum(map(int, values)):,}"


def _range(values: list[str]) -> str:
    numbers = _fractions(values)
    return f"{min(numbers):.3f} to {max(numbers):.3f}"


def _largest(values: list[str]) -> str:
    return f"{max(_fractions(values)):.1e}"


def _fractions(values: list[str]) -> list[float]:
    return [float(number) for value in values for number in re.findall(r"\d+\.\d+(?:e-?\d+)?", value)]


@dataclass(frozen=True)
class ProofGroup:
    """A row on the page."""

    title: str
    tests: str
    """Prefixes of test ids; the longest match decides."""
    label: str = ""
    figures: str = ""
    """Name prefix of the figures that the row summarizes; the label if empty."""
    summary: Callable[[list[str]], str] = _total


GROUPS = (
    ProofGroup("damaged checkpoints are refused, intact ones load",
               "tests/checkpointing/engine/restore/test_corruption tests/checkpointing/proofs/test_corruption",
               "faults refused with the model untouched", "faults refused"),
    ProofGroup("crashes and disk errors during a save lose no committed checkpoint", "tests/checkpointing/",
               "kills of ranks, writers and jobs", "times the "),
    ProofGroup("malicious files run no code", "tests/checkpointing/proofs/test_no_code", "malicious files read"),
    ProofGroup("any layout restores any checkpoint, also with plain torch",
               "tests/checkpointing/engine/restore/test_layouts tests/checkpointing/proofs/test_interop"),
    ProofGroup("restore tests find damage and pass intact checkpoints",
               "tests/trainer/worker/restore_test/ tests/slurm/test_restore_tests tests/end_to_end/test_restore_tests",
               "damaged checkpoints found", "damaged checkpoints"),
    ProofGroup("killed and rolled-back runs end with equal bits", "tests/trainer/worker/"),
    ProofGroup("all layouts train like one rank", "tests/trainer/parallel/apply/ tests/trainer/parallel/pipeline/",
               "largest relative difference of 20 losses", summary=_largest),
    ProofGroup("memory is as the formula predicts",
               "tests/trainer/worker/memory/ tests/trainer/parallel/pipeline/test_stage_memory "
               "tests/trainer/parallel/apply/test_expert_runs.py::test_peaks",
               "peak of a step, measured / formula", "peak of a step", _range),
    ProofGroup("hangs are detected in time, with the right rank and kind",
               "tests/trainer/agent/watch/ tests/trainer/agent/blame/ tests/trainer/agent/flight/", "simulated hangs"),
    ProofGroup("healthy runs raise no false alarm",
               "tests/trainer/agent/watch/test_hangs.py::test_four_hundred "
               "tests/trainer/agent/watch/test_waiting_ranks.py::test_four_hundred "
               "tests/trainer/agent/blame/test_no_false_alarm",
               "simulated hours"),
    ProofGroup("stragglers are named",
               "tests/trainer/agent/watch/test_stragglers tests/trainer/agent/blame/test_slow_stages",
               "healthy runs of 1,000 steps with a rank named", "false names"),
    ProofGroup("faults in simulated clusters", "tests/scenarios/"),
    ProofGroup("faults on a real Slurm of four nodes, in three versions", "tests/slurm/"),
    ProofGroup("faults on one machine", "tests/end_to_end/ tests/orchestrator/ tests/trainer/agent/"),
    ProofGroup("unchanged training scripts as a `command:`",
               "tests/slurm/test_commands tests/end_to_end/test_commands tests/end_to_end/test_examples "
               "tests/trainer/agent/test_command_programs"),
    ProofGroup("suggestions for layouts that do not fit are accepted",
               "tests/trainer/parallel/ tests/orchestrator/config/"),
    ProofGroup("packaging and dependencies", "tests/end_to_end/test_wheel tests/test_"),
)  # fmt: skip
_OTHER = ProofGroup("others", "")


def machine() -> str:
    """Return the system, processor count and Python version, without the host's name."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def results(cases: Iterable[Case]) -> dict[str, Result]:
    """Return the results keyed by test, adding up the cases for all of a test's parameters."""
    tests: dict[str, list[Case]] = {}
    for case in cases:
        tests.setdefault(case["id"].partition("[")[0], []).append(case)
    return {
        name: {
            "cases": len(members),
            "passed": sum(case["passed"] for case in members),
            "seconds": round(sum(case["seconds"] for case in members)),
            "date": max(case["date"] for case in members),
            "figures": figures(members),
        }
        for name, members in tests.items()
    }


def figures(cases: Iterable[Case]) -> dict[str, int | list[str]]:
    """Return the cases' figures keyed by name: the sum of whole numbers, or a list of all other values."""
    found: dict[str, list[str]] = {}
    for name, value in (figure for case in cases for figure in case["figures"]):
        found.setdefault(name, []).extend(value.splitlines())
    return {
        name: sum(map(int, values)) if all(value.isdigit() for value in values) else list(dict.fromkeys(values))
        for name, values in found.items()
    }


def earlier(paths: Sequence[str]) -> list[Case]:
    """Return the cases that passed in earlier runs, except those below these paths."""
    starts = tuple(os.path.relpath(path, ROOT) for path in paths)
    return [case for case in recorded_cases() if case["passed"] and not case["id"].startswith(starts)]


def recorded_cases(offset: int = 0) -> list[Case]:
    """Return the newest case of each test in the report, from a byte offset on."""
    cases: dict[str, Case] = {}
    for line in REPORT.read_bytes()[offset:].splitlines() if REPORT.exists() else ():
        with contextlib.suppress(ValueError):  # a line that a kill has cut, with the next one appended to it
            case = json.loads(line)
            cases[case["id"]] = case
    return list(cases.values())


def run(kept: Iterable[Case], paths: Sequence[str]) -> tuple[int, list[Case]]:
    """Run the tests below `paths`, or all if none are given, except `kept`; return pytest's exit code and its cases."""
    REPORT.parent.mkdir(exist_ok=True)
    offset = REPORT.stat().st_size if REPORT.exists() else 0
    with tempfile.TemporaryDirectory() as folder:
        passed = Path(folder) / "passed"
        passed.write_text("\n".join(case["id"] for case in kept))
        # A private folder for tests, because other pytest runs clear the default one during this long run.
        words = f"-m pytest -q -n 3 --basetemp={folder}/tests -o timeout=7200 -p benchmarks.proof"
        command = [sys.executable, *words.split(), "-m", "proof or slurm", *paths]
        suites = os.environ.get(CHOICE) or ",".join(GENERATIONS)
        environment = {**os.environ, PASSED: str(passed), CASES: str(REPORT), CHOICE: suites}
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C also reaches pytest, which then ends its tests
            process.wait()
        return process.wait(), recorded_cases(offset)


class CaseRecorder:
    """Plugin for pytest's main process that writes every case when its test ends."""

    def __init__(self) -> None:
        self._cases: dict[str, Case] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        new = {"id": report.nodeid, "passed": True, "seconds": 0.0}
        case = self._cases.setdefault(report.nodeid, new)
        case["passed"] = case["passed"] and report.passed
        case["seconds"] += report.duration
        case["figures"] = [(name, str(value)) for name, value in report.user_properties]
        if report.when == "teardown":
            case["date"] = str(datetime.datetime.now(datetime.UTC).date())
            with Path(os.environ[CASES]).open("a") as stream:
                stream.write(json.dumps(case) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(CaseRecorder())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that passed; `--deselect` would also deselect every test whose name begins with one of theirs."""
    passed = set(Path(os.environ[PASSED]).read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--again", nargs="*", metavar="PATH", help="continue the previous run")
    which.add_argument("--only", nargs="+", metavar="PATH", help="leave all other rows of the page unchanged")
    options = parser.parse_args()
    if options.again is None and options.only is None:
        REPORT.unlink(missing_ok=True)
    kept = earlier(options.again) if options.again is not None else []
    code, fresh = run(kept, options.only or [])
    cases = kept + fresh
    passed = write_page((saved_results() if options.only else {}) | results(cases))
    print(f"{passed}; written to {PAGE.relative_to(ROOT)} and {PAGE.with_suffix('.json').name}")
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED and cases else int(code)


def saved_results() -> dict[str, Result]:
    """Return the results of earlier runs."""
    file = PAGE.with_suffix(".json")
    return dict(json.loads(file.read_text())["tests"]) if file.exists() else {}


def write_page(tests: dict[str, Result]) -> str:
    """Write docs/proof.json and docs/proof.md; return the number of passed cases over all tests, in words."""
    cases, passed = (sum(test[count] for test in tests.values()) for count in ("cases", "passed"))
    result = f"{passed} of {cases} passed"
    record = {"machine": machine(), "result": result, "tests": dict(sorted(tests.items()))}
    PAGE.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    members: dict[str, list[Result]] = {}
    for name, test in tests.items():
        members.setdefault(group_title(name), []).append(test)
    rows = [_row(group, members[group.title]) for group in (*GROUPS, _OTHER) if group.title in members]
    PAGE.write_text(HEAD.format(machine=machine(), result=result) + "\n".join(rows) + "\n")
    PAGE.with_name("slurm-versions.md").write_text(slurm_versions.page(tests))
    return result


def group_title(name: str) -> str:
    """Return the title of a test's group."""
    found = [(len(start), group.title) for group in GROUPS for start in group.tests.split() if name.startswith(start)]
    return max(found)[1] if found else _OTHER.title


def _row(group: ProofGroup, tests: list[Result]) -> str:
    cases, passed = (sum(test[count] for test in tests) for count in ("cases", "passed"))
    dates = sorted({test["date"] for test in tests})
    date = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"| {group.title} | {cases:,} | {passed:,} | {date} | {_figure(group, tests)} |"


def _figure(group: ProofGroup, tests: list[Result]) -> str:
    found = [
        value
        for test in tests
        for name, values in test["figures"].items()
        if group.label and name.startswith(group.figures or group.label)
        for value in (values if isinstance(values, list) else [str(values)])
    ]
    return f"{group.label}: {group.summary(found)}" if found else ""


if __name__ == "__main__":
    sys.exit(main())
