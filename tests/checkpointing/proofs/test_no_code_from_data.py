"""Malicious pickles in every file of a checkpoint, sealed again or not: nothing of them runs."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def read_under_audit(place: Path, every: int) -> dict[str, Any]:
    """Run the program over every `every`-th combination of payload, file and seal."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpointing.proofs.untrusted_program", str(place), str(every)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["usual"].get("loaded") == 2, "the healthy one loads under the same watch"
    assert told["outcomes"]["refused"] > 0
    assert told["ran_under_dcp"] > 0, "payloads that run nowhere prove nothing"
    return told


def test_a_sample_of_malicious_pickles_runs_nothing(tmp_path: Path) -> None:
    assert read_under_audit(tmp_path, 59)["tried"] > 25


@pytest.mark.proof
def test_no_malicious_pickle_in_any_file_runs(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    told = read_under_audit(tmp_path, 1)
    record_property("malicious files read, none of which ran", told["tried"])
    record_property("of the same in .metadata and shards, plain DCP ran", told["ran_under_dcp"])
