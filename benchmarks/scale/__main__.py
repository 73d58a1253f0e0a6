"""Cost of 10,000 ranks for their coordinator, and its time to detect a stopped one.

    python -m benchmarks.scale [--nodes 1250] [--ranks-per-node 8] [--seconds 20] [--step 1.0] [--rounds 1]
                               [--json] [--profile]

The coordinator in this process is real; its agents, in another process, are synthetic: they join over loopback with the
real protocol, and report like real agents, with every rank changed in every report. CPU is the coordinator process's,
as a share of one core. A verdict's time begins when the culprit's own limit is over, and ends when it is declared hung:
flight records of all ranks are requested, read and compared in between; evidence, which real agents take up to ten
seconds to collect, follows. One process writes the records of all ranks here, whereas in a real job each node writes
its own, so the measured times of verdicts are too long. Exit code 1 if a must is missed or another rank is named.
"""

import argparse
import asyncio
import cProfile
import json
import math
import os
import pstats
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.scale.table import MUST, STRETCH, report
from trainer.agent.attempt_state.attempt_state import CoordinatorState
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the steady state that is measured")
    parser.add_argument("--step", type=float, default=1.0, help="seconds that a step takes")
    parser.add_argument("--rounds", type=int, default=1, help="incidents of each kind; 0: CPU only")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--profile", action="store_true", help="where the coordinator's time goes; figures are worse")
    options = parser.parse_args()
    wanted = options.nodes + _SPARE_FILES
    _soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted > most:
        print(
            f"{options.nodes} agents need {wanted} open files, the limit is {most}: use --nodes {most - _SPARE_FILES}"
        )
        return 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(wanted, _soft), most))
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
        found = asyncio.run(ScaleBenchmark(Path(folder), options).play())
    print(json.dumps(found) if options.json else report(found))
    return int(any(row["value"] > row["must"] or row["good"] < row["rounds"] for row in found["rows"]))


