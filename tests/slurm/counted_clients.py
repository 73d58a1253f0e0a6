"""Slurm's client programs behind wrappers that record each call."""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

CLIENTS = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo", "sacctmgr", "sshare", "sprio")
EFFECTS = frozenset({"sbatch", "scancel"})
WRAPPER = """#!/bin/sh
echo "$(date +%s.%N) {name} $*" >> {log}
[ -e {folder}/{name}.first ] && . {folder}/{name}.first
exec {real} "$@"
"""


@dataclass(frozen=True)
class Call:
    """One call of a client: its time in seconds since the epoch, its name and its arguments."""

    time: float
    name: str
    arguments: str


class CountedClients:
    """Wrappers in a folder, for the front of PATH."""

    def __init__(self, folder: Path, path: str) -> None:
        self.folder, self._log = folder, folder / "calls"
        folder.mkdir()
        self.path = f"{folder}{os.pathsep}{path}"
        for name in CLIENTS:
            if real := shutil.which(name, path=path):
                program = folder / name
                program.write_text(WRAPPER.format(name=name, log=self._log, folder=folder, real=real))
                program.chmod(0o755)

    def before(self, name: str, script: str) -> None:
        """Run these shell commands before each call of a client."""
        path = self.folder / f".{name}"
        path.write_text(script)
        path.rename(self.folder / f"{name}.first")

    def calls(self, since: float = 0.0) -> list[Call]:
        """Return the calls since a time in seconds since the epoch."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        rows = [line.split(" ", 2) for line in lines]
        found = [Call(float(row[0]), row[1], row[2] if len(row) > 2 else "") for row in rows if len(row) > 1]
        return [call for call in found if call.time >= since]

    def queries(self, since: float) -> list[Call]:
        """Return the calls that change nothing."""
        return [call for call in self.calls(since) if call.name not in EFFECTS]

    def rate(self, since: float) -> float:
        """Return the queries per minute since a time."""
        return 60.0 * len(self.queries(since)) / (time.time() - since)
