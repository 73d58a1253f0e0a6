"""Training program under `orch submit` on simulated nodes: its processes, output, events and checkpoints."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from benchmarks.program_log import ProgramLog, parse_log
from benchmarks.runner import NotInTimeError
from benchmarks.submitted_run import BenchmarkRun
from tests.slurm.lab import SlurmLab
from trainer.protocol.events import Event, EventKind, read_events

SCRIPTS = Path(__file__).resolve().parents[1] / "tests" / "programs"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A row of the table."""

    title: str
    script: str
    package: str = ""
    """Package that the script needs besides torch."""
    launcher: tuple[str, ...] = ()
    """Words between the interpreter and the script."""
    words: tuple[str, ...] = ("{out}",)
    """Arguments of the script besides steps and pause, with `{out}` (its folder), `{nodes}` and `{ranks}` of a node."""
    nodes: int = 2
    ranks: int = 2

    def command(self, out: Path, steps: int, pause: float) -> list[str]:
        words = [word.format(out=out, nodes=self.nodes, ranks=self.ranks) for word in self.words]
        script = [str(SCRIPTS / self.script), *words, "--steps", str(steps), "--pause", str(pause)]
        return [sys.executable, *self.launcher, *script]


class ProgramRun:
    """A program's run, for which `job` has been submitted, with checkpoints in `out`; on `lab` unless simulated."""

    def __init__(self, program: Program, job: BenchmarkRun, out: Path, lab: SlurmLab | None = None) -> None:
        self.program, self.job, self.out, self.lab = program, job, out, lab
        self.nodes, self.world = program.nodes, program.nodes * program.ranks

    def log(self) -> ProgramLog:
        """Return what rank 0 has printed in all attempts."""
        files = [attempt.rank_log(0) for attempt in self.job.directory.all_attempts()]
        texts = [file.read_text(errors="replace") for file in files if file.exists()]
        return parse_log("\n".join(texts).splitlines())

    def events(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds, or all, oldest first."""
        files = (path for attempt in self.job.directory.all_attempts() for path in attempt.events.glob("*.jsonl"))
        found = [event for path in files for event in read_events(path)[0] if not kinds or event.kind in kinds]
        return sorted(found, key=lambda event: (event.time, event.seq))

    def saves(self) -> list[Path]:
        """Return the entries in the program's folder."""
        return sorted(self.out.iterdir()) if self.out.is_dir() else []

    def ranks(self) -> list[psutil.Process]:
        """Return the ranks' processes, in order. Raises NotInTimeError if there are fewer or more of them."""
        script = str(SCRIPTS / self.program.script)
        mine = {process.pid: process for process in self.job.processes("")}
        found: dict[int, psutil.Process] = {}
        for process in mine.values():
            words, environ = process.cmdline(), process.environ()
            if any(word.startswith("--multiprocessing-fork") for word in words) and "spawn_main" in " ".join(words):
                found[len(found)] = process  # torch.multiprocessing.spawn starts them in this order
            elif "RANK" in environ and script in words[:4] and process.ppid() not in self._with_rank(mine):
                found[int(environ["RANK"])] = process
        if len(found) != self.world:
            raise NotInTimeError(f"{self.world} ranks of {self.program.script}: found {len(found)}")
        return [found[rank] for rank in sorted(found)]

    def _with_rank(self, processes: dict[int, psutil.Process]) -> set[int]:
        """Return the pids of processes with a rank; their children are workers."""
        script = str(SCRIPTS / self.program.script)
        return {pid for pid, one in processes.items() if "RANK" in one.environ() and script in one.cmdline()[:4]}

    def show(self) -> dict[str, Any]:
        """Return the answer of `orch show`."""
        return dict(json.loads(self.job.orch("show", self.job.name, "--json"))["data"])

    @cached_property
    def _shown(self) -> dict[str, Any]:
        return self.show()

    def attempts(self) -> Sequence[dict[str, Any]]:
        """Return the attempts of the run, which has ended."""
        return list(self._shown["attempts"])

    @property
    def state(self) -> str:
        """Return the state of the run, which has ended."""
        return str(self._shown["state"])

    def verdicts(self, after: float) -> list[Event]:
        """Return the coordinator's verdicts after this time: hangs, ends of generations, stops."""
        found = self.events(EventKind.INCIDENT, EventKind.GENERATION_ENDED, EventKind.STOP_REQUESTED)
        return [event for event in found if event.time >= after]

    def first_failure(self, after: float) -> tuple[str, int | None] | None:
        """Return kind and rank of the first failure after this time."""
        failures = [event.data["failure"] for event in self.verdicts(after) if event.data.get("failure")]
        return (str(failures[0]["kind"]), failures[0].get("rank")) if failures else None

    def reasons(self, after: float) -> list[str]:
        """Return the reasons of all verdicts after this time, and those of the ends of attempts."""
        found = [str(event.data["reason"]) for event in self.verdicts(after)]
        return list(dict.fromkeys([*found, *(str(attempt["reason"]) for attempt in self.attempts())]))
