"""Malicious pickles in every file of a checkpoint, sealed again or not: none of them runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.warm_root import start_warm

ROOT = Path(__file__).resolve().parents[3]


def read_under_audit(place: Path, every: int) -> dict[str, Any]:
    """Run the program over every `every`-th combination of payload, file and seal."""
    done = start_warm(
        "tests.checkpointing.proofs.untrusted_program:main", [str(place), str(every)],
        environ={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    # The report is the last line: payloads that plain DCP runs print lines of their own.
    reported: dict[str, Any] = json.loads(done.stdout.read().splitlines()[-1])
    done.communicate(30.0)
    assert reported["usual"].get("loaded") == 2, "the healthy one loads under the same watch"
    assert reported["outcomes"]["refused"] > 0
    assert reported["ran_under_dcp"] > 0, "payloads that run nowhere prove nothing"
    return reported


def test_a_sample_of_malicious_pickles_runs_nothing(tmp_path: Path) -> None:
    assert read_under_audit(tmp_path, 41)["tried"] > 25


@pytest.mark.proof
def test_no_malicious_pickle_in_any_file_runs(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    reported = read_under_audit(tmp_path, 1)
    record_property("malicious files read, none of which ran", reported["tried"])
    record_property("of the same in .metadata and shards, plain DCP ran", reported["ran_under_dcp"])
