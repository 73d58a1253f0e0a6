"""Time of `orch --help` and `orch status` with 10,000 runs in the registry, compared with their limits.

    python -m benchmarks.cli [--runs 10000] [--repeats 9] [--json]

Each command is started as a user starts it, in turn with a bare `python -c pass`, whose time is the lower bound of any
Python program. The median of the repeats counts. Exit code 1 if a limit is exceeded.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from orchestrator.registry.records import NewRun
from orchestrator.registry.store import Store

ORCH = [sys.executable, "-P", "-m", "orchestrator.cli.main"]
COMMANDS = {
    "python -c pass": ([sys.executable, "-c", "pass"], None),
    "orch --help": ([*ORCH, "--help"], 0.150),
    "orch status": ([*ORCH, "status"], 0.300),
    "orch status --json": ([*ORCH, "status", "--json"], 0.300),
    "orch status (terminal)": (["script", "-qec", " ".join([*ORCH, "status"]), "/dev/null"], 0.300),
}


def seed_registry(path: Path, runs: int) -> None:
    """Create a registry with `runs` runs, each with an attempt, two generations and a checkpoint, through plain SQL.

    The first run is created through the store, so that the tables are the real ones; the others are copies of it.
    """
    import sqlite3

    with Store.open(path) as store:
        digest = store.put_config({"train": {"steps": 200}})
        new = NewRun(
            slug="bench", cluster="local", root=path.parent, config_digest=digest, total_steps=200, identity={}
        )
        run, _ = store.create_run(new, now=time.time(), nonce="0" * 8)
    connection = sqlite3.connect(path)
    with connection:
        _copies(connection, run.name, runs - 1)
    connection.close()


def _copies(connection: object, name: str, more: int) -> None:
    import sqlite3

    assert isinstance(connection, sqlite3.Connection)
    connection.row_factory = sqlite3.Row
    run = dict(connection.execute("SELECT * FROM runs WHERE name = ?", (name,)).fetchone())
    attempt = dict(connection.execute("SELECT * FROM attempts WHERE run = ?", (name,)).fetchone())
    for index in range(2, more + 2):
        copy = f"bench-{index}"
        _insert(connection, "runs", {**run, "id": run["id"] + index, "name": copy, "run_dir": f"/runs/{copy}"})
        _insert(connection, "attempts", {**attempt, "run": copy, "job_name": f"orch-{copy}-1", "nodes": '["n1","n2"]'})
        for number in (1, 2):
            generation = {"run": copy, "attempt": 1, "number": number, "started_at": 1.0, "reason": ""}
            _insert(connection, "generations", generation)
        saved = {"run": copy, "name": "step-1", "step": 100, "attempt": 1, "trust": "COMMITTED", "bytes": 1}
        _insert(connection, "checkpoints", {**saved, "path": "/", "committed_at": 1.0, "reason": ""})


def _insert(connection: object, table: str, row: dict[str, object]) -> None:
    marks = ", ".join("?" * len(row))
    connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))  # type: ignore[attr-defined]


def measure(environment: dict[str, str], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every command, `repeats` times, interleaved so that a slow moment affects all."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeats):
        for name, (words, _limit) in COMMANDS.items():
            started = time.perf_counter()
            subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seed_registry(Path(folder) / "registry.db", options.runs)
        environment = {**os.environ, "ORCH_HOME": folder}
        measure(environment, 1)  # caches of the file system and of bytecode
        seconds = measure(environment, max(7, options.repeats))
    floor = statistics.median(seconds["python -c pass"])
    rows = [
        {
            "command": name, "median_ms": round(1000 * statistics.median(times), 1),
            "min_ms": round(1000 * min(times), 1), "max_ms": round(1000 * max(times), 1),
            "limit_ms": None if (limit := COMMANDS[name][1]) is None else round(1000 * limit),
            "of_limit": None if limit is None else round(statistics.median(times) / limit, 2),
            "times_python": round(statistics.median(times) / floor, 1),
        }
        for name, times in seconds.items()
    ]  # fmt: skip
    report(rows, options.runs, len(seconds["orch status"]), as_json=options.json)
    return int(any(row["of_limit"] is not None and float(row["of_limit"]) > 1 for row in rows))


def report(rows: list[dict[str, Any]], runs: int, repeats: int, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"benchmark": "cli", "runs": runs, "repeats": repeats, "cores": os.cpu_count(), "rows": rows}))
        return
    print(f"{runs} runs in the registry, median of {repeats}, {os.cpu_count()} cores")
    print(f"{'command':<24} {'median':>9} {'min':>9} {'max':>9} {'limit':>8} {'of limit':>9} {'x python':>9}")
    for row in rows:
        limit = "-" if row["limit_ms"] is None else f"{row['limit_ms']} ms"
        share = "-" if row["of_limit"] is None else f"{row['of_limit']}"
        times = " ".join(f"{row[key]:>6} ms" for key in ("median_ms", "min_ms", "max_ms"))
        print(f"{row['command']:<24} {times} {limit:>8} {share:>9} {row['times_python']:>9}")


if __name__ == "__main__":
    sys.exit(main())
