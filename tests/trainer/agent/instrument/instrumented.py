"""Programs started as ranks, with the variables that the agent sets for the start-up module."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from trainer.agent.fork_server.launch_order import free_port
from trainer.protocol.rank_progress.program_record import ProgramRecord
from trainer.protocol.rank_progress.progress import Progress, ProgressCell

STARTUP = Path(__file__).resolve().parents[4] / "trainer" / "agent" / "instrument" / "python_path"
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
STEP = """
import torch
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
def step(optimizer=optimizer):
    weight.sum().backward()
    optimizer.step()
"""


class ForkServer:
    """Process that has imported torch, and runs each program in a fork."""

    def __init__(self) -> None:
        words = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("fork_server.py"))]
        self._process = subprocess.Popen(words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(
        self, code: str, environ: dict[str, str], folder: Path, before: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a program; `before` runs before its start-up module."""
        output, errors = folder / "output", folder / "errors"
        request = {"code": code, "before": before, "environ": environ, "output": str(output), "errors": str(errors),
                   "startup": str(STARTUP / "sitecustomize.py")}  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(code, status, output.read_text(), errors.read_text())

    def close(self) -> None:
        self._process.communicate()


@dataclass
class Instrumented:
    """The cells of two ranks, and their environment."""

    folder: Path
    cells: list[ProgressCell]
    stacks: list[int]
    environment: dict[str, str] = field(default_factory=dict)

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

    def run_text(self, server: ForkServer, text: str, **variables: str) -> str:
        """Run a program of this text as the only rank, in a fork of the server. Return its output."""
        done = server.run(textwrap.dedent(text), {**self.environment, **ONE_RANK, **variables}, self.folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def record(self, rank: int = 0) -> ProgramRecord:
        found = self.cells[rank].program()
        assert found is not None
        return found

    def reading(self, rank: int = 0) -> Progress:
        found = self.cells[rank].read()
        assert found is not None
        return found


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
        yield Instrumented(folder, cells, stacks, environment)
    finally:
        for cell in cells:
            cell.close()
        for one in stacks:
            os.close(one)
