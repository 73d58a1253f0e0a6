"""Time to notice, name and repair faults, compared with torchrun on the same faults, and the cost of monitoring.

    python -m benchmarks.recovery [--rows PATTERN,...] [--rounds 7] [--slurm] [--folder DIR] [--json] [--list]

Runs are submitted as a user submits them, faulted from outside, and timed from the records of agents and ranks. In
every round each side is faulted once, in turn. The sides that cannot detect a SIGSTOP receive it only once, since they
would wait forever. torchrun is two processes on this machine, with an ordinary DDP script; orch also runs the same
script. "never" means not within a minute. For a stopped rank of a script torchrun should give "never", because it does
not watch for it.

n counts rounds; "4 of 7" means that four of seven produced the figure, and such a row of ours is FAILED, regardless of
its median. Run it on an otherwise idle machine, or the numbers are meaningless. The exit code is 1 if a row misses its
must or fails.
"""

import argparse
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.runner import OURS, NotInTimeError, Result, Row, run_table, until
from benchmarks.submitted_run import FAILURES, BenchmarkRun, free_port, read_lines, send_signal
from benchmarks.training_turns import train_in_turns
from trainer.protocol.events import EventKind

Figures = Mapping[str, float]
Side = Callable[[Path, str], Figures]
_START_SECONDS, _WAIT_SECONDS = 120.0, 60.0
_FAULT_STEP, _VICTIM = 13, 3
_SETTINGS = ("train.steps=5000", "checkpoint.every=5", "train.batch_size=16", "train.seq_len=128")
_SCRIPT_WORDS = (str(Path(__file__).with_name("ddp_script.py")), "{logs}", "100000", "0.2")
_SEEN_BY_TORCHRUN = re.compile(r"failed \(exitcode: -\d+\) local_rank: \d+ \(pid: (\d+)\)")

# -- faults of our own runs


def kill_rank(folder: Path, kind: str, *settings: str) -> Figures:
    """Measure SIGKILL of a rank: time to notice, time to the next step, and the latter as a share of the cold start."""
    with BenchmarkRun(folder, kind, "tiny-gpt", *_SETTINGS, *settings) as job:
        first = job.event(EventKind.GENERATION_FIRST_STEP, _START_SECONDS, generation=1)
        cold = first.time - job.start_time()
        job.wait_for_step(_FAULT_STEP, _START_SECONDS)
        at = send_signal(job.pid(_VICTIM), signal.SIGKILL)
        noticed = job.event(EventKind.RANK_EXITED, _WAIT_SECONDS, after=at, rank=_VICTIM).time
        back = job.event(EventKind.GENERATION_FIRST_STEP, _WAIT_SECONDS, generation=2).time
    return _restart_figures(at, noticed, back, cold)


def _restart_figures(at: float, noticed: float, back: float, cold: float) -> Figures:
    seconds = back - noticed if math.isfinite(back) else math.inf
    return {"noticed": noticed - at, "back": seconds, "share": seconds / cold}


def stop_rank(folder: Path, kind: str) -> Figures:
    """Measure SIGSTOP of a rank: time to the declaration, with the culprit named and its evidence on disk.

    `wrong` means that another rank was named, `unkept` that evidence was missing at the declaration. In both cases the
    hang counts as not declared.
    """
    with BenchmarkRun(folder, kind, "tiny-gpt", *_SETTINGS) as job:
        job.wait_for_step(_FAULT_STEP, _START_SECONDS)
        at = send_signal(job.pid(_VICTIM), signal.SIGSTOP)
        incident = job.event(EventKind.INCIDENT, _WAIT_SECONDS, after=at)
        # Readers of the event may rely on the evidence, so it is written before the event.
        kept = [path for path in job.path(str(incident.data["evidence"])).rglob("*") if path.is_file()]
        unkept = not kept or any(path.stat().st_mtime > incident.time for path in kept)
        job.event(EventKind.GENERATION_FIRST_STEP, _WAIT_SECONDS, generation=2)
    wrong = incident.data["rank"] != _VICTIM
    declared = math.inf if wrong or unkept else incident.time - at
    return {"declared": declared, "wrong": float(wrong), "unkept": float(unkept)}


