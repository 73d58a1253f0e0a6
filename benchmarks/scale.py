"""Coordinator cost for 10,000 ranks, and the time to detect a stopped rank.

    python -m benchmarks.scale [--nodes 1250] [--ranks-per-node 8] [--seconds 20] [--step 1.0] [--rounds 1]
                               [--json] [--list]

The coordinator in this process is real; its agents, in another process, are synthetic: they join over loopback with the
real protocol, and report like real agents, with every rank changed in every report. CPU is that of the coordinator
process, as a share of one core. A verdict's time begins when the culprit exceeds its own limit, and ends when it is
declared hung. In between, the flight records of all ranks are requested, read and compared. Evidence, which real agents
take up to ten seconds to collect, follows later. One process writes the records of all ranks here, whereas in a real
job each node writes its own, so the measured verdict times are too long. The rounds are the number of incidents of each
kind; 0 measures only the CPU. The exit code is 1 if a must is missed or the wrong rank is named.
"""

import argparse
import asyncio
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner import Result, Row, run_table
from trainer.agent.attempt_state.attempt_state import RunningAttempt
from trainer.agent.coordination.coordinator import Coordinator
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.protocol.events import Event, EventKind, EventLog, read_events
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.node_identity import NodeIdentity
from trainer.protocol.run_dir import AttemptDir, RunDir

_JOIN_SECONDS = 60.0
_WARM_SECONDS = 5.0
_VERDICT_SECONDS = 60.0
_SPARE_FILES = 300  # unauthenticated peers, logs, the interpreter
KINDS = ("stopped", "forward")
ROWS = (
    Row(name="cpu", text="coordinator: CPU of one core", must=0.10, stretch=0.05, unit="%"),
    *(
        Row(name=kind, text=f"limit over -> verdict ({kind})", must=1.0, stretch=0.5, unit="s", source=kind)
        for kind in KINDS
    ),
)


