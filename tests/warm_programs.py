"""Programs of tests as forks of a process with their imports, which take longer than most of the programs.

`main` is that process. It reads JSON lines {module, ranks: [[argument ...] ...], folder, patience,
environment, cwd} from stdin, forks one child for each of `ranks`, in which `module`'s main() finds its arguments in
sys.argv, and answers with the exit codes when all have ended. What a child prints goes into `folder`; one that takes
longer is killed.
"""

import contextlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.warm_children import start_warm_children
from tests.warm_root import HASH_SEED, as_program, start_warm

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Ended:
    """Exit code and output of one rank."""

    code: int
    out: str
    err: str

    def result(self) -> Any:
        """Return the JSON of its last line."""
        return json.loads(self.out.splitlines()[-1])


class WarmPrograms:
    """The warm process, which runs one program at a time."""

    def __init__(self) -> None:
        path = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        seeds = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": HASH_SEED}
        self._process = start_warm(f"{__name__}:main", environ={**path, **seeds})

    def run(
        self, module: str, ranks: Sequence[Sequence[object]], patience: float = 120.0,
        environment: Mapping[str, str] | None = None, cwd: Path = ROOT,
    ) -> list[Ended]:  # fmt: skip
        """Run a program with one rank for each row of arguments, until all have ended."""
        with tempfile.TemporaryDirectory(prefix="orch-programs-") as folder:
            rows = [[str(argument) for argument in row] for row in ranks]
            order = {"module": module, "ranks": rows, "folder": folder, "patience": patience, "cwd": str(cwd)}
            order["environment"] = environment and dict(environment)
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            codes = json.loads(self._process.stdout.readline())
            names = [[Path(folder, f"{rank}.{name}") for name in ("out", "err")] for rank in range(len(rows))]
            printed = [[path.read_text() for path in pair] for pair in names]
        return [Ended(code, out, err) for code, (out, err) in zip(codes, printed, strict=True)]

    def results(self, module: str, ranks: Sequence[Sequence[object]], dies: Sequence[int] = ()) -> list[Any]:
        """Return the last JSON line of every rank; all must succeed, except those expected to die."""
        ended = {rank: one for rank, one in enumerate(self.run(module, ranks)) if rank not in dies}
        failed = {rank: one for rank, one in ended.items() if one.code != 0}
        assert not failed, "\n".join(f"rank {rank} ended with {one.code}: {one.err}" for rank, one in failed.items())
        return [one.result() for one in ended.values()]

    def close(self) -> None:
        self._process.communicate(timeout=30)


@contextlib.contextmanager
def warm_programs() -> Iterator[WarmPrograms]:
    made = WarmPrograms()
    try:
        yield made
    finally:
        made.close()


_READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_")
"""Prefixes of variables that Python reads at its start."""
_idle: list[WarmPrograms] = []
"""Idle processes; some tests run several commands at the same time."""


def run_orch(
    words: Sequence[str], environment: Mapping[str, str], folder: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `orch WORDS` like `subprocess.run`. Raises TimeoutExpired."""
    command = [sys.executable, "-P", "-m", "orchestrator.cli.main", *words]
    names = {name for name in {*environment, *os.environ} if name.startswith(_READ_AT_START)}
    if any(environment.get(name) != os.environ.get(name) for name in names):
        return subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False
        )
    process, began = _idle.pop() if _idle else WarmPrograms(), time.monotonic()
    (ended,) = process.run("orchestrator.cli.main", [words], timeout, environment, folder)
    _idle.append(process)
    if ended.code == -signal.SIGKILL and time.monotonic() - began > timeout:
        raise subprocess.TimeoutExpired(command, timeout, ended.out, ended.err)
    return subprocess.CompletedProcess(command, ended.code, ended.out, ended.err)


# ---- the process itself


def forked(order: Mapping[str, Any], main: Callable[[], None], arguments: Sequence[str], output: Path) -> int:
    """Fork a child that runs `main` as its main program; return its pid."""

    def begin() -> None:
        os.chdir(order["cwd"])
        if order["environment"] is not None:
            os.environ.clear()
            os.environ.update(order["environment"])
            random.seed()
        if "WARM_CHILDREN" in os.environ:
            start_warm_children()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(output.with_suffix(f".{name}"), os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
        sys.argv = [str(output), *arguments]
        main()

    if (pid := os.fork()) == 0:
        as_program(begin)
    return pid


def ended(pids: Sequence[int], patience: float) -> list[int]:
    """Return exit codes; kill children that still run after `patience` seconds."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + patience
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[pid] for pid in pids]


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        module = importlib.import_module(order["module"])
        folder = Path(order["folder"])
        pids = [forked(order, module.main, row, folder / str(rank)) for rank, row in enumerate(order["ranks"])]
        sys.stdout.write(json.dumps(ended(pids, order["patience"])) + "\n")
        sys.stdout.flush()
