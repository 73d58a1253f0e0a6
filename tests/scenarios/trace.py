"""A seeded trace: Slurm faults for a while, then a healed cluster in which the run must come to its end."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from orchestrator import failpoints
from orchestrator.controller import reconcile
from orchestrator.registry.records import Attempt, Run
from orchestrator.run_dirs import run_folder
from orchestrator.states import ENDED_RUNS, RunState
from tests.fakes.model_slurm import REWRITES, ModelJob, SlurmFaults
from tests.fakes.outages import PASSING_REFUSALS
from tests.scenarios.world import World, config
from trainer.protocol.failures.outcome import Failure, FailureKind

BAD_TURNS = 60
"""Turns of controller and cluster with faults, before the weather clears; outages go on until their own time."""
LONGEST_OUTAGE = 20 * 3600.0
"""Seconds that an outage lasts at most: shorter than the day for which a run waits by default."""
SOON = 2 * 3600.0
"""Seconds after the last outage within which the run must have come to its end."""

MOMENTS = (
    "silence", "silence_ends", "silence_ends", "crash", "preempt", "node", "zombie", "agent", "rank", "forget",
    "requeue", "stuck", "scancel_held", "restart", "rename", "foreign", "pause", "clock",
)  # fmt: skip
"""Faults that strike once; each is a method of Trace with an underscore before its name."""
OUTAGES = (
    "refusals", "boots", "preemptions", "decommission", "long_silence", "freeze", "hung_folder", "hidden_folder",
)  # fmt: skip
"""Faults that last: minutes mostly, hours sometimes. They end by themselves."""


def slurm_faults(rng: Random) -> SlurmFaults:
    return SlurmFaults(
        ambiguous=rng.choice([0.0, 0.3, 0.7]),
        late=rng.choice([0.0, 0.0, 0.3]),
        lost=rng.choice([0.0, 0.5]),
        accounting=rng.random() < 0.7,
        accounting_lag=rng.choice([0.0, 5.0, 60.0]),
        rewrites=frozenset(rng.choice([(), (), ("name",), ("comment",), ("name", "comment"), REWRITES])),
        partial=rng.choice([0.0, 0.0, 0.1]),
        garbled=rng.choice([0.0, 0.0, 0.1]),
    )


class Trace:
    """One seed's life of one run."""

    def __init__(
        self, root: Path, seed: int, monkeypatch: Any, data: Callable[..., dict[str, Any]] = config
    ) -> None:  # fmt: skip
        """`data`: the config of a run with these `steps` and a checkpoint `every` so many."""
        self.rng = Random(seed)
        steps = self.rng.choice([20, 120, 300, 600])
        self.world = World(root, seed, data=data(steps=steps, every=self.rng.choice([2, 10, 50])))
        self.slurm = self.world.slurm
        self.slurm.slurm_faults = slurm_faults(self.rng)
        self.deadly = self.rng.choice([0.0, 0.01, 0.05])
        self.seconds = self.rng.choice([1.0, 2.0, 7.0])
        self.told: list[str] = []
        self.began = self.outages_end = self.world.clock.now
        self.cancel_at = self.rng.randrange(BAD_TURNS) if self.rng.random() < 0.15 else None
        self.world.kill_at = lambda point: self.rng.random() < self.deadly
        self.pauses = self.hidden = False
        self.ends: dict[str, float] = {}  # when these outages end
        monkeypatch.setattr(failpoints, "reach", self._reach)
        monkeypatch.setattr(reconcile, "check_run_folder", self._hidden)

    def close(self) -> None:
        """Give back the files of all jobs: ten thousand traces in one process would use up its descriptors."""
        self.slurm.close()

    def run(self) -> Run:
        """Bad weather, outages that end by themselves, the end of the run: nobody types anything."""
        for turn in range(BAD_TURNS):
            self._fault()
            if turn == self.cancel_at:
                self._ask("cancel")
            self._turn(self.seconds)
        self._clear()
        while self.world.clock.now < self.outages_end and not self._over():
            self._turn(max(5.0, min(120.0, self.outages_end - self.world.clock.now)))
        self._heal()
        healed = self.world.clock.now
        while not self._over() and self.world.clock.now - healed < SOON:
            self._turn(5.0)
        return self.world.run

    def _over(self) -> bool:
        # Whoever cancels a job with scancel means it: only then a person has to take it up again.
        if self.world.run.state is RunState.HELD and "was cancelled, not by orch" in self.world.run.reason:
            assert "scancel_held" in self.told
            self._ask("resume")
            self.world.turns(1)
        return self.world.run.state in ENDED_RUNS | {RunState.HELD}

    def _turn(self, seconds: float) -> None:
        if self.slurm.silent_until and self.world.clock.now >= self.slurm.silent_until:
            self.slurm.reachable, self.slurm.silent_until = True, 0.0
        for name in [name for name, until in self.ends.items() if self.world.clock.now >= until]:
            self._end(name)
        self.world.turns(1, seconds)
        self.world.sleep()

    def _ask(self, verb: str) -> None:
        self.told.append(verb)
        self.world.store.add_user_request(self.world.name, verb, {}, self.world.clock.now)

    def _clear(self) -> None:
        self.deadly, self.slurm.slurm_faults = 0.0, SlurmFaults()
        self.slurm.reachable = not self.slurm.silent_until
        self.slurm.down.clear()
        self.told.append("cleared")

    def _heal(self) -> None:
        self.slurm.outages.end()
        self.slurm.reachable, self.slurm.silent_until = True, 0.0
        self.world.clock.error = 0.0
        for name in list(self.ends):
            self._end(name)

    def _fault(self) -> None:
        if self.rng.random() > 0.25:
            return
        name = self.rng.choice(OUTAGES if self.rng.random() < 0.12 else MOMENTS)
        self.told.append(name)
        getattr(self, f"_{name}")()

    # -- outages

    def _until(self, longest: float = LONGEST_OUTAGE) -> float:
        """When an outage that begins now ends: one in five lasts for hours."""
        lasts = self.rng.uniform(60.0, longest if self.rng.random() < 0.2 else 1800.0)
        # No outage at all may be longer than a day, however many meet.
        until = min(self.world.clock.now + lasts, self.began + LONGEST_OUTAGE)
        self.outages_end = max(self.outages_end, until)
        return until

    def _refusals(self) -> None:
        self.slurm.outages.words = self.rng.choice(PASSING_REFUSALS)
        self.slurm.outages.refused_until = self._until()

    def _boots(self) -> None:
        self.slurm.outages.boots_fail_until = self._until()

    def _preemptions(self) -> None:
        self.slurm.outages.preempted_after = self.rng.choice([1.0, 30.0, 600.0])
        self.slurm.outages.preempted_until = self._until(7200.0)

    def _decommission(self) -> None:
        if len(self.slurm.nodes) > 2 and (job := self._job()) is not None and job.agents is not None:
            node = job.nodes[0]
            job.agents.fail(Failure(kind=FailureKind.NODE_SUSPECT, reason="its GPU is lost", node=node))
            self.slurm.decommission(node)

    def _long_silence(self) -> None:
        self.slurm.reachable, self.slurm.silent_until = False, self._until()

    def _freeze(self) -> None:
        """Its coordinator stands still for good; its peers say so, or there are none."""
        if (job := self._job()) is not None and job.agents is not None:
            job.agents.frozen = True
            self.outages_end = max(self.outages_end, self.world.clock.now + 1200.0)
            if self.rng.random() < 0.5:
                job.agents.lose_coordinator()

    def _hung_folder(self) -> None:
        self.ends["hung_folder"] = self._until(7200.0)
        self.world.files.hung = {self.world.folder.path}

    def _hidden_folder(self) -> None:
        self.ends["hidden_folder"] = self._until(7200.0)
        self.hidden = True

    def _end(self, name: str) -> None:
        del self.ends[name]
        if name == "hung_folder":
            self.world.files.hung = set()
        else:
            self.hidden = False

    def _hidden(self, run: Run, first: Attempt) -> str:
        """Stands in for `folder.hidden`: what the host of the controller sees."""
        return (
            f"the run directory is not visible: {run.run_dir}"
            if self.hidden
            else run_folder.check_run_folder(run, first)
        )

    def _reach(self, point: str) -> None:
        """Stands in for `failpoints.reach`: the controller is stopped here, and goes on behind its successor's back."""
        if self.pauses:
            self.pauses = False
            self.world.take_over()
            self.world.turns(self.rng.randrange(5), self.seconds)
        self.world.reach(point)

    # -- faults of a moment

    def _rename(self) -> None:
        if (job := self._job()) is not None:
            self.slurm.rewrite(job, self.rng.choice([("name",), ("comment",), REWRITES]))

    def _foreign(self) -> None:
        self.slurm.add_foreign(comment="x" * 800)

    def _pause(self) -> None:
        self.pauses = True

    def _clock(self) -> None:
        """Somebody sets the wall clock of the login node, or sets it right again."""
        self.world.clock.error = self.rng.choice([0.0, 0.0, -86400.0, -3600.0, 3600.0])

    def _job(self) -> ModelJob | None:
        return self.rng.choice([job for job in self.slurm.running() if job.agents is not None] or [None])

    def _silence(self) -> None:
        self.slurm.reachable = False

    def _silence_ends(self) -> None:
        self.slurm.reachable = not self.slurm.silent_until

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