class ScaleBenchmark:
    """Benchmark of a single attempt of a job."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._options = options
        self._run = RunDir(folder / "run-1")
        self._run.make()
        self._attempt: AttemptDir = self._run.attempt(1)
        self._attempt.make()
        self._read = 0
        self._coordinator: asyncio.Task[int]
        self._agents: asyncio.subprocess.Process

    async def play(self) -> tuple[float, list[dict[str, Any]], str]:
        """Return the CPU share, the verdicts, and a description of the job."""
        options, coordinator = self._options, self._make_coordinator()
        await coordinator.open("127.0.0.1")
        self._coordinator = asyncio.create_task(coordinator.run())
        started = time.monotonic()
        shape = map(str, (self._attempt.coordinator, options.nodes, options.ranks_per_node, options.step))
        self._agents = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.synthetic_agents", *shape, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            await self._next_event(EventKind.GENERATION_STARTED, _JOIN_SECONDS)
            joined = time.monotonic() - started
            await asyncio.sleep(_WARM_SECONDS)
            before = await self._ask_agents("reports 0")
            share = await self._measure_cpu()
            rate = ((await self._ask_agents("reports 0"))["reports"] - before["reports"]) / options.seconds
            verdicts = [await self._incident(kind, number) for number, kind in enumerate(KINDS * options.rounds)]
        finally:
            self._agents.terminate()
            self._coordinator.cancel()
            await asyncio.gather(self._coordinator, self._agents.wait(), return_exceptions=True)
        job = (
            f"{options.nodes * options.ranks_per_node} synthetic ranks behind {options.nodes} agents, steps of "
            f"{options.step:g} s, {options.seconds:g} s of steady state; all were ready after {joined:.1f} s; "
            f"{rate:.0f} reports a second, {1e6 * share / max(1.0, rate):.0f} us of CPU each"
        )
        return share, verdicts, job

    def _make_coordinator(self) -> Coordinator:
        options, token = self._options, LaunchToken(attempt=1, epoch=1, job_id="7", nonce="0badcafe")
        token.write(self._attempt.go)
        state = RunningAttempt(
            run=self._run, attempt=self._attempt, token=token, started=time.monotonic(),
            config=JobConfig(cluster=ClusterShape(nodes=options.nodes, ranks_per_node=options.ranks_per_node)),
            identity=NodeIdentity(kind="slurm", job_id="7", node=0, nodes=options.nodes, name="node0000"),
            events=EventLog(self._attempt.event_file("coordinator"), "coordinator", 1),
        )  # fmt: skip
        return Coordinator(state)

    async def _measure_cpu(self) -> float:
        """Measure CPU seconds per second while all ranks step."""
        cpu, start = time.process_time(), time.monotonic()
        await asyncio.wait({self._coordinator}, timeout=self._options.seconds)
        return (time.process_time() - cpu) / (time.monotonic() - start)

    async def _incident(self, kind: str, number: int) -> dict[str, Any]:
        """Stop one rank; return the kind, the seconds to the verdict (infinite for another rank), and a note."""
        # On a different node each time, because a node that hangs again is given up.
        rank = self._options.ranks_per_node * (self._options.nodes // 2 + number)
        stopped = await self._ask_agents(f"{kind} {rank}")
        event = await self._next_event(EventKind.INCIDENT, _VERDICT_SECONDS, required=False)
        if event is None:
            return {"kind": kind, "seconds": math.inf, "note": "no verdict in time"}
        verdict = json.loads((self._run.path / event.data["evidence"] / "verdict.json").read_text())
        if await self._next_event(EventKind.GENERATION_STARTED, _JOIN_SECONDS, required=False):
            await asyncio.sleep(_WARM_SECONDS)
        named, allowed = event.data["rank"], verdict["allowed_seconds"]
        # Seconds without progress when the rank was declared hung.
        age = next((entry["age"] for entry in verdict["ranks"] if entry["rank"] == rank), math.inf)
        culprit = "the right rank" if named == rank else f"rank {named} instead of {rank}"
        note = (
            f"{culprit} named {event.time - stopped['time']:.1f} s after it stopped, with its evidence; "
            f"{allowed:.1f} s allowed"
        )
        return {"kind": kind, "seconds": age - allowed if named == rank else math.inf, "note": note}

    async def _ask_agents(self, order: str) -> dict[str, Any]:
        """Send one order to the agents and return their answer."""
        assert self._agents.stdin is not None
        assert self._agents.stdout is not None
        self._agents.stdin.write(f"{order}\n".encode())
        answer: dict[str, Any] = json.loads(await self._agents.stdout.readline())
        return answer

    async def _next_event(self, kind: EventKind, seconds: float, *, required: bool = True) -> Event | None:
        """Return the next such event. Raises RuntimeError if a required one is missing or the coordinator ended."""
        give_up = time.monotonic() + seconds
        events: list[Event] = []
        while time.monotonic() < give_up and not self._coordinator.done():
            events, _ = read_events(self._attempt.event_file("coordinator"))
            for at, event in enumerate(events[self._read :], self._read + 1):
                if event.kind == kind:
                    self._read = at
                    return event
            await asyncio.sleep(0.25)
        if not required and not self._coordinator.done():
            return None
        ended = "; the coordinator ended" if self._coordinator.done() else ""
        newest = [f"{event.kind} {event.data}" for event in events[-4:]]
        raise RuntimeError(f"no {kind} within {seconds:.0f} s{ended}; newest events: {'; '.join(newest)}")


def measure(rows: Sequence[Row], options: argparse.Namespace) -> Iterator[tuple[Row, Result]]:
    wanted = options.nodes + _SPARE_FILES
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted > most:
        sys.exit(
            f"{options.nodes} agents need {wanted} open files, the limit is {most}: use --nodes {most - _SPARE_FILES}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(wanted, soft), most))
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
        share, verdicts, job = asyncio.run(ScaleBenchmark(Path(folder), options).play())
    for row in rows:
        found = [verdict for verdict in verdicts if verdict["kind"] == row.source]
        if row.source is None:
            yield row, Result(values=[share], notes=[job])
        elif found:
            seconds = [verdict["seconds"] for verdict in found]
            yield row, Result(values=seconds, notes=[verdict["note"] for verdict in found])


if __name__ == "__main__":
    OPTIONS: dict[str, dict[str, Any]] = {
        "--nodes": {"type": int, "default": 1250},
        "--ranks-per-node": {"type": int, "default": 8},
        "--seconds": {"type": float, "default": 20.0, "help": "seconds of steady state to measure"},
        "--step": {"type": float, "default": 1.0, "help": "seconds per step"},
    }
    sys.exit(run_table("scale", __doc__, ROWS, measure, rounds=1, options=OPTIONS))
