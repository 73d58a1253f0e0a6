"""Synthetic agents, all in one process: they join, report and answer like real ones, without ranks.

    python -m benchmarks.synthetic_agents COORDINATOR_JSON NODES RANKS_PER_NODE STEP_SECONDS

A line on stdin stops one rank: `stopped RANK` (its process is halted) or `forward RANK` (it computes forever). The
answer is a line of JSON with the time of the stop, in seconds since the epoch. `reports 0` requests the report count.
"""

import asyncio
import functools
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.agent.control.tcp_transport import CoordinatorPeer, connect
from trainer.agent.flight.flight_record import CollectiveEntry, FlightRecord, Group
from trainer.agent.watch.hang_limits import RankSample, ReportSchedule
from trainer.agent.watch.sampling import STILL
from trainer.protocol.messages import agents
from trainer.protocol.messages.agents import PROTOCOL, Hello, installed_release
from trainer.protocol.rank_progress.progress import SECTIONS

_JOIN_AT_ONCE = 100
_SHARE = {"data": 0.05, "forward": 0.35, "backward": 0.55, "optimizer": 0.05}
_LOOK_SECONDS = 0.2
_COLLECTIVES = 4
"""Collectives in each step."""
_P99_SECONDS = 10.0
_FLIGHTS_AT_ONCE = 4
"""As in `trainer.agent.watch.evidence`."""


