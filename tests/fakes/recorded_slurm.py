"""Recorded output of the clients of three Slurm versions (`tests/slurm/record_client_output.py`)."""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from orchestrator.scheduler.slurm.command_output import SACCT_FIELDS, SEPARATOR, SQUEUE_FIELDS

VERSIONS = ("22.05", "24.11", "26.05")
Row = dict[str, str]


class RecordedSlurm:
    """Answers of one version as text; jobs are identified by their submitted names."""

    def __init__(self, version: str) -> None:
        self._path = Path(__file__).parent / "slurm_output" / f"{version}.json"

    @cached_property
    def _record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._path.read_text())
        return found

    @cached_property
    def asked(self) -> dict[str, Any]:
        """Return single answers by question."""
        return dict(self._record["asked"])

    def job_id(self, name: str) -> str:
        return next(row["JobID"] for row in self._record["queue"] if row["Name"] == name)

    def queue(self, wanted: Callable[[Row], bool] = lambda row: True) -> str:
        """Return squeue's answer with padded columns."""
        rows = [row for row in self._record["queue"] + self._record["queue later"] if wanted(row)]
        # The records are older than the column StartTime.
        lines = (
            "".join(f"{row.get(name, 'N/A'):<{width}}{SEPARATOR}" for name, width in SQUEUE_FIELDS) for row in rows
        )
        return "".join(f"{line}\n" for line in lines)

    def accounting(self, wanted: Callable[[Row], bool] = lambda row: True) -> str:
        """Return sacct's answer."""
        rows = [row for row in self._record["accounting"] + self._record["accounting later"] if wanted(row)]
        return "".join("".join(f"{row[name]}{SEPARATOR}" for name in SACCT_FIELDS) + "\n" for row in rows)
