"""A seeded trace: bad weather for a while, then a healed cluster in which the run must come to its end."""

from pathlib import Path
from random import Random
from typing import Any

from orchestrator.controller import failpoints
from orchestrator.registry.records import Run
from orchestrator.states import RunState
from tests.fakes.model_slurm import ModelJob, Weather
from tests.scenarios.world import World, config
from trainer.contract.outcome import Failure, FailureKind

BAD_TURNS = 60
"""Turns of controller and cluster with faults, before everything heals."""


def weather(rng: Random) -> Weather:
    return Weather(
        ambiguous=rng.choice([0.0, 0.3, 0.7]),
        late=rng.choice([0.0, 0.0, 0.3]),
        lost=rng.choice([0.0, 0.5]),
        accounting=rng.random() < 0.7,
        accounting_lag=rng.choice([0.0, 5.0, 60.0]),
    )


class Trace:
    """One seed's life of one run."""

    def __init__(self, root: Path, seed: int, monkeypatch: Any, store: Any = None) -> None:
        self.rng = Random(seed)
        steps = self.rng.choice([20, 60, 120])
        self.world = World(root, seed, store=store, data=config(steps=steps, every=self.rng.choice([2, 5, 10])))
        self.slurm = self.world.slurm
        self.slurm.weather = weather(self.rng)
        self.deadly = self.rng.choice([0.0, 0.01, 0.05])
        self.seconds = self.rng.choice([1.0, 2.0, 7.0])
        self.told: list[str] = []
        self.cancel_at = self.rng.randrange(BAD_TURNS) if self.rng.random() < 0.15 else None
        self.world.kill_at = lambda point: self.rng.random() < self.deadly
        monkeypatch.setattr(failpoints, "reach", self.world.reach)

    def close(self) -> None:
        """Give back the files of all jobs: ten thousand traces in one process would use up its descriptors."""
        self.slurm.close()

    def run(self) -> Run:
        """Bad weather, healing, the end."""
        for turn in range(BAD_TURNS):
            self._fault()
            if turn == self.cancel_at:
                self._ask("cancel")
            self.world.turns(1, self.seconds)
        self._heal()
        # A run that is held asked for a person: here is one.
        while self.world.finish(1500, 5.0).state is RunState.HELD:
            self._ask("resume")
            self.world.turns(1)
        return self.world.run

    def _ask(self, verb: str) -> None:
        self.told.append(verb)
        self.world.store.ask(self.world.name, verb, {}, self.world.clock.now)

    def _heal(self) -> None:
        self.deadly, self.slurm.reachable = 0.0, True
        self.slurm.weather = Weather()
        self.slurm.down.clear()
        self.told.append("healed")

    def _fault(self) -> None:
        if self.rng.random() > 0.25:
            return
        name = self.rng.choice(
            ["silence", "silence_ends", "silence_ends", "crash", "preempt", "node", "zombie", "agent", "rank",
             "forget", "requeue", "stuck", "scancel_held", "restart"]
        )  # fmt: skip
        self.told.append(name)
        getattr(self, f"_{name}")()

    def _job(self) -> ModelJob | None:
        return self.rng.choice(self.slurm.running() or [None])

    def _silence(self) -> None:
        self.slurm.reachable = False

    def _silence_ends(self) -> None:
        self.slurm.reachable = True

    def _crash(self) -> None:
        self.slurm.crash()

    def _restart(self) -> None:
        self.world.start_controller()

    def _preempt(self) -> None:
        if (job := self._job()) is not None:
            self.slurm.preempt(job)

    def _stuck(self) -> None:
        if (job := self._job()) is not None:
            self.slurm.end(job, "PREEMPTED", wait=self.rng.choice([120.0, 900.0]))

    def _node(self) -> None:
        if (job := self._job()) is not None and len(self.slurm.down) < 2:
            self.slurm.fail_node(job, zombie=False)

    def _zombie(self) -> None:
        if (job := self._job()) is not None and len(self.slurm.down) < 2:
            self.slurm.fail_node(job, zombie=True)

    def _agent(self) -> None:
        if (job := self._job()) is not None and job.agents is not None:
            job.agents.dead = True
            self.slurm.end(job, "FAILED")

    def _rank(self) -> None:
        if (job := self._job()) is not None and job.agents is not None and job.agents.training:
            job.agents.fail(Failure(kind=FailureKind.RANK_KILLED, reason="rank 1 died of SIGKILL", rank=1))

    def _forget(self) -> None:
        if (job := self._job()) is not None:
            self.slurm.forget(job)

    def _requeue(self) -> None:
        if (job := self._job()) is not None:
            self.slurm.requeue(job)

    def _scancel_held(self) -> None:
        held = [job for job in self.slurm.jobs if job.held and job.live]
        if held:
            self.slurm.end(held[0], "CANCELLED")