class SyntheticRanks:
    """Positions of all ranks: they step together, until one stops and the others wait for it in a collective."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began, self._generation = time.monotonic(), 0
        self.culprit, self.how, self.stopped = -1, "", 0.0
        self.reports = 0

    def stop(self, how: str, rank: int) -> None:
        """Stop a rank in the middle of a forward pass."""
        step = int((time.monotonic() - self._began) / self.seconds) + 1
        self.culprit, self.how = rank, how
        self.stopped = self._began + (step + 0.2) * self.seconds

    def begin(self, generation: int) -> None:
        """Start a generation; every agent calls this, and only the first call counts."""
        if generation > self._generation:
            self._generation, self._began, self.culprit = generation, time.monotonic(), -1

    def see(self, rank: int, node: str) -> RankSample:
        """Return the current sample of one rank."""
        now, is_waiting = time.monotonic(), False
        at = now
        if self.culprit >= 0 and now > self.stopped:
            waits = self.stopped + (0.0 if rank == self.culprit else 0.5 * self.seconds)
            at, is_waiting = min(now, waits), now > waits
        step, into = divmod((at - self._began) / self.seconds, 1.0)
        phase, entered = _phase(into)
        age = now - at if is_waiting else (into - entered) * self.seconds
        return RankSample(
            rank=rank, node=node, step=int(step), phase=phase, first=step < 1, age=round(age, 4),
            collective=int(step) * _COLLECTIVES + (2 if phase == "backward" else 1), alive=round(age, 4),
            state="T" if age > STILL and self._is_halted(rank) else "S" if is_waiting else "R",
            lock=0.01,
        )  # fmt: skip

    def sees_halted(self, ranks: range) -> bool:
        return self._is_halted(self.culprit) and self.culprit in ranks and time.monotonic() > self.stopped + STILL

    def _is_halted(self, rank: int) -> bool:
        return rank == self.culprit >= 0 and self.how == "stopped" and time.monotonic() > self.stopped

    def work(self, rank: int, step: int) -> tuple[int, ...]:
        total = int(step * self.seconds * 1e9)
        return (rank, step, *(int(total * _SHARE[section.name.lower()]) for section in SECTIONS))

    def flight(self, rank: int, node: str, world: tuple[int, ...]) -> str:
        """Return the flight record of a rank that has run only all-reduces."""
        entered = self.see(rank, node).collective
        return _flight(entered, entered if rank == self.culprit else entered - 1, world).replace("-1", str(rank), 1)


@functools.lru_cache(maxsize=8)
def _flight(entered: int, completed: int, world: tuple[int, ...]) -> str:
    """Return a template record for rank -1, cached because one process writes the records of all ranks here."""
    states = ["done"] * completed + ["scheduled"] * (entered - completed)
    newest = list(enumerate(states, 1))[-30:]
    entries = tuple(
        CollectiveEntry("0", at, "all_reduce", "1024x1024", 1 << 20, "Float", state) for at, state in newest
    )
    return FlightRecord(
        rank=-1, groups={"0": Group(world, entered, completed, "default_pg")}, entries=entries
    ).to_json()


def _phase(into: float) -> tuple[str, float]:
    """Return the phase at this share of a step, and the share at which it began."""
    at = 0.0
    for phase, share in _SHARE.items():
        if into < at + share:
            return phase, at
        at += share
    return "optimizer", 1.0 - _SHARE["optimizer"]


class SyntheticAgent:
    """Agent of one node; `world` is shared by all."""

    def __init__(self, node: int, nodes: int, ranks: int, world: SyntheticRanks) -> None:
        self._node, self._name, self._world = node, f"node{node:04d}", world
        self._ranks, self._all = range(node * ranks, (node + 1) * ranks), tuple(range(nodes * ranks))
        self._schedule, self._generation, self._p99_sent = ReportSchedule(node, nodes, time.monotonic()), 0, 0.0
        self._newest: dict[int, int] = {}
        self._peer: CoordinatorPeer

    async def live(self, address: dict[str, Any], attempt: int) -> None:
        hello = Hello(protocol=PROTOCOL, release=installed_release(), node=self._node, name=self._name, attempt=attempt)
        while not hasattr(self, "_peer"):
            try:
                self._peer = await connect(address["host"], address["port"], address["token"], hello)
            except OSError:
                await asyncio.sleep(0.2)
        self._peer.send(agents.PreflightReport(faults=()))
        self._peer.send(agents.Ready(warm=True))
        reporting = asyncio.create_task(self._report())
        try:
            while (message := await self._peer.receive()) is not None and not isinstance(message, agents.End):
                self._obey(message)
        finally:
            reporting.cancel()
            await self._peer.close()

    def _obey(self, message: agents.ToAgent) -> None:
        match message:
            case agents.StartGeneration():
                self._generation, self._newest = message.generation, {}
                self._world.begin(self._generation)
            case agents.QueryFlights():
                flights = [self._world.flight(rank, self._name, self._all) for rank in self._answering()]
                unanswered = tuple(rank for rank in self._ranks if rank not in self._answering())
                answer = agents.FlightRecords(generation=message.generation, serial=message.serial)
                for first in range(0, len(flights), _FLIGHTS_AT_ONCE):
                    self._peer.send(replace(answer, flights=tuple(flights[first : first + _FLIGHTS_AT_ONCE])))
                self._peer.send(replace(answer, unanswered=unanswered, last=True))
            case agents.ReportOften():
                self._schedule.attend(message.seconds, time.monotonic())
            case agents.CollectEvidence():
                self._peer.send(agents.EvidenceCollected(generation=message.generation, incident=message.incident))
            case agents.KillGeneration():
                self._peer.send(agents.GenerationGone(generation=message.generation))

    def _answering(self) -> list[int]:
        """Return the ranks that answer; a halted process does not."""
        halted = self._world.culprit if self._world.how == "stopped" else -1
        return [rank for rank in self._ranks if rank != halted]

    async def _report(self) -> None:
        await asyncio.sleep(random.random() * _LOOK_SECONDS)
        while True:
            if self._schedule.due(time.monotonic(), closely=self._world.sees_halted(self._ranks)):
                self._peer.send(self._progress())
                self._world.reports += 1
            await asyncio.sleep(_LOOK_SECONDS)

    def _progress(self) -> agents.ProgressReport:
        if not self._generation:
            return agents.ProgressReport(generation=0)
        samples = [self._world.see(rank, self._name) for rank in self._ranks]
        step = min(sample.step for sample in samples)
        newer = [sample for sample in samples if sample.step > self._newest.get(sample.rank, 0)]
        work = tuple(self._world.work(sample.rank, sample.step) for sample in newer)
        self._newest.update({row[0]: row[1] for row in work})
        return agents.ProgressReport(
            generation=self._generation, step=step, phase=samples[0].phase, loss=2.5 + random.random(), total=1_000_000,
            step_seconds=1.0, stepped=step > 0, samples=tuple(sample.to_row() for sample in samples), work=work,
            p99=self._p99(),
        )  # fmt: skip

    def _p99(self) -> dict[str, float]:
        """Return the p99 of each phase, which changes occasionally."""
        now = time.monotonic()
        if now - self._p99_sent < _P99_SECONDS:
            return {}
        self._p99_sent = now
        return {phase: round(_SHARE[phase] * self._world.seconds * random.uniform(1.0, 1.4), 3) for phase in _SHARE}


async def _follow_orders(world: SyntheticRanks) -> None:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        how, rank = line.split()
        if how == "reports":
            print(json.dumps({"reports": world.reports}), flush=True)
            continue
        world.stop(how, int(rank))
        print(json.dumps({"rank": world.culprit, "time": time.time() + world.stopped - time.monotonic()}), flush=True)


async def main(found: Path, nodes: int, ranks: int, seconds: float) -> None:
    address, world = json.loads(found.read_text()), SyntheticRanks(seconds)
    attempt = int(found.parent.name)
    orders = asyncio.create_task(_follow_orders(world))
    agents = [SyntheticAgent(node, nodes, ranks, world) for node in range(nodes)]
    living = []
    for at in range(0, nodes, _JOIN_AT_ONCE):
        living += [asyncio.create_task(agent.live(address, attempt)) for agent in agents[at : at + _JOIN_AT_ONCE]]
        await asyncio.sleep(0.05)
    await asyncio.gather(*living)
    orders.cancel()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
