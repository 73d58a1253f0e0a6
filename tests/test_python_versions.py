"""The tests with every promised version of Python, and with the lowest and highest promised versions of torch."""

import json
import re
from collections.abc import Callable, Iterator

import pytest

from tests.debian_suites import SuiteError
from tests.python_versions import ROOT, VERSIONS, InstalledRow, VersionRow, installed
from tests.test_dependencies import PROJECT

SELECTION = (
    "tests/orchestrator", "tests/checkpointing", "tests/public_api", "tests/trainer/models", "tests/trainer/parallel",
    "tests/trainer/protocol",
)  # fmt: skip
"""Tests that run with each row, as far as they are fast."""
DEMO = """
export ORCH_HOME=$(mktemp -d)
orch demo "$@" --json --timeout 600
code=$?
orch controller stop >/dev/null
rm -rf "$ORCH_HOME"
exit $code
"""
"""A run of two nodes with two ranks each, of which one is killed."""
SHOWN = 4000
"""Characters of a failed run's output."""


@pytest.fixture(params=VERSIONS, ids=lambda row: row.name)
def versions(request: pytest.FixtureRequest) -> Iterator[InstalledRow]:
    row: VersionRow = request.param
    try:
        with installed(row) as made:
            yield made
    except SuiteError as error:
        pytest.skip(f"no Python {row.python} with torch {row.torch}: {error}")


@pytest.mark.proof
@pytest.mark.timeout(7200)
def test_all_rows_pass(versions: InstalledRow, record_property: Callable[[str, object], None]) -> None:
    words = (
        "python",
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        "-m",
        "not proof and not slurm and not multi",
    )
    done = versions.run(*words, *SELECTION, seconds=5400)
    assert done.returncode == 0, done.stdout[-SHOWN:] + done.stderr[-SHOWN:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout.splitlines()[-1])
    record_property(f"tests passed with {actual(versions)}", int(passed))


@pytest.mark.proof
@pytest.mark.timeout(2400)
def test_a_killed_run_recovers(versions: InstalledRow, record_property: Callable[[str, object], None]) -> None:
    done = versions.run("sh", "-c", DEMO, "sh", *versions.row.demo, seconds=900)
    assert done.returncode == 0, done.stdout[-SHOWN:] + done.stderr[-SHOWN:]
    answer = json.loads(done.stdout)["data"]
    assert (answer["state"], answer["story"]["tier"]) == ("SUCCEEDED", "memory")
    record_property(f"recovery with {actual(versions)}", f"{answer['story']['recovery_s']:.1f} s")


def test_the_promise_is_what_the_rows_test() -> None:
    prefix = "Programming Language :: Python :: "
    classifiers = {text.removeprefix(prefix) for text in PROJECT["classifiers"] if text.startswith(prefix)}
    pythons, torches = (
        {tuple(map(int, text.split("."))) for text in texts}
        for texts in ([row.python for row in VERSIONS], [row.torch for row in VERSIONS])
    )
    assert classifiers == {f"{major}.{minor}" for major, minor in pythons}
    assert PROJECT["requires-python"] == ">={}.{}".format(*min(pythons))
    (least, (major, minor)) = min(torches), max(torches)
    assert "torch>={}.{},<{}.{}".format(*least, major, minor + 1) in PROJECT["dependencies"]
    words = ", ".join(sorted(classifiers)[:-1]) + f" and {max(classifiers)}"
    sentence = f"Python {words}, and torch {least[0]}.{least[1]} to {major}.{minor}."
    assert sentence in (ROOT / "README.md").read_text()


def actual(versions: InstalledRow) -> str:
    """Return the versions that run, which must be those of the row."""
    program = "import platform, torch; print(platform.python_version(), torch.__version__)"
    python, torch = versions.run("python", "-W", "ignore", "-c", program, seconds=120).stdout.split()
    assert python.startswith(f"{versions.row.python}.")
    assert torch.startswith(f"{versions.row.torch}.")
    return f"Python {python} and torch {torch}"