def lose_node(folder: Path, kind: str) -> Figures:
    """Kill a node's agent, whose descendants end with it, and measure the time until a spare has replaced the node."""
    with BenchmarkRun(folder, kind, "tiny-gpt", *_SETTINGS, "cluster.spare_nodes=1") as job:
        job.wait_for_step(_FAULT_STEP, _START_SECONDS)
        at = send_signal(job.agent(1).pid, signal.SIGKILL)
        lost = job.event(EventKind.AGENT_LOST, _WAIT_SECONDS, after=at).time
        job.event(EventKind.SPARE_USED, _WAIT_SECONDS, after=at)
        back = job.event(EventKind.GENERATION_FIRST_STEP, _WAIT_SECONDS, generation=2).time
    return {"back": back - lost}


def monitoring_cost(folder: Path, kind: str) -> Figures:
    """Return `ratio`, that of the median step times, and `cpu`, the product's extra CPU seconds per step and rank.

    The whole product is compared, not its monitoring alone: ranks, agents, all processes that agents start, metrics,
    work logs and agreement. No save occurs meanwhile, because benchmarks.checkpoint measures the cost of saves. The
    ranks of both sides are bound to cores in the same way, because the placement of four ranks on two cores accounts
    for a tenth of a step's time.
    """
    settings = ("train.steps=100000", "checkpoint.every=100000", "cluster.nodes=2", "cluster.ranks_per_node=2")
    with BenchmarkRun(folder, kind, "tiny-gpt", *settings) as job:
        logs = folder / "bare"
        words = ["-m", "benchmarks.bare_loop", str(job.path("")), str(logs), "same"]
        ours, bare = train_in_turns(job, 4, words, logs, 15)
    return {"ratio": ours.step_seconds / bare.step_seconds, "cpu": ours.cpu_seconds(4) - bare.cpu_seconds(4)}