class ScaleBenchmark:
    """Benchmark of one attempt of one job."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._options = options
        self._run = RunDir(folder / "run-1")
        self._run.make()
        self._attempt: AttemptDir = self._run.attempt(1)
        self._attempt.make()
        self._read = 0

    async def play(self) -> dict[str, Any]:
        leader = self._coordinator()
        await leader.open("127.0.0.1")
        leading = asyncio.create_task(leader.run())
        started, agents = time.monotonic(), await self._agents()
        try:
            await self._until(EventKind.GENERATION_STARTED, _JOIN_SECONDS, leading)
            joined = time.monotonic() - started
            await asyncio.sleep(_WARM_SECONDS)
            before = await self._ask_agents(agents, "reports 0")
            share = await self._steady(leading)
            after = await self._ask_agents(agents, "reports 0")
            rate = (after["reports"] - before["reports"]) / self._options.seconds
            verdicts = [
                await self._incident(agents, kind, number, leading)
                for number, kind in enumerate(KINDS * self._options.rounds)
            ]
        finally:
            agents.terminate()
            leading.cancel()
            await asyncio.gather(leading, agents.wait(), return_exceptions=True)
        return self._found(joined, share, rate, verdicts)

    def _coordinator(self) -> Coordinator:
        options, token = self._options, LaunchToken(attempt=1, epoch=1, job_id="7", nonce="0badcafe")
        token.write(self._attempt.go)
        state = CoordinatorState(
            run=self._run, attempt=self._attempt, token=token, started=time.monotonic(),
            config=JobConfig(cluster=ClusterShape(nodes=options.nodes, ranks_per_node=options.ranks_per_node)),
            identity=NodeIdentity(kind="slurm", job_id="7", node=0, nodes=options.nodes, name="node0000"),
            events=EventLog(self._attempt.event_file("coordinator"), "coordinator", 1),
        )  # fmt: skip
        return Coordinator(state)

    async def _agents(self) -> asyncio.subprocess.Process:
        shape = [str(self._options.nodes), str(self._options.ranks_per_node), str(self._options.step)]
        words = ["-m", "benchmarks.scale.agents", str(self._attempt.coordinator), *shape]
        return await asyncio.create_subprocess_exec(
            sys.executable, *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    async def _steady(self, leading: "asyncio.Task[int]") -> float:
        """Measure CPU seconds per second while all ranks step."""
        profile = cProfile.Profile() if self._options.profile else None
        if profile is not None:
            profile.enable()
        cpu, start = time.process_time(), time.monotonic()
        await asyncio.wait({leading}, timeout=self._options.seconds)
        share = (time.process_time() - cpu) / (time.monotonic() - start)
        if profile is not None:
            profile.disable()
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)
        return share

    async def _incident(
        self, agents: asyncio.subprocess.Process, kind: str, number: int, leading: "asyncio.Task[int]"
    ) -> dict[str, Any]:
        """Stop one rank; return the verdict and its timing."""
        # On a different node each time, because a node that hangs again is given up.
        rank = self._options.ranks_per_node * (self._options.nodes // 2 + number)
        stopped = await self._ask_agents(agents, f"{kind} {rank}")
        event = await self._until(EventKind.INCIDENT, _VERDICT_SECONDS, leading, stern=False)
        if event is None:
            return {
                "kind": kind,
                "after": math.inf,
                "limit": math.nan,
                "seconds": math.inf,
                "right": False,
                "rank": rank,
            }
        verdict = json.loads((self._run.path / event["data"]["evidence"] / "verdict.json").read_text())
        after = event["time"] - stopped["time"]
        if await self._until(EventKind.GENERATION_STARTED, _JOIN_SECONDS, leading, stern=False):
            await asyncio.sleep(_WARM_SECONDS)
        right, allowed = event["data"]["rank"] == rank, verdict["allowed_seconds"]
        # Its age when it was declared hung.
        late = next((one["age"] for one in verdict["ranks"] if one["rank"] == rank), math.inf) - allowed
        return {
            "kind": kind, "after": after, "limit": allowed, "seconds": late if right else math.inf, "right": right,
            "rank": rank, "named": event["data"]["rank"],
        }  # fmt: skip

    async def _ask_agents(self, agents: asyncio.subprocess.Process, order: str) -> dict[str, Any]:
        """Send one order to the agents and return their answer."""
        assert agents.stdin is not None
        assert agents.stdout is not None
        agents.stdin.write(f"{order}\n".encode())
        answer: dict[str, Any] = json.loads(await agents.stdout.readline())
        return answer

    async def _until(
        self, kind: EventKind, seconds: float, leading: "asyncio.Task[int]", *, stern: bool = True
    ) -> dict[str, Any] | None:
        """Return the next event of this kind after the last returned one; a timeout is an error if `stern`."""
        give_up = time.monotonic() + seconds
        events: list[Event] = []
        while time.monotonic() < give_up and not leading.done():
            events, _ = read_events(self._attempt.event_file("coordinator"))
            for at, event in enumerate(events[self._read :], self._read + 1):
                if event.kind == kind:
                    self._read = at
                    return {"time": event.time, "data": event.data}
            await asyncio.sleep(0.25)
        if not stern and not leading.done():
            return None
        ended = "; the coordinator ended" if leading.done() else ""
        told = [f"{event.kind} {event.data}" for event in events[-4:]]
        raise RuntimeError(f"no {kind} within {seconds:.0f} s{ended}; the last it said: {'; '.join(told)}")

    def _found(self, joined: float, share: float, rate: float, verdicts: list[dict[str, Any]]) -> dict[str, Any]:
        options = self._options
        whole = {"rounds": 1, "good": 1, "wrong": 0}
        rows = [{"row": "coordinator: CPU of one core", "value": share, **_bounds("cpu"), **whole}]
        for kind in KINDS if verdicts else ():
            rows.append(_verdicts(kind, [verdict for verdict in verdicts if verdict["kind"] == kind]))
        return {
            "benchmark": "scale", "nodes": options.nodes, "ranks": options.nodes * options.ranks_per_node,
            "cores": os.cpu_count(), "seconds": options.seconds, "step": options.step, "joined": joined,
            "reports_a_second": rate,
            "verdicts": verdicts, "rows": rows,
        }  # fmt: skip


def _verdicts(kind: str, verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of one kind of incident; a late or wrong verdict counts as never."""
    times = [verdict["seconds"] for verdict in verdicts]
    return {
        "row": f"limit over -> verdict ({kind})", "value": statistics.median(times), **_bounds("verdict"),
        "rounds": len(times), "good": sum(map(math.isfinite, times)),
        "wrong": sum("named" in verdict and not verdict["right"] for verdict in verdicts),
    }  # fmt: skip


def _bounds(name: str) -> dict[str, float]:
    return {"must": MUST[name], "stretch": STRETCH[name]}


if __name__ == "__main__":
    sys.exit(main())
