"""Two clusters with one home: one registry, a Slurm and a controller each, and what must hold for all their runs."""

from pathlib import Path
from random import Random
from typing import Any

from orchestrator.controller.reconcile import Controller
from orchestrator.errors import Fenced, SchedulerChanged
from orchestrator.registry.records import Lease, Run
from orchestrator.scheduler.scheduler_instance import unknown_instance
from orchestrator.states import AttemptState
from tests.fakes.memory_store import MemoryStore
from tests.fakes.model_clock import FakeClock
from tests.fakes.model_slurm import ModelSlurm
from tests.fakes.new_runs import create_run
from tests.scenarios.world import config
from trainer.protocol.run_dir import RunDir

A, B = "lab@login1:6817/aaaaaaaa", "lab@login1:6818/bbbbbbbb"
TTL = 60.0


class Site:
    """One cluster's login node: its Slurm, and the controller there; `reaches` is what its commands reach."""

    def __init__(self, name: str, store: Any, clock: FakeClock, rng: Random) -> None:
        self.name, self.reaches, self.store, self.clock, self.rng = name, name, store, clock, rng
        self.slurm = ModelSlurm(clock, Random(rng.random()))
        self.slurms = {name: self.slurm}
        self.silence = "Unable to contact slurm controller"
        self.lease: Lease | None = None
        self.lives = 0
        self.up = True
        self.controller: Controller | None = None

    def __call__(self, within: float = 0.0) -> str:
        """What the controller here takes for the name of its scheduler."""
        return self.reaches if self.slurms[self.reaches].reachable else ""

    def start(self) -> None:
        """Another process: it remembers nothing."""
        self.lives += 1
        self.lease = None
        schedulers = {"slurm": Switch(self)}
        self.controller = Controller(self.store, schedulers, clock=self.clock.as_clock(), instance=self)  # type: ignore[arg-type]
        self.controller.rng = Random(self.rng.random())

    def tick(self) -> None:
        """What the daemon does in a turn."""
        if not self.up or self.controller is None:
            return
        try:
            if self.lease is None:
                key = self() or unknown_instance("slurm")
                self.lease = self.store.take_lease(f"{self.name}:{self.lives}:0", self.clock.now, TTL, key)
            if self.lease is not None:
                report = self.controller.tick(self.lease)
                self.lease = self.controller.actor.lease
                assert not report.errors, report.errors
        except SchedulerChanged:
            self.store.drop_lease(self.lease)
            self.lease = None
        except Fenced:
            self.start()


class Switch:
    """The scheduler behind the commands of a site: whichever its configuration names now."""

    kind = "slurm"

    def __init__(self, site: Site) -> None:
        self._site = site

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._site.slurms[self._site.reaches], verb)


class Clusters:
    """Sites A and B over one registry and one folder of runs."""

    def __init__(self, root: Path, seed: int = 0, store: Any = None) -> None:
        self.rng, self.root = Random(seed), root
        self.clock, self.store = FakeClock(), store or MemoryStore()
        self.a, self.b = (Site(name, self.store, self.clock, self.rng) for name in (A, B))
        self.sites = (self.a, self.b)
        for site in self.sites:
            site.slurms = {A: self.a.slurm, B: self.b.slurm}
            site.start()
        self.b.slurm._next_id = 1  # the ids of both clusters are the same ones
        self.runs: list[str] = []

    def submit(self, scheduler: str, *, steps: int = 40, **identity: Any) -> str:
        run, _ = create_run(
            self.store,
            self.root,
            config(steps=steps),
            total_steps=steps,
            identity=identity,
            scheduler=scheduler,
            now=self.clock.now,
            nonce=f"{len(self.runs) + 1:08x}",
        )
        self.runs.append(run.name)
        return str(run.name)

    def run(self, name: str) -> Run:
        found: Run = self.store.rows(name)[0]
        return found

    def folder(self, name: str) -> RunDir:
        return RunDir(Path(self.run(name).run_dir))

    def turns(self, count: int, seconds: float = 2.0) -> None:
        for _ in range(count):
            for site in self.rng.sample(self.sites, 2):
                site.tick()
                self.check()
            self.a.slurm.step(seconds)
            self.clock.advance(-seconds)
            self.b.slurm.step(seconds)
            self.check()

    def live(self, name: str) -> list[tuple[str, str]]:
        """Jobs of a run that have been let go and may train, in any cluster."""
        ours = f"orch:{name}/"
        return [
            (site.name, job.job_id)
            for site in self.sites
            for job in site.slurm.jobs
            if job.spec.comment.startswith(ours) and job.live and not job.held and job.state != "COMPLETING"
        ]

    def check(self) -> None:
        """At most one live job for each run, in its own cluster, and no attempt over while its job lives."""
        for name in self.runs:
            live = self.live(name)
            assert len(live) <= 1, f"{name} has live jobs {live}"
            owner = self.run(name).scheduler
            assert all(owner in ("", where) for where, _ in live), f"{name} of {owner} has live jobs {live}"
            last = self.store.rows(name)[1][-1]
            if last.state in (AttemptState.ENDED, AttemptState.LOST):
                assert not live, f"{name}/{last.number} is {last.state}, and {live} lives"

    def close(self) -> None:
        for site in self.sites:
            site.slurm.close()
