"""The coordinator's watch over the ranks, generation after generation: hangs and stragglers, told and kept."""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from trainer.agent.control.wire import Message
from trainer.agent.coordination.board import board
from trainer.agent.coordination.generation import Generation
from trainer.agent.evidence.autopsy import is_due, of_desync, of_the_dead
from trainer.agent.evidence.incidents import failure, keep, told
from trainer.agent.fleet.roster import Roster
from trainer.agent.fleet.trial import Trial, usual
from trainer.agent.processes import apart
from trainer.agent.watch.blame import RankEnd
from trainer.agent.watch.pace import Pace
from trainer.agent.watch.stragglers import coordinate
from trainer.agent.watch.watchman import Incident, Watchman
from trainer.contract.config import JobConfig
from trainer.contract.events import EventKind, EventLog
from trainer.contract.outcome import Failure
from trainer.contract.run_dir import AttemptDir, RunDir

_KEEP_SECONDS = 5.0
"""How long a hung file system may hold up the kill after the evidence's own time is over."""
_SETTLED = 0.5
"""Seconds after a first bad end until most of the others have come, and their flight records are written."""


class Vigil:
    """Hears what agents tell of their ranks, and says when a generation hangs."""

    def __init__(self, run: RunDir, attempt: AttemptDir, config: JobConfig, events: EventLog, roster: Roster) -> None:
        self._run, self._attempt, self._config, self._events, self._roster = run, attempt, config, events, roster
        self._generation, self._watchman = 0, self._watch(0)
        self._pace: Pace | None = None
        self._trial: Trial | None = None
        self._unfit: Failure | None = None
        self._usual: asyncio.Future[dict[str, float]] | None = None

    def begin(self, generation: int) -> None:
        """A new generation: nothing of the one before counts."""
        self._generation, self._watchman = generation, self._watch(generation)
        cluster, straggler = self._config.cluster, self._config.recovery.straggler
        nodes = [member.name for member in self._roster.seated() for _ in range(cluster.ranks_per_node)]
        known = straggler.on and len(nodes) == cluster.world_size
        alike = coordinate(self._config.parallel)
        self._pace = Pace(cluster.world_size, alike, nodes, straggler) if known else None
        machines = {member.name: member.machine for member in self._roster.seated()}
        preflight = self._config.recovery.preflight
        self._trial = Trial(nodes, machines, preflight)
        # On one machine there is no other node to take, and what else runs there would count as the node's.
        if self._usual is None and cluster.kind == "slurm":
            self._usual = apart.begin(lambda: usual(self._run, self._attempt.number, preflight))
        self._unfit = None

    def _watch(self, generation: int) -> Watchman:
        # Of a user's own command no step is known, so nothing can be said about its standing still.
        seen = not self._config.command
        hang, world = self._config.recovery.hang, self._config.cluster.world_size
        gpus = bool(self._config.cluster.gpus_per_node)
        return Watchman(hang, self._roster, generation, time.monotonic(), world=world, seen=seen, on_gpus=gpus)

    def heard(self, node: int, message: Message) -> None:
        """A report, flight records, or the end of collecting evidence; raises what a malformed one raises."""
        match message["say"]:
            case "progress":
                self._watchman.heard(node, message, time.monotonic())
                for verdict in self._pace.heard(message.get("work", ())) if self._pace else ():
                    self._events.write(EventKind.STRAGGLER, **asdict(verdict))
            case "fitness":
                self._hear_fitness(message)
            case "flight":
                self._watchman.answered(node, message)
            case "evidence":
                self._watchman.collected(node, message)

    def _hear_fitness(self, message: Message) -> None:
        if self._trial is not None and self._trial.heard(message, time.monotonic()):
            self._judge(self._trial)

    def _judge(self, trial: Trial) -> None:
        """Hold the figures that have come against each other."""
        known = self._usual is not None and self._usual.done()
        unfit = self._unfit = trial.failure(self._usual.result() if known and self._usual is not None else None)
        whose = {} if unfit is None else {"name": unfit.node}
        late = trial.missing()
        why = f"nothing was told by {len(late)} rank(s) within recovery.preflight.seconds: {late[:8]}" if late else ""
        reason, speeds = why if unfit is None else unfit.reason, trial.told()
        self._events.write(EventKind.PREFLIGHT, ok=unfit is None, reason=reason, speeds=speeds, **whose)

    def board(self, wall: float) -> dict[str, Any]:
        """What ranks.json says now; `wall` is the time of day."""
        scene = self._watchman.scene
        seen = scene.at(time.monotonic())
        ratios = {verdict.rank: verdict.ratio for verdict in self._pace.slow()} if self._pace else {}
        return board(seen, time=wall, generation=self._generation, p99=scene.p99(), ratios=ratios)

    async def look(self, now: Generation) -> Failure | None:
        """What breaks the generation that its ranks cannot say themselves; None while there is no such thing."""
        if now.first_failure is None:
            return self._found_unfit() or await self._found_hung()
        if now.looked_back or now.broken is not None:
            return None
        # With all of them gone, the next decision waits for nobody.
        if len(now.ends) < self._config.cluster.world_size and time.monotonic() - now.first_failure < _SETTLED:
            return None
        now.looked_back = True
        ends = tuple(now.ends.values())
        return await self._found_apart(ends) if is_due(ends) else None

    def _found_unfit(self) -> Failure | None:
        """A node that was measured too slow."""
        if self._trial is not None and self._trial.given_up(time.monotonic()):
            self._judge(self._trial)
        unfit, self._unfit = self._unfit, None
        return unfit

    async def _found_hung(self) -> Failure | None:
        """A hang that is certain, once its evidence is kept."""
        incident = self._watchman.look(time.monotonic())
        return None if incident is None else await self._conclude(incident)

    async def _found_apart(self, ends: Sequence[RankEnd]) -> Failure | None:
        """Ranks had called different collectives, although each that died only says that others went away."""
        world = self._config.cluster.world_size
        try:
            async with asyncio.timeout(_KEEP_SECONDS):
                finding = await asyncio.to_thread(of_the_dead, self._attempt, self._generation, world)
        except TimeoutError:
            return None
        judgement = None if finding is None else of_desync(finding, ends)
        if judgement is None:
            return None
        name, now = f"g{self._generation:03d}-{judgement.kind}", time.monotonic()
        return await self._conclude(
            Incident(name=name, judgement=judgement, began=now, quiet=0.0, until=now, waits=set())
        )

    async def _conclude(self, incident: Incident) -> Failure | None:
        withdrawn = self._watchman.moved_since(incident)
        bundle = self._attempt.incident(incident.name)
        seen = self._watchman.scene.at(incident.began)
        try:
            await asyncio.wait_for(asyncio.to_thread(keep, bundle, incident, seen, withdrawn=withdrawn), _KEEP_SECONDS)
        except (OSError, TimeoutError) as error:  # what is wrong with the disk may be what hangs
            sys.stderr.write(f"orch-agent: cannot write {bundle}: {error!r}\n")
        path = str(bundle.relative_to(self._run.path))
        self._events.write(EventKind.INCIDENT, **told(incident, path, withdrawn=withdrawn))
        if withdrawn:
            self._watchman.withdraw()
            return None
        return failure(incident.judgement, path)
