"""Page about Slurm versions, from the results of tests/slurm/test_slurm_versions.py in docs/proof.json."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.slurm.suites import CASES_ON, SUITES

TESTS = "tests/slurm/test_slurm_versions.py"
HEAD = """# Slurm versions

`make proof` runs all Slurm tests on real Slurms of these versions, and writes this page from its results
([proof.json](proof.json)). `make test` runs a sample on the newest one. A cell shows the run's last state, the ends
of its attempts in order, and how many jobs Slurm had for them: one for each attempt. After a killed rank, a node's
death and a preemption, losses and final weights equal those of an undisturbed run, bit for bit.

"""


def page(tests: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page for these results by test."""
    events = {
        name: tests[test]["figures"]
        for name in re.findall(r"^def test_(\w+)", (Path(__file__).parents[1] / TESTS).read_text(), re.MULTILINE)
        if (test := f"{TESTS}::test_{name}") in tests
    }
    versions = sorted({version for found in events.values() for version in found if version.startswith("Slurm ")})
    lines = [_row("event", versions), _row("---", ["---"] * len(versions))]
    for name, found in events.items():
        lines.append(_row(name.replace("_", " "), ["<br>".join(found.get(one, ["failed"])) for one in versions]))
    return HEAD + "\n".join(lines) + "\n\n" + _counts(tests)


def _row(first: str, cells: list[str]) -> str:
    return f"| {' | '.join([first, *cells])} |"


def _counts(tests: Mapping[str, Mapping[str, Any]]) -> str:
    """Return one line about all Slurm tests that record their suite."""
    names = {CASES_ON.format(suite=suite): suite for suite in SUITES}
    found = [test for test in tests.values() if names.keys() & test["figures"].keys()]
    counts = {suite: sum(test["figures"].get(name, 0) for test in found) for name, suite in names.items()}
    words = ", ".join(f"{count} on {suite}" for suite, count in counts.items() if count)
    cases, passed = (sum(test[count] for test in found) for count in ("cases", "passed"))
    return f"Slurm tests run so far: {passed} of {cases} cases passed ({words}).\n"
