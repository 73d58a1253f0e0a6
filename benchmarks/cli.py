"""Times of `orch --help` and `orch status` with 10,000 runs in the registry, compared with their limits.

    python -m benchmarks.cli [--runs 10000] [--rounds 9] [--rows PATTERN,...] [--json] [--list]

Each command is started as a user starts it, alternating with a bare `python -c pass`, whose time is the lower bound for
any Python program. The figure is the median over the rounds. The exit code is 1 if a limit is exceeded.
"""

import argparse
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner import LEAST_ROUNDS, Result, Row, run_table
from orchestrator.registry.records import NewRun
from orchestrator.registry.store import Store

ORCH = [sys.executable, "-P", "-m", "orchestrator.cli.main"]


def _row(name: str, text: str, words: Sequence[str], limit: float | None) -> Row:
    return Row(name=name, text=text, must=limit, unit="s", source=words)


ROWS = (
    _row("python", "python -c pass", [sys.executable, "-c", "pass"], None),
    _row("help", "orch --help", [*ORCH, "--help"], 0.150),
    _row("status", "orch status", [*ORCH, "status"], 0.300),
    _row("json", "orch status --json", [*ORCH, "status", "--json"], 0.300),
    _row(
        "terminal",
        "orch status (terminal)",
        ["script", "-qec", " ".join([*ORCH, "status"]), "/dev/null"],
        0.300,
    ),
)


def seed_registry(path: Path, runs: int) -> None:
    """Create a registry with `runs` runs, each with an attempt, two generations and a checkpoint, through plain SQL.

    The first run is created through the store, so that the tables are the real ones; the others are copies of it.
    """
    with Store.open(path) as store:
        digest = store.put_config({"train": {"steps": 200}})
        new = NewRun(
            slug="bench", cluster="local", root=path.parent, config_digest=digest, total_steps=200, identity={}
        )
        first, _ = store.create_run(new, now=time.time(), nonce="0" * 8)
    connection = sqlite3.connect(path)
    connection.row_factory = sqlite3.Row
    with connection:
        run = dict(connection.execute("SELECT * FROM runs WHERE name = ?", (first.name,)).fetchone())
        attempt = dict(connection.execute("SELECT * FROM attempts WHERE run = ?", (first.name,)).fetchone())
        for index in range(2, runs + 1):
            name = f"bench-{index}"
            _insert(connection, "runs", {**run, "id": run["id"] + index, "name": name, "run_dir": f"/runs/{name}"})
            job = {"run": name, "job_name": f"orch-{name}-1", "nodes": '["n1","n2"]'}
            _insert(connection, "attempts", {**attempt, **job})
            for number in (1, 2):
                generation = {"run": name, "attempt": 1, "number": number, "started_at": 1.0, "reason": ""}
                _insert(connection, "generations", generation)
            saved = {"run": name, "name": "step-1", "step": 100, "attempt": 1, "trust": "COMMITTED", "bytes": 1}
            _insert(connection, "checkpoints", {**saved, "path": "/", "committed_at": 1.0, "reason": ""})
    connection.close()


def _insert(connection: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> None:
    marks = ", ".join("?" * len(row))
    connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))


def measure(rows: Sequence[Row], options: argparse.Namespace) -> Iterator[tuple[Row, Result]]:
    """Time every command, interleaved so that a slow moment affects all of them."""
    selected = [ROWS[0], *(row for row in rows if row is not ROWS[0])]
    seconds: dict[str, list[float]] = {row.name: [] for row in selected}
    with tempfile.TemporaryDirectory() as folder:
        seed_registry(Path(folder) / "registry.db", options.runs)
        environment = {**os.environ, "ORCH_HOME": folder}
        for number in range(max(LEAST_ROUNDS, options.rounds) + 1):
            for row in selected:
                started = time.perf_counter()
                subprocess.run(row.source, env=environment, check=True, capture_output=True)
                if number:  # the first round fills the file system and bytecode caches
                    seconds[row.name].append(time.perf_counter() - started)
    floor = statistics.median(seconds["python"])
    for row in selected:
        note = f"{statistics.median(seconds[row.name]) / floor:.1f} x python; {options.runs} runs in the registry"
        yield row, Result(values=seconds[row.name], notes=[note])


if __name__ == "__main__":
    runs = {"type": int, "default": 10_000}
    sys.exit(run_table("cli", __doc__, ROWS, measure, rounds=9, options={"--runs": runs}))
