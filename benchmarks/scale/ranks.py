"""Resources and output of one rank in jobs of 4, 8 and 16 ranks, extrapolated to 10,000.

    python -m benchmarks.scale.ranks [--worlds 4,8,16] [--steps 40] [--json]

Real ranks on this machine, half of them on each of two nodes. "Ours" are the connections of ranks that only run the
exchanges of a save; connections that training opens over gloo use NCCL on GPUs, and one from every rank to rank 0's
store is torch's. Bytes are the growth of the attempt's files, except checkpoints and logs, by writer. Figures are
extrapolated on a line through the three sizes, connections of ours on a line through the logarithm of the ranks. Exit
code 1 if a must is missed.
"""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.recovery.job import BenchmarkRun
from benchmarks.recovery.polling import until
from benchmarks.scale.exchange import sockets
from trainer.protocol.run_dir import AttemptDir, RunDir

TARGET = 10_000
MOST_SOCKETS = 64
SETTINGS = (
    "cluster.nodes=2", "parallel.tp=1", "train.steps=100000", "train.seq_len=32", "checkpoint.every=0",
    "model.layers=1", "model.dim=32", "model.ffn_dim=64",
)  # fmt: skip
_START_SECONDS, _STEP_SECONDS = 240.0, 600.0


def newest_step(attempt: AttemptDir) -> int:
    try:
        lines = attempt.metrics.read_text().splitlines()
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (FileNotFoundError, ValueError):
        return 0


def written(attempt: AttemptDir) -> dict[str, int]:
    """Return the bytes so far by file, without the output of processes."""
    files = (path for path in attempt.path.rglob("*") if path.is_file() and attempt.logs not in path.parents)
    return {str(path.relative_to(attempt.path)): path.stat().st_size for path in files}


def by_ranks(name: str) -> bool:
    """Return whether ranks, or their threads, write this file."""
    return name.startswith(("metrics/", "events/ranks-", "outcomes/"))


def connections(rank: psutil.Process, store: int) -> dict[str, int]:
    """Count a rank's TCP connections: to rank 0's store, as the store's server, to peers, and listeners."""
    found = {"store": 0, "store server": 0, "peers": 0, "listening": 0, "unix": 0}
    for one in rank.net_connections(kind="all"):
        if one.family not in (2, 10):
            found["unix"] += 1
        elif one.status == psutil.CONN_LISTEN:
            found["listening"] += 1
        elif one.laddr.port == store:
            found["store server"] += 1
        else:
            found["store" if one.raddr and one.raddr.port == store else "peers"] += 1
    return found


def rank_processes(job: BenchmarkRun) -> dict[int, psutil.Process]:
    found = job.processes("orch-rank-")
    return {int(process.cmdline()[0].rpartition("-")[2]): process for process in found}


def sizes(world: int) -> tuple[str, ...]:
    """Return settings with one sample for each rank."""
    return (f"cluster.ranks_per_node={world // 2}", f"parallel.dp_shard={world}", f"train.batch_size={world}")


def measure(world: int, steps: int, folder: Path) -> dict[str, Any]:
    """Measure one job with this many ranks."""
    with BenchmarkRun(folder, "local", "tiny-gpt", *SETTINGS, *sizes(world), work_log=False) as job:
        attempt = RunDir(job.path("")).attempt(1)
        until(lambda: newest_step(attempt) >= 5 or None, _START_SECONDS, f"step 5 of {world} ranks")
        first, before = newest_step(attempt), written(attempt)
        ranks = rank_processes(job)
        store = store_port(ranks[0])
        held = {number: connections(process, store) for number, process in ranks.items()}
        threads = {number: process.num_threads() for number, process in ranks.items()}
        files = {number: process.num_fds() for number, process in ranks.items()}
        until(lambda: newest_step(attempt) >= first + steps or None, _STEP_SECONDS, f"{steps} steps of {world} ranks")
        last, after = newest_step(attempt), written(attempt)
    grown = {name: size - before.get(name, 0) for name, size in after.items()}
    per_step = {
        "rank 0": sum(size for name, size in grown.items() if by_ranks(name) and "steps" in name) / (last - first),
        "another rank": sum(size for name, size in grown.items() if by_ranks(name) and "steps" not in name)
        / (last - first) / max(1, world - 1),
        "agents": sum(size for name, size in grown.items() if not by_ranks(name)) / (last - first),
    }  # fmt: skip
    others, exchange = [number for number in held if number], sockets(world)
    return {
        "world": world,
        "ours, a rank": max(exchange[1:]),
        "ours, rank 0": exchange[0],
        "training on gloo, a rank": max(held[number]["peers"] for number in others),
        "store server": held[0]["store server"],
        "other sockets of a rank": max(sum(held[n].values()) - held[n]["peers"] for n in others),
        "threads of a rank": max(threads.values()),
        "open files of a rank": max(files[number] for number in others),
        "files of the attempt": len(after),
        **{f"bytes a step, {who}": round(size, 1) for who, size in per_step.items()},
    }


def store_port(leader: psutil.Process) -> int:
    """Return the port of rank 0's store: its listener with the most connections."""
    sockets = leader.net_connections(kind="tcp")
    listening = {one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN}
    return max(listening, key=lambda port: sum(one.laddr.port == port for one in sockets))


LOGARITHMIC = ("ours, a rank",)
"""Grows by one when the ranks double: gloo's broadcast is a binomial tree."""


def at(target: int, rows: list[dict[str, Any]], key: str) -> float:
    """Return the value at `target` ranks on the least-squares line through the rows, or through their logarithms."""
    by = math.log2 if key in LOGARITHMIC else float
    xs, ys = [by(row["world"]) for row in rows], [float(row[key]) for row in rows]
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mx) ** 2 for x in xs)
    slope = sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
    return my + slope * (by(target) - mx)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="4,8,16", help="numbers of ranks, each even")
    parser.add_argument("--steps", type=int, default=40, help="over which bytes are counted")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    worlds = [int(text) for text in options.worlds.split(",")]
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
        rows = [measure(world, options.steps, Path(folder) / str(world)) for world in worlds]
    keys = [key for key in rows[0] if key != "world"]
    far = {key: round(at(TARGET, rows, key), 1) for key in keys}
    kept = far["ours, a rank"] + far["other sockets of a rank"] <= MOST_SOCKETS
    silent = all(row["bytes a step, another rank"] == 0 for row in rows)
    if options.json:
        print(json.dumps({"rows": rows, "target": TARGET, "extrapolated": far, "kept": kept and silent}))
        return int(not (kept and silent))
    print(f"{'':28}" + "".join(f"{row['world']:>10}" for row in rows) + f"{TARGET:>12}")
    for key in keys:
        print(f"{key:28}" + "".join(f"{row[key]:>10g}" for row in rows) + f"{far[key]:>12g}")
    print(f"sockets of a rank at {TARGET}: {'must' if kept else 'MISSED'} (<= {MOST_SOCKETS})")
    print(f"what another rank than 0 writes in a step: {'must' if silent else 'MISSED'} (nothing)")
    return int(not (kept and silent))


if __name__ == "__main__":
    sys.exit(main())
