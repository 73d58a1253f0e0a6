"""Runs every test marked `proof` and writes what it showed to docs/proof.md: `make proof`."""

import datetime
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as Xml
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "proof.md"
HEAD = """# Proof

What the long counts of the seeded proofs showed, the last time they ran (`make proof`).
`make test` runs a seeded sample of each.

- date: {date}
- machine: {machine}
- result: {result}

| proof | result | seconds | figures |
|---|---|---|---|
"""


def machine() -> str:
    """System, processor count and Python, without the host's name."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def row(case: Xml.Element) -> str:
    """One line of the table; figures are what the test recorded as properties."""
    figures = ", ".join(f"{item.get('name')}: {item.get('value')}" for item in case.iter("property"))
    bad = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), None)
    name = str(case.get("name")).removeprefix("test_").replace("_", " ")
    return f"| {name} | {bad or 'passed'} | {float(case.get('time', 0)):.0f} | {figures} |"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "proof", f"--junitxml={report}", "-o", "timeout=7200"]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        cases = list(Xml.parse(report).iter("testcase"))
    passed = sum(1 for case in cases if not len(case.findall("failure") + case.findall("error")))
    head = HEAD.format(
        date=datetime.datetime.now(datetime.UTC).date(), machine=machine(), result=f"{passed} of {len(cases)} passed"
    )
    TARGET.write_text(head + "\n".join(row(case) for case in cases) + "\n")
    print(f"{passed} of {len(cases)} passed; written to {TARGET.relative_to(ROOT)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
