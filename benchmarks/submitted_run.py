"""Runs for benchmarks, submitted as users submit them, each in a separate ORCH_HOME."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.runner import NotInTimeError, until
from trainer.protocol.events import Event, EventKind, read_events
from trainer.protocol.logs.line_file import read_new_lines, work_lines
from trainer.protocol.run_dir import RunDir

_OURS = ("orch-controller", "orch-agent", "orch-forkserver", "orch-rank", "orch-writer")
FAILURES = (NotInTimeError, RuntimeError, OSError, LookupError, ValueError, subprocess.SubprocessError, psutil.Error)
"""Errors that end a round but not the program, caused by runs, processes and files in unexpected states."""


class BenchmarkRun:
    """Context manager that submits a run, and ends all of its processes at exit."""

    def __init__(self, folder: Path, kind: str, preset: str, *settings: str, work_log: bool = True) -> None:
        """`work_log`: every rank writes a line for every step, which most measurements here need."""
        self._folder, self._settings, self._kind = folder, (preset, *settings), kind
        self._environment = {
            **os.environ, "ORCH_HOME": str(folder / "home"), "ORCH_SITE_CONFIG": "",
            "ORCH_WORK_LOG": "1" if work_log else "", "XDG_CONFIG_HOME": str(folder / "config"),
        }  # fmt: skip
        self.name = ""

    def __enter__(self) -> "BenchmarkRun":
        root = self._folder / "runs"
        root.mkdir(parents=True)
        answer = self.orch("submit", *self._settings, f"cluster.root={root}", f"cluster.kind={self._kind}", "--json")
        self.name = json.loads(answer)["data"]["run"]
        self.directory = RunDir(root / self.name)
        return self

    def __exit__(self, *_: object) -> None:
        self.orch("cancel", self.name, check=False)
        self.orch("controller", "stop", check=False)
        for process in self.processes(*_OURS):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def orch(self, *words: str, check: bool = True, seconds: float = 120) -> str:
        """Run a command in this home and return its stdout. Raises RuntimeError if it fails and `check` is true."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "orchestrator.cli.main", *words],
            env=self._environment, cwd=self._folder, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise RuntimeError(f"orch {' '.join(words)}: exit {done.returncode}: {done.stderr.strip()[-500:]}")
        return done.stdout

    # -- files

    def path(self, relative: str) -> Path:
        return self.directory.path / relative

    def event(self, kind: EventKind, seconds: float, *, generation: int = 0, after: float = 0.0, **data: Any) -> Event:
        """Wait for the first event with this kind, generation and data, and return it."""

        def look() -> Event | None:
            files = (path for attempt in self.directory.all_attempts() for path in attempt.events.glob("*.jsonl"))
            for event in sorted((event for path in files for event in read_events(path)[0]), key=lambda e: e.time):
                matches = event.kind == kind and event.time >= after and generation in (0, event.generation)
                if matches and all(event.data.get(key) == value for key, value in data.items()):
                    return event
            return None

        return until(look, seconds, f"event {kind} {data or ''}")

    def wait_for_step(self, step: int, seconds: float) -> None:
        """Wait until every rank has trained this step."""

        def look() -> bool | None:
            lines = [line for attempt in self.directory.all_attempts() for line in work_lines(attempt)]
            newest = {line["rank"]: int(line["step"]) for line in lines}
            return True if newest and min(newest.values()) >= step else None

        until(look, seconds, f"step {step} of {self.name}")

    def pid(self, rank: int) -> int:
        """Return the pid of a rank's newest process, from its work log."""
        return int(self._newest_work(rank)["pid"])

    def work_log(self, rank: int) -> Path:
        """Return the work log of this rank's node, in the newest attempt."""
        return self.directory.all_attempts()[-1].work_log(str(self._newest_work(rank)["node"]))

    def _newest_work(self, rank: int) -> dict[str, Any]:
        return [line for line in work_lines(self.directory.all_attempts()[-1]) if line["rank"] == rank][-1]

    # -- processes

    def processes(self, *names: str) -> list[psutil.Process]:
        """Return the processes of this home whose title begins with one of `names`."""
        found = []
        for process in psutil.process_iter(["cmdline", "environ", "status"]):
            words = process.info["cmdline"] or [""]
            mine = (process.info["environ"] or {}).get("ORCH_HOME") == self._environment["ORCH_HOME"]
            if mine and words[0].startswith(names) and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def agents(self) -> list[psutil.Process]:
        """Return the agents of all nodes. Raises NotInTimeError if this machine runs none."""
        if not (agents := self.processes("orch-agent")):
            raise NotInTimeError("agents: not among the processes of this machine")
        return agents

    def agent(self, node: int) -> psutil.Process:
        """Return the agent of a node, simulated or on Slurm. Raises NotInTimeError if this machine does not run it."""
        for agent in self.agents():
            environment = agent.environ()
            # A simulated node may be inside a Slurm job, whose node number is unrelated.
            if environment.get("SUBMITIT_LOCAL_GLOBALID", environment.get("SLURM_NODEID")) == str(node):
                return agent
        raise NotInTimeError(f"agent of node {node}: not among the processes of this machine")

    def start_time(self) -> float:
        """Return the start time of the first agent's process, in seconds since the epoch."""
        return min(float(agent.create_time()) for agent in self.agents())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSON lines file; empty if the file is missing."""
    return [json.loads(line) for line in read_new_lines(path, 0)[0] if line]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def send_signal(pid: int, number: signal.Signals) -> float:
    """Send a signal, and return the time just before it was sent."""
    now = time.time()
    os.kill(pid, number)
    return now
