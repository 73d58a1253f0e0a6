"""Resources and output of one rank in jobs of 4, 8 and 16 ranks, extrapolated to 10,000.

    python -m benchmarks.scale_ranks [--worlds 4,8,16] [--steps 40] [--json]

Real ranks on this machine, half of them on each of two nodes. "Ours" are the connections of ranks that only run the
exchanges of a save; connections that training opens over gloo use NCCL on GPUs, and one from every rank to rank 0's
store is torch's. Bytes are the growth of the attempt's files, except checkpoints and logs, by writer. Figures are
extrapolated on a line through the three sizes, connections of ours on a line through the logarithm of the ranks. Exit
code 1 if a must is missed.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from benchmarks.runner import until
from benchmarks.submitted_run import BenchmarkRun
from checkpointing.engine.collectives.group import RankGroup
from trainer.protocol.run_dir import AttemptDir

TARGET = 10_000
MAX_SOCKETS = 64
SETTINGS = (
    "cluster.nodes=2", "parallel.tp=1", "train.steps=100000", "train.seq_len=32", "checkpoint.every=0",
    "model.layers=1", "model.dim=32", "model.ffn_dim=64",
)  # fmt: skip
_START_SECONDS, _STEP_SECONDS = 240.0, 600.0
_PATIENCE = timedelta(minutes=5)
LOGARITHMIC = ("ours, a rank",)
"""Grows by one when the ranks double: gloo's broadcast is a binomial tree."""


def newest_step(attempt: AttemptDir) -> int:
    try:
        lines = attempt.metrics.read_text().splitlines()
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (FileNotFoundError, ValueError):
        return 0


def written_bytes(attempt: AttemptDir) -> Counter[str]:
    """Return the bytes so far by writer, without the output of processes, and the number of files."""
    sizes: Counter[str] = Counter()
    for path in attempt.path.rglob("*"):
        if path.is_file() and attempt.logs not in path.parents:
            name = str(path.relative_to(attempt.path))
            by_ranks = name.startswith(("metrics/", "events/ranks-", "outcomes/"))
            writer = "agents" if not by_ranks else "rank 0" if "steps" in name else "another rank"
            sizes[writer] += path.stat().st_size
            sizes["files"] += 1
    return sizes


def connections(rank: psutil.Process, store: int) -> Counter[str]:
    """Count a rank's connections: to rank 0's store, as the store's server, to peers, listeners, and Unix sockets."""
    found: Counter[str] = Counter()
    for socket in rank.net_connections(kind="all"):
        if socket.family not in (2, 10):
            found["unix"] += 1
        elif socket.status == psutil.CONN_LISTEN:
            found["listening"] += 1
        elif socket.laddr.port == store:
            found["store server"] += 1
        else:
            found["store" if socket.raddr and socket.raddr.port == store else "peers"] += 1
    return found


def store_port(leader: psutil.Process) -> int:
    """Return the port of rank 0's store: its listener with the most connections."""
    sockets = leader.net_connections(kind="tcp")
    listening = {socket.laddr.port for socket in sockets if socket.status == psutil.CONN_LISTEN}
    return max(listening, key=lambda port: sum(socket.laddr.port == port for socket in sockets))


