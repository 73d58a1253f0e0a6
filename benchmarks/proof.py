"""Runs every test marked `proof` and writes what it showed to docs/proof.md: `make proof`.

    python -m benchmarks.proof [--again [PATH ...] | --only PATH ...]

It takes hours, so a run that was interrupted, or in which something failed, can be gone on with: `--again` runs what
has not passed yet, and once more what lies below the PATHs, and keeps the other results. `--only` runs what lies below
the PATHs, and leaves the rows of all other tests on the page as they are: each row has the date of its run.
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
"""Names the file with the tests that are left out, one a line."""
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
    """System, processor count and Python, without the host's name."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def rows(cases: list[Xml.Element]) -> dict[str, str]:
    """One line for each test, its parameters counted; figures are what the tests recorded as properties."""
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
    """The lines of the table on a page of an earlier run, by name."""
    lines = [line for line in page.splitlines() if line.startswith("| ") and line.count(" | ") >= _COLUMNS - 1]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines[1:]}


def pictures_of_page(page: str) -> dict[str, str]:
    """What stands below the table of an earlier run, by heading."""
    parts = [f"\n## {part.rstrip()}" for part in page.split("\n## ")[1:]]
    return {part.split("\n")[1]: part for part in parts}


def figures(cases: list[Xml.Element]) -> str:
    """What the cases recorded; whole numbers of one name are added up, since the cases share a count out."""
    found: dict[str, list[str]] = {}
    for item in (item for case in cases for item in case.iter("property")):
        if "\n" in str(item.get("value")):
            continue
        found.setdefault(str(item.get("name")), []).append(str(item.get("value")))
    return "; ".join(f"{name}: {_total(values)}" for name, values in found.items())


def pictures(cases: list[Xml.Element]) -> dict[str, str]:
    """What the cases recorded in several lines, by heading: shown below the table, as it is."""
    found = [item for case in cases for item in case.iter("property") if "\n" in str(item.get("value"))]
    return {f"## {item.get('name')}": f"\n## {item.get('name')}\n\n```\n{item.get('value')}\n```" for item in found}


def _total(values: list[str]) -> str:
    if all(value.isdigit() for value in values):
        return str(sum(map(int, values)))
    return ", ".join(dict.fromkeys(values))


def good(case: Xml.Element) -> bool:
    return not any(child.tag in ("failure", "error", "skipped") for child in case)


def node_id(case: Xml.Element) -> str:
    """The name by which pytest selects it."""
    file = str(case.get("file"))
    classes = str(case.get("classname")).removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
    return "::".join([file, *([classes] if classes else []), str(case.get("name"))])


def earlier(paths: list[str]) -> list[Xml.Element]:
    """What has passed in the run before, but for what lies below these paths."""
    if not REPORT.exists():
        return []
    paths = [os.path.relpath(path, ROOT) for path in paths]
    cases = [case for case in Xml.parse(REPORT).iter("testcase") if good(case) and case.get("file")]
    return [case for case in cases if not any(str(case.get("file")).startswith(path) for path in paths)]


def run(kept: list[Xml.Element], paths: list[str]) -> tuple[int, list[Xml.Element]]:
    """Run all below `paths` (none: everywhere) but `kept`; pytest's exit code, and its cases."""
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
            # Of its own: other runs of pytest clear the usual place away while this one takes its half hour.
            f"--basetemp={folder}/tests",
            "-o",
            "timeout=7200",
            "-o",
            "junit_family=xunit1",  # the newer one knows no properties of cases
            "-p",
            "benchmarks.proof",
            *paths,
        ]
        passed = Path(folder) / "passed"
        passed.write_text("\n".join(map(node_id, kept)))
        # Ctrl-C reaches pytest too, which then writes what it has.
        with (
            contextlib.suppress(KeyboardInterrupt),
            subprocess.Popen(command, cwd=ROOT, env={**os.environ, PASSED: str(passed)}) as process,
        ):
            process.wait()
        return process.returncode, list(Xml.parse(report).iter("testcase"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has passed: `--deselect` would also leave out every test whose name begins with one of those."""
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
    """Write docs/proof.md; how many cases of all rows passed."""
    counts = [tuple(map(int, line.split(" | ")[1:3])) for line in lines.values()]
    passed = f"{sum(good for _, good in counts)} of {sum(every for every, _ in counts)} passed"
    head = HEAD.format(machine=machine(), result=passed)
    TARGET.write_text(head + "\n".join([*(line for _, line in sorted(lines.items())), *more.values()]) + "\n")
    return passed


if __name__ == "__main__":
    sys.exit(main())
