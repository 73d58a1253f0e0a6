"""Run of every test marked `proof`, with the results in docs/proof.json and a summary in docs/proof.md: `make proof`.

    python -m benchmarks.proof [--again [PATH ...] | --only PATH ...]

It takes hours, so an interrupted or failed run can be continued: `--again` runs the tests that have not passed yet, and
repeats those below the PATHs, and keeps the other results. `--only` runs the tests below the PATHs, and leaves the
results of all other tests unchanged: each has the date of its run.
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
import xml.etree.ElementTree as Xml
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "proof.md"
PASSED = "ORCH_PROOF_PASSED"
"""Environment variable with the path of a file that lists the deselected tests, one per line."""
REPORT = ROOT / "build" / "proof.xml"
HEAD = """# Proof

Results of the long tests (`make proof`), one row per group. [proof.json](proof.json) has the figures of every test.
`make test` runs a seeded sample of them.

- machine: {machine}
- result: {result}

| group | cases | passed | date | figure |
|---|---|---|---|---|
"""

Result = dict[str, Any]
"""Result of a test: numbers of cases and of passed ones, seconds, date, and its figures by name."""


def _total(values: list[str]) -> str:
    """Return the sum of whole numbers, or of both parts of `3 of 4`."""
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


@dataclass(frozen=True, kw_only=True)
class Group:
    """A row of the page."""

    title: str
    tests: tuple[str, ...]
    """Beginnings of the tests' ids; the longest one that matches decides."""
    label: str = ""
    figures: str = ""
    """Beginning of the names of the figures that the row summarizes."""
    summary: Callable[[list[str]], str] = _total


_WATCH = "tests/trainer/agent/watch/"
_BLAME = "tests/trainer/agent/blame/"
GROUPS = (
    Group(
        title="damaged checkpoints are refused, intact ones load",
        tests=("tests/checkpointing/engine/restore/test_corruption", "tests/checkpointing/proofs/test_corruption"),
        label="faults refused with the model untouched",
        figures="faults refused",
    ),
    Group(
        title="crashes and disk errors during a save lose no committed checkpoint",
        tests=("tests/checkpointing/",),
        label="kills of ranks, writers and jobs",
        figures="times the ",
    ),
    Group(
        title="malicious files run no code",
        tests=("tests/checkpointing/proofs/test_no_code",),
        label="malicious files read",
        figures="malicious files read",
    ),
    Group(
        title="any layout restores any checkpoint, also with plain torch",
        tests=("tests/checkpointing/engine/restore/test_layouts", "tests/checkpointing/proofs/test_interop"),
    ),
    Group(
        title="restore tests find damage and pass intact checkpoints",
        tests=(
            "tests/trainer/worker/restore_test/",
            "tests/slurm/test_restore_tests",
            "tests/end_to_end/test_restore_tests",
        ),
        label="damaged checkpoints found",
        figures="damaged checkpoints",
    ),
    Group(
        title="killed and rolled-back runs end with equal bits",
        tests=("tests/trainer/worker/",),
    ),
    Group(
        title="all layouts train like one rank",
        tests=("tests/trainer/parallel/apply/", "tests/trainer/parallel/pipeline/"),
        label="largest relative difference of 20 losses",
        figures="largest relative difference of 20 losses",
        summary=_largest,
    ),
    Group(
        title="memory is as the formula predicts",
        tests=(
            "tests/trainer/worker/memory/",
            "tests/trainer/parallel/pipeline/test_stage_memory",
            "tests/trainer/parallel/apply/test_expert_runs.py::test_peaks",
        ),
        label="peak of a step, measured / formula",
        figures="peak of a step",
        summary=_range,
    ),
    Group(
        title="hangs are detected in time, with the right rank and kind",
        tests=(_WATCH, _BLAME, "tests/trainer/agent/flight/"),
        label="simulated hangs",
        figures="simulated hangs",
    ),
    Group(
        title="healthy runs raise no false alarm",
        tests=(
            f"{_WATCH}test_hangs.py::test_four_hundred",
            f"{_WATCH}test_staged_jobs.py::test_four_hundred",
            f"{_BLAME}test_no_false_alarm",
        ),
        label="simulated hours",
        figures="simulated hours",
    ),
    Group(
        title="stragglers are named",
        tests=(f"{_WATCH}test_stragglers", f"{_BLAME}test_slow_stages"),
        label="healthy runs of 1,000 steps with a rank named",
        figures="false names",
    ),
    Group(title="faults in simulated clusters", tests=("tests/scenarios/",)),
    Group(title="faults on a real Slurm of four nodes", tests=("tests/slurm/",)),
    Group(
        title="faults on one machine",
        tests=("tests/end_to_end/", "tests/orchestrator/", "tests/trainer/agent/"),
    ),
    Group(
        title="unchanged training scripts as a `command:`",
        tests=(
            "tests/slurm/test_commands",
            "tests/end_to_end/test_commands",
            "tests/end_to_end/test_examples",
            "tests/trainer/agent/test_command_programs",
        ),
    ),
    Group(
        title="suggestions for layouts that do not fit are accepted",
        tests=("tests/trainer/parallel/", "tests/orchestrator/config/"),
    ),
    Group(
        title="packaging and dependencies",
        tests=("tests/end_to_end/test_wheel", "tests/test_"),
    ),
)
_OTHER = Group(title="others", tests=())


