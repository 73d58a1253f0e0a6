"""Run of every test marked `proof`, with the results in docs/proof.md: `make proof`.

    python -m benchmarks.proof [--again [PATH ...] | --only PATH ...]

It takes hours, so an interrupted or failed run can be continued: `--again` runs the tests that have not passed yet, and
repeats those below the PATHs, and keeps the other results. `--only` runs the tests below the PATHs, and leaves the rows
of all other tests on the page unchanged: each row has the date of its run.
"""

import argparse
import contextlib
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as Xml
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "proof.md"
PASSED = "ORCH_PROOF_PASSED"
"""Environment variable with the path of a file that lists the deselected tests, one per line."""
REPORT = ROOT / "build" / "proof.xml"
HEAD = """# Proof

What the long counts of the seeded proofs showed, the last time each of them ran (`make proof`).
`make test` runs a seeded sample of each.

- machine: {machine}
- result: {result}

| proof | cases | passed | seconds | date | figures |
|---|---|---|---|---|---|
"""
_COLUMNS = 6


def machine() -> str:
    """Return system, processor count and Python version, without the host's name."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def rows(cases: list[Xml.Element]) -> dict[str, str]:
    """Return one line for each test, with its parameters counted; figures are the properties that tests recorded."""
    groups: dict[str, list[Xml.Element]] = {}
    for case in cases:
        name = str(case.get("name")).partition("[")[0].removeprefix("test_").replace("_", " ")
        groups.setdefault(name, []).append(case)
    return {name: _row(name, members) for name, members in groups.items()}


def _row(name: str, cases: list[Xml.Element]) -> str:
    bad = sum(not good(case) for case in cases)
    seconds = sum(float(case.get("time", 0)) for case in cases)
    today = datetime.datetime.now(datetime.UTC).date()
    return f"| {name} | {len(cases)} | {len(cases) - bad} | {seconds:.0f} | {today} | {figures(cases)} |"


def rows_of_page(page: str) -> dict[str, str]:
    """Return the table lines of an earlier run's page, by name."""
    lines = [line for line in page.splitlines() if line.startswith("| ") and line.count(" | ") >= _COLUMNS - 1]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines[1:]}


def pictures_of_page(page: str) -> dict[str, str]:
    """Return the sections below the table of an earlier run's page, by heading."""
    parts = [f"\n## {part.rstrip()}" for part in page.split("\n## ")[1:]]
    return {part.split("\n")[1]: part for part in parts}


def figures(cases: list[Xml.Element]) -> str:
    """Return the cases' recorded figures; whole numbers of one name are summed, since the cases share a count."""
    found: dict[str, list[str]] = {}
    for item in (item for case in cases for item in case.iter("property")):
        if "\n" in str(item.get("value")):
            continue
        found.setdefault(str(item.get("name")), []).append(str(item.get("value")))
    return "; ".join(f"{name}: {_total(values)}" for name, values in found.items())


def pictures(cases: list[Xml.Element]) -> dict[str, str]:
    """Return the cases' multi-line records by heading, shown verbatim below the table."""
    found = [item for case in cases for item in case.iter("property") if "\n" in str(item.get("value"))]
    return {f"## {item.get('name')}": f"\n## {item.get('name')}\n\n```\n{item.get('value')}\n```" for item in found}


def _total(values: list[str]) -> str:
    if all(value.isdigit() for value in values):
        return str(sum(map(int, values)))
    return ", ".join(dict.fromkeys(values))


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
    before = TARGET.read_text() if options.only else ""
    passed = write_page(rows_of_page(before) | rows(cases), pictures_of_page(before) | pictures(cases))
    print(f"{passed}; written to {TARGET.relative_to(ROOT)}")
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED and cases else int(code)


def _write_report(cases: list[Xml.Element]) -> None:
    suite = Xml.Element("testsuite")
    suite.extend(cases)
    REPORT.parent.mkdir(exist_ok=True)
    Xml.ElementTree(suite).write(REPORT)


def write_page(lines: dict[str, str], more: dict[str, str]) -> str:
    """Write docs/proof.md; return the number of passed cases in all rows, in words."""
    counts = [tuple(map(int, line.split(" | ")[1:3])) for line in lines.values()]
    passed = f"{sum(good for _, good in counts)} of {sum(every for every, _ in counts)} passed"
    head = HEAD.format(machine=machine(), result=passed)
    TARGET.write_text(head + "\n".join([*(line for _, line in sorted(lines.items())), *more.values()]) + "\n")
    return passed


if __name__ == "__main__":
    sys.exit(main())
