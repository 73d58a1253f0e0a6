"""Cost of the start-up module in a user's program: steps with its hooks, compared with steps without them.

    python -m benchmarks.instrumentation [--rows step,small] [--rounds 15] [--folder DIR] [--json] [--list]

Two ranks of one ordinary DDP program train on this machine. Of each pair of five steps, one runs without the hooks. A
round is 40 pairs; its figure compares the median step times, or is the median of the CPU time that the training thread
spends more within a pair. The exit code is 1 if a row misses its must or fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.runner import Result, Row, run_table
from benchmarks.submitted_run import free_port
from trainer.agent.fork_server.instrumentation import RankFiles, instrument
from trainer.protocol.rank_progress.progress import ProgressCell

_RANKS, _PAIRS = 2, 40
_PROGRAM = Path(__file__).with_name("instrumented_loop.py")

ROWS = (
    Row(name="step", text="DDP, 4 layers of 512, 64 samples: with / without", must=1.01, stretch=1.0, source=(512, 64),
        by_interval=True),
    Row(name="small", text="DDP, 4 layers of 8, 1 sample: CPU time more", must=20e-6, stretch=10e-6, unit="us",
        source=(8, 1), by_interval=True),
)  # fmt: skip


def measure(rows: Sequence[Row], options: argparse.Namespace) -> Iterator[tuple[Row, Result]]:
    for row in rows:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-instrumentation-") as folder:
            yield row, _measure_row(row, Path(folder), options.rounds)


def _measure_row(row: Row, folder: Path, rounds: int) -> Result:
    cells = [ProgressCell.create() for _ in range(_RANKS)]
    stacks = [os.memfd_create("stacks") for _ in range(_RANKS)]
    try:
        files = RankFiles(
            cells=tuple(cell.descriptor for cell in cells), stacks=tuple(stacks),
            sockets=tuple(str(folder / f"flight-{rank}") for rank in range(_RANKS)),
        )  # fmt: skip
        environ = instrument(files, os.environ, folder / "watchdog", folder / "saves.jsonl")
        lines = _run_ranks([*map(str, row.source), str(rounds), str(_PAIRS)], {**os.environ, **environ})
        steps = [reading.step if (reading := cell.read()) else 0 for cell in cells]
    except subprocess.SubprocessError as problem:
        return Result(values=(), problems=[str(problem)])
    finally:
        for cell in cells:
            cell.close()
        for one in stacks:
            os.close(one)
    found = [json.loads(line) for line in lines]
    values = [one["more_cpu"] if row.unit == "us" else one["instrumented"] / one["bare"] for one in found]
    problems = [] if min(steps) >= rounds * _PAIRS else [f"the agent would have read steps {steps}"]
    seconds = {kind: sorted(one[kind] for one in found)[len(found) // 2] for kind in ("instrumented", "bare")}
    return Result(values=values, measured=seconds, problems=problems)


def _run_ranks(words: Sequence[str], environ: dict[str, str]) -> list[str]:
    """Run the program, and return the output of rank 0. Raises SubprocessError."""
    port = str(free_port())
    cores = sorted(os.sched_getaffinity(0))
    ranks = []
    for rank in range(_RANKS):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(_RANKS), "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
        command = ["taskset", "-c", str(cores[rank % len(cores)]), sys.executable, "-W", "ignore", str(_PROGRAM)]
        ranks.append(subprocess.Popen([*command, *words], env={**environ, **place}, text=True, stdout=subprocess.PIPE))
    outputs = [process.communicate()[0] for process in ranks]
    for process in ranks:
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
    return outputs[0].splitlines()


if __name__ == "__main__":
    sys.exit(run_table("instrumentation", __doc__, ROWS, measure, rounds=15))
