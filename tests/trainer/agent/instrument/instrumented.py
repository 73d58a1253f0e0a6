"""Programs started as ranks, with the variables that the agent sets for the start-up module."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainer.agent.fork_server.launch_order import free_port
from trainer.protocol.rank_progress.progress import ProgressCell

STARTUP = Path(__file__).resolve().parents[4] / "trainer" / "agent" / "instrument" / "startup"
RECORD, ERROR = slice(3088, 3328), slice(3328, 3840)


@dataclass
class Instrumented:
    """The cells of two ranks, and their environment."""

    cells: list[ProgressCell]
    environment: dict[str, str]

    def run(self, *words: str, ranks: int = 2, **variables: str) -> list[subprocess.CompletedProcess[str]]:
        """Run a program to its end as this many ranks."""
        started = [self.start(words, rank, ranks, variables) for rank in range(ranks)]
        outputs = [process.communicate(timeout=240) for process in started]
        return [
            subprocess.CompletedProcess(words, process.returncode, *texts)
            for process, texts in zip(started, outputs, strict=True)
        ]

    def start(
        self, words: Sequence[str], rank: int, ranks: int, variables: dict[str, str]
    ) -> "subprocess.Popen[str]":  # fmt: skip
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        environment = {**self.environment, **place, **variables}
        return subprocess.Popen(
            [sys.executable, *words], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def frameworks(self, rank: int) -> str:
        return bytes(self.cells[rank]._map[RECORD]).partition(b"\0")[0].decode()

    def error(self, rank: int) -> str:
        return bytes(self.cells[rank]._map[ERROR]).partition(b"\0")[0].decode()


@contextmanager
def instrumented(folder: Path) -> Iterator[Instrumented]:
    cells = [ProgressCell.create() for _ in range(2)]
    stacks = [os.memfd_create("stacks") for _ in range(2)]
    own = f"/proc/{os.getpid()}/fd"
    environment = {
        **os.environ, "ORCH_CELLS": ",".join(f"{own}/{cell.descriptor}" for cell in cells),
        "ORCH_STACKS": ",".join(f"{own}/{one}" for one in stacks),
        "ORCH_FLIGHTS": ",".join(str(folder / f"flight-{rank}") for rank in range(2)),
        "ORCH_SAVED": str(folder / "saves.jsonl"), "ORCH_GENERATION": "3", "PYTHONPATH": str(STARTUP),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1")), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "TORCH_FR_BUFFER_SIZE": "2000",
    }  # fmt: skip
    try:
        yield Instrumented(cells, environment)
    finally:
        for cell in cells:
            cell.close()
        for one in stacks:
            os.close(one)