def machine() -> str:
    """Return system, processor count and Python version, without the host's name."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def results(cases: Iterable[Xml.Element]) -> dict[str, Result]:
    """Return the results by test, with the cases of all its parameters counted."""
    tests: dict[str, list[Xml.Element]] = {}
    for case in cases:
        tests.setdefault(node_id(case).partition("[")[0], []).append(case)
    today = str(datetime.datetime.now(datetime.UTC).date())
    return {
        name: {
            "cases": len(members),
            "passed": sum(map(good, members)),
            "seconds": round(sum(float(case.get("time", 0)) for case in members)),
            "date": today,
            "figures": figures(members),
        }
        for name, members in tests.items()
    }


def figures(cases: list[Xml.Element]) -> dict[str, int | list[str]]:
    """Return the cases' recorded figures: a sum of whole numbers, since the cases share a count; else every value."""
    found: dict[str, list[str]] = {}
    for item in (item for case in cases for item in case.iter("property")):
        found.setdefault(str(item.get("name")), []).extend(str(item.get("value")).splitlines())
    return {
        name: sum(map(int, values)) if all(value.isdigit() for value in values) else list(dict.fromkeys(values))
        for name, values in found.items()
    }


def good(case: Xml.Element) -> bool:
    return not any(child.tag in ("failure", "error", "skipped") for child in case)


def node_id(case: Xml.Element) -> str:
    """Return the name by which pytest selects the case."""
    file = str(case.get("file"))
    classes = str(case.get("classname")).removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
    return "::".join([file, *([classes] if classes else []), str(case.get("name"))])


def earlier(paths: list[str]) -> list[Xml.Element]:
    """Return the cases that passed in the previous run, except below these paths."""
    if not REPORT.exists():
        return []
    paths = [os.path.relpath(path, ROOT) for path in paths]
    cases = [case for case in Xml.parse(REPORT).iter("testcase") if good(case) and case.get("file")]
    return [case for case in cases if not any(str(case.get("file")).startswith(path) for path in paths)]


def run(kept: list[Xml.Element], paths: list[str]) -> tuple[int, list[Xml.Element]]:
    """Run the tests below `paths` (none: all) except `kept`; return pytest's exit code and its cases."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "3",
            "-m",
            "proof",
            f"--junitxml={report}",
            # Private, because other pytest runs clear the default folder during this half-hour run.
            f"--basetemp={folder}/tests",
            "-o",
            "timeout=7200",
            "-o",
            "junit_family=xunit1",  # the newer one has no properties of cases
            "-p",
            "benchmarks.proof",
            *paths,
        ]
        passed = Path(folder) / "passed"
        passed.write_text("\n".join(map(node_id, kept)))
        # Ctrl-C also reaches pytest, which then writes its results so far.
        with (
            contextlib.suppress(KeyboardInterrupt),
            subprocess.Popen(command, cwd=ROOT, env={**os.environ, PASSED: str(passed)}) as process,
        ):
            process.wait()
        return process.returncode, list(Xml.parse(report).iter("testcase"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect passed tests; `--deselect` would also deselect every test whose name begins with one of theirs."""
    passed = set(Path(os.environ[PASSED]).read_text().splitlines())
    kept = [item for item in items if item.nodeid in passed]
    items[:] = [item for item in items if item.nodeid not in passed]
    config.hook.pytest_deselected(items=kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--again", nargs="*", metavar="PATH", help="go on with the run before")
    which.add_argument("--only", nargs="+", metavar="PATH", help="leave all other rows of the page as they are")
    options = parser.parse_args()
    kept = earlier(options.again) if options.again is not None else []
    code, fresh = run(kept, options.only or [])
    cases = kept + fresh
    if not options.only:
        _write_report(cases)
    passed = write_page((saved_results() if options.only else {}) | results(cases))
    print(f"{passed}; written to {PAGE.relative_to(ROOT)} and {PAGE.with_suffix('.json').name}")
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED and cases else int(code)


def _write_report(cases: list[Xml.Element]) -> None:
    suite = Xml.Element("testsuite")
    suite.extend(cases)
    REPORT.parent.mkdir(exist_ok=True)
    Xml.ElementTree(suite).write(REPORT)


def saved_results() -> dict[str, Result]:
    """Return the results of earlier runs."""
    file = PAGE.with_suffix(".json")
    return dict(json.loads(file.read_text())["tests"]) if file.exists() else {}


def write_page(tests: dict[str, Result]) -> str:
    """Write docs/proof.json and docs/proof.md; return the number of passed cases in all tests, in words."""
    cases, passed = (sum(test[count] for test in tests.values()) for count in ("cases", "passed"))
    result = f"{passed} of {cases} passed"
    record = {"machine": machine(), "result": result, "tests": dict(sorted(tests.items()))}
    PAGE.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    members: dict[str, list[Result]] = {}
    for name, test in tests.items():
        members.setdefault(group_title(name), []).append(test)
    rows = [_row(group, members[group.title]) for group in (*GROUPS, _OTHER) if group.title in members]
    PAGE.write_text(HEAD.format(machine=machine(), result=result) + "\n".join(rows) + "\n")
    return result


def group_title(name: str) -> str:
    """Return the title of the group that has a test."""
    found = [(len(start), group.title) for group in GROUPS for start in group.tests if name.startswith(start)]
    return max(found)[1] if found else _OTHER.title


def _row(group: Group, tests: list[Result]) -> str:
    cases, passed = (sum(test[count] for test in tests) for count in ("cases", "passed"))
    dates = sorted({test["date"] for test in tests})
    date = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"| {group.title} | {cases:,} | {passed:,} | {date} | {_figure(group, tests)} |"


def _figure(group: Group, tests: list[Result]) -> str:
    found = [
        value
        for test in tests
        for name, values in test["figures"].items()
        if group.figures and name.startswith(group.figures)
        for value in (values if isinstance(values, list) else [str(values)])
    ]
    return f"{group.label}: {group.summary(found)}" if found else ""


if __name__ == "__main__":
    sys.exit(main())