def scale(folder: Path, kind: str) -> Figures:
    """Run the scale benchmark in its own process; the worse of the two verdicts counts, and a failure is a miss."""
    words = [sys.executable, "-m", "benchmarks.scale", "--json", "--rounds", "1"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode not in (0, 1) or not done.stdout.strip():
        last = (done.stdout + done.stderr).strip().splitlines()
        raise RuntimeError((last or ["benchmarks.scale printed nothing"])[-1])
    cpu, *verdicts = json.loads(done.stdout.splitlines()[-1])["rows"]
    whole = all(row["good"] == row["rounds"] for row in verdicts)
    return {"cpu": cpu["figure"], "verdict": max(row["figure"] for row in verdicts) if whole else math.inf}


# -- the same script under orch and torchrun


@contextlib.contextmanager
def _script_of_ours(folder: Path, kind: str) -> Iterator[tuple[BenchmarkRun, Path]]:
    """Run the script as an orch `command:`; yield the job and the folder with its ranks' logs."""
    logs = folder / "script"
    logs.mkdir(parents=True)
    command = json.dumps([sys.executable, *(word.format(logs=logs) for word in _SCRIPT_WORDS)])
    shape = ("cluster.nodes=2", "cluster.ranks_per_node=2")
    with BenchmarkRun(folder, kind, "torchrun-script", f"command={command}", *shape) as job:
        yield job, logs


def kill_in_script(folder: Path, kind: str) -> Figures:
    """Measure what `kill_rank` measures, but with the script that torchrun also runs."""
    with _script_of_ours(folder, kind) as (job, logs):
        victim = _wait_for_victim(logs)
        cold = _first_step(logs) - job.start_time()
        at = send_signal(victim, signal.SIGKILL)
        noticed = job.event(EventKind.RANK_EXITED, _WAIT_SECONDS, after=at, rank=_VICTIM).time
        back = _first_step_after(logs, at)
    return _restart_figures(at, noticed, back, cold)


def stop_in_script(folder: Path, kind: str) -> Figures:
    """Measure SIGSTOP of a rank of the script; infinity if nothing is declared in time."""
    with _script_of_ours(folder, kind) as (job, logs):
        at = send_signal(_wait_for_victim(logs), signal.SIGSTOP)
        with contextlib.suppress(NotInTimeError):
            incident = job.event(EventKind.INCIDENT, _WAIT_SECONDS, after=at)
            if incident.data["rank"] == _VICTIM:
                return {"declared": incident.time - at}
    return {"declared": math.inf}


def fault_under_torchrun(folder: Path, number: signal.Signals) -> Figures:
    """Send a rank this signal; measure how long until torchrun reports it and rank 0 trains again (inf if never)."""
    logs = folder / "torchrun"
    with Torchrun(logs) as job:
        victim = _wait_for_victim(logs)
        cold = _first_step(logs) - job.start_time
        at = send_signal(victim, number)
        try:
            noticed = job.detection_time(victim)
            back = _first_step_after(logs, at) if math.isfinite(noticed) else math.inf
        finally:
            if number == signal.SIGSTOP:
                os.kill(victim, signal.SIGKILL)
    return {**_restart_figures(at, noticed, back, cold), "declared": noticed - at}


class Torchrun:
    """Two torchrun processes, like two nodes, each with two ranks; log lines are recorded with arrival times."""

    def __init__(self, logs: Path) -> None:
        logs.mkdir(parents=True)
        words = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
            "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}",
            "--rdzv-id", "bench", "--local-addr", "127.0.0.1", *(word.format(logs=logs) for word in _SCRIPT_WORDS),
        ]  # fmt: skip
        self._lines: list[tuple[float, str]] = []
        self.start_time = time.time()
        self._runs = [
            subprocess.Popen(
                words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for _ in range(2)
        ]  # fmt: skip
        for run in self._runs:
            threading.Thread(target=self._read, args=(run,), daemon=True).start()

    def _read(self, run: "subprocess.Popen[str]") -> None:
        assert run.stderr is not None
        for line in run.stderr:
            self._lines.append((time.time(), line))

    def detection_time(self, pid: int) -> float:
        """Return when torchrun reported the failure of this process; infinity if it did not in time."""

        def look() -> float | None:
            matches = ((at, _SEEN_BY_TORCHRUN.search(line)) for at, line in list(self._lines))
            return next((at for at, match in matches if match and int(match[1]) == pid), None)

        try:
            return until(look, _WAIT_SECONDS, "torchrun's report of the failure")
        except NotInTimeError:
            return math.inf

    def __enter__(self) -> "Torchrun":
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._runs:
            for number in (signal.SIGTERM, signal.SIGKILL):
                # torchrun's workers have their own sessions, and exit with it on SIGTERM.
                run.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(15)
                    break


def _wait_for_victim(logs: Path) -> int:
    """Return the victim's pid once it has trained up to the step of the fault."""

    def look() -> int | None:
        lines = read_lines(logs / f"rank-{_VICTIM}.jsonl")
        return int(lines[-1]["pid"]) if lines and lines[-1]["step"] >= _FAULT_STEP else None

    return until(look, _START_SECONDS, f"step {_FAULT_STEP} of the script")


def _first_step(logs: Path) -> float:
    return float(read_lines(logs / "rank-0.jsonl")[0]["time"])


def _first_step_after(logs: Path, at: float) -> float:
    """Return the time of rank 0's first step in a process that started after `at`; infinity if there is none."""
    log = logs / "rank-0.jsonl"
    old = {line["pid"] for line in read_lines(log) if line["time"] <= at}
    try:
        return until(
            lambda: next((float(line["time"]) for line in read_lines(log) if line["pid"] not in old), None),
            _WAIT_SECONDS,
            "a step after the restart",
        )
    except NotInTimeError:
        return math.inf


# -- table

_TORCHRUN, _SCRIPT = "torchrun", "ours, torchrun's script"
FAULTS: dict[str, dict[str, Side]] = {
    "kill": {
        OURS: kill_rank,
        _SCRIPT: kill_in_script,
        _TORCHRUN: lambda folder, kind: fault_under_torchrun(folder, signal.SIGKILL),
    },
    "stop": {
        OURS: stop_rank,
        _SCRIPT: stop_in_script,
        _TORCHRUN: lambda folder, kind: fault_under_torchrun(folder, signal.SIGSTOP),
    },
    "spare": {OURS: lose_node},
    "monitoring": {OURS: monitoring_cost},
    "scale": {OURS: scale},
}
ONCE = {("stop", _TORCHRUN), ("scale", OURS)}
"""Sides measured once, so their n is 1: one waits for the full timeout, the other measures both kinds of hangs."""


def _row(name: str, text: str, bounds: tuple[float, float], source: str, unit: str = "s") -> Row:
    return Row(name=name, text=text, must=bounds[0], stretch=bounds[1], source=source.split(":"), unit=unit)


ROWS = (
    _row("kill-noticed", "SIGKILL of a rank -> noticed", (0.3, 0.1), "kill:noticed"),
    _row("kill-back", "noticed -> first new step (warm, RAM tier)", (3.0, 1.5), "kill:back"),
    _row("kill-share", "the same as a share of the cold start", (0.35, 0.15), "kill:share", "x"),
    _row("stop-declared", "SIGSTOP -> hang declared, culprit named, evidence kept", (10.0, 5.0), "stop:declared"),
    _row("spare-back", "node lost, known -> first new step on a spare", (10.0, 5.0), "spare:back"),
    _row("step-time", "step time, 2x2 run with all on / bare loop", (1.01, 1.005), "monitoring:ratio", "x"),
    _row("step-cpu", "CPU added per step and rank, agents included", (300e-6, 50e-6), "monitoring:cpu", "us"),
    _row("scale-cpu", "coordinator of 10,000 ranks: CPU of one core", (0.30, 0.10), "scale:cpu", "%"),
    _row("scale-verdict", "10,000 ranks: limit over -> verdict", (2.0, 1.0), "scale:verdict"),
)
COUNTED = {"wrong": "another rank was named", "unkept": "the evidence was not on disk when it was declared"}


def measure(rows: Sequence[Row], options: argparse.Namespace) -> Iterator[tuple[Row, Result]]:
    """Measure each fault once for all of its rows."""
    # On SIGTERM, exit through all `with` blocks, which end everything that they started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for fault in dict.fromkeys(row.source[0] for row in rows):
        rounds, problems = measure_fault(fault, options.rounds, options.folder, "slurm" if options.slurm else "local")
        for row in rows:
            if row.source[0] == fault:
                yield row, result_of(row.source[1], rounds, problems)


def measure_fault(
    fault: str, rounds: int, at: Path, cluster: str
) -> tuple[dict[str, list[Figures]], Mapping[str, str]]:
    """Return the figures of each side by round, empty for failed rounds, and each side's first failure."""
    found: dict[str, list[Figures]] = {name: [] for name in FAULTS[fault]}
    problems: dict[str, str] = {}
    for number in range(rounds):
        for name, side in FAULTS[fault].items():
            if number and (fault, name) in ONCE:
                continue
            with tempfile.TemporaryDirectory(dir=at, prefix="bench-recovery-", ignore_cleanup_errors=True) as folder:
                try:
                    found[name].append(side(Path(folder), cluster))
                except FAILURES as problem:
                    found[name].append({})
                    problems.setdefault(name, f"{name}: {type(problem).__name__}: {problem}")
    return found, problems


def result_of(figure: str, rounds: Mapping[str, Sequence[Figures]], problems: Mapping[str, str]) -> Result:
    """Return one figure for every side, infinite for a round without it. A wrong culprit counts as not declared."""
    values = {name: [found.get(figure, math.inf) for found in figures] for name, figures in rounds.items()}
    counts = {key: sum(found.get(key, 0.0) > 0 for found in rounds[OURS]) for key in COUNTED}
    notes = [f"{text} in {counts[key]} of {len(values[OURS])}" for key, text in COUNTED.items() if counts[key]]
    ours = values.pop(OURS)
    others_problems = [problem for name, problem in problems.items() if name != OURS]
    return Result(
        values=ours, others=values, notes=[*notes, *others_problems],
        problems=[problems[OURS]] if OURS in problems else [],
    )  # fmt: skip


if __name__ == "__main__":
    slurm = {"action": "store_true", "help": "runs on the Slurm that this machine reaches"}
    sys.exit(run_table("recovery", __doc__, ROWS, measure, options={"--slurm": slurm}))