def measure(world: int, steps: int, folder: Path) -> dict[str, Any]:
    """Measure one job with this many ranks, with one sample for each."""
    shape = (f"cluster.ranks_per_node={world // 2}", f"parallel.dp_shard={world}", f"train.batch_size={world}")
    with BenchmarkRun(folder, "local", "tiny-gpt", *SETTINGS, *shape, work_log=False) as job:
        attempt = job.directory.attempt(1)
        until(lambda: newest_step(attempt) >= 5 or None, _START_SECONDS, f"step 5 of {world} ranks")
        first, before = newest_step(attempt), written_bytes(attempt)
        processes = {int(rank.cmdline()[0].rpartition("-")[2]): rank for rank in job.processes("orch-rank-")}
        leader, *others = (processes[number] for number in sorted(processes))
        store = store_port(leader)
        held = [connections(rank, store) for rank in others]
        figures: dict[str, float] = {
            "training on gloo, a rank": max(found["peers"] for found in held),
            "store server": connections(leader, store)["store server"],
            "other sockets of a rank": max(found.total() - found["peers"] for found in held),
            "threads of a rank": max(rank.num_threads() for rank in processes.values()),
            "open files of a rank": max(rank.num_fds() for rank in others),
        }
        until(lambda: newest_step(attempt) >= first + steps or None, _STEP_SECONDS, f"{steps} steps of {world} ranks")
        trained, after = newest_step(attempt) - first, written_bytes(attempt)
    for writer, ranks in (("rank 0", 1), ("another rank", max(1, world - 1)), ("agents", 1)):
        figures[f"bytes a step, {writer}"] = round((after[writer] - before[writer]) / trained / ranks, 1)
    exchange = exchange_sockets(world)
    ours = {"world": world, "ours, a rank": max(exchange[1:]), "ours, rank 0": exchange[0]}
    return {**ours, **figures, "files of the attempt": after["files"]}


def exchange_sockets(world: int) -> list[int]:
    """Return each rank's connections to peers after every kind of exchange of a save, as opened beside NCCL."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
    environ = {**os.environ, "TORCH_GLOO_LAZY_INIT": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "benchmarks.scale_ranks", "--exchange"]
    ranks = [
        subprocess.Popen([*words, *map(str, (rank, world, store.port))], env=environ, stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    return [int(rank.communicate(timeout=300)[0]) for rank in ranks]


def exchange(rank: int, world: int, port: int) -> None:
    """Run the exchanges as one rank, and print the number of its connections to peers."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
    dist.init_process_group("gloo", store=PrefixStore("world", store), rank=rank, world_size=world, timeout=_PATIENCE)
    group = RankGroup(None, key=b"k" * 32)
    for _ in range(2):
        group.gather(rank)
        group.all_gather(rank)
        group.scatter([str(number) for number in range(world)] if group.leads else None)
        group.broadcast(rank if group.leads else None)
        group.minimum([rank])
    sockets = psutil.Process().net_connections(kind="tcp")
    print(sum(bool(s.raddr) and port not in (s.raddr.port, s.laddr.port) for s in sockets), flush=True)
    group.minimum([0])  # no rank exits before all have counted
    os._exit(0)


def extrapolate(rows: list[dict[str, Any]], key: str) -> float:
    """Return the value at TARGET ranks on the least-squares line through the rows, or through their logarithms."""
    scale = math.log2 if key in LOGARITHMIC else float
    worlds = [scale(row["world"]) for row in rows]
    if len(set(worlds)) == 1:
        return float(rows[0][key])
    slope, start = statistics.linear_regression(worlds, [float(row[key]) for row in rows])
    return round(start + slope * scale(TARGET), 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="4,8,16", help="numbers of ranks, each even")
    parser.add_argument("--steps", type=int, default=40, help="steps over which bytes are counted")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--exchange", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.exchange:
        exchange(*options.exchange)
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
        rows = [measure(int(world), options.steps, Path(folder) / world) for world in options.worlds.split(",")]
    keys = [key for key in rows[0] if key != "world"]
    far = {key: extrapolate(rows, key) for key in keys}
    few = far["ours, a rank"] + far["other sockets of a rank"] <= MAX_SOCKETS
    silent = all(row["bytes a step, another rank"] == 0 for row in rows)
    if options.json:
        print(json.dumps({"rows": rows, "target": TARGET, "extrapolated": far, "kept": few and silent}))
    else:
        print(f"{'':28}" + "".join(f"{row['world']:>10}" for row in rows) + f"{TARGET:>12}")
        for key in keys:
            print(f"{key:28}" + "".join(f"{row[key]:>10g}" for row in rows) + f"{far[key]:>12g}")
        print(f"sockets of a rank at {TARGET}: {'must' if few else 'MISSED'} (<= {MAX_SOCKETS})")
        print(f"bytes that ranks other than 0 write in a step: {'must' if silent else 'MISSED'} (nothing)")
    return int(not (few and silent))


if __name__ == "__main__":
    sys.exit(main())
