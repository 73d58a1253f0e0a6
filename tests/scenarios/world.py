"""One run in a simulated cluster: a model Slurm, a controller that may die anywhere, and what must always hold."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from checkpointing.storage.durable import canonical
from orchestrator import failpoints
from orchestrator.controller.reconcile import Controller, TickReport
from orchestrator.errors import Fenced
from orchestrator.observed_since import ObservedSince
from orchestrator.recovery.classify_failure import LEAVING_LIMIT
from orchestrator.registry.lease import LEASE_TTL, observed_state
from orchestrator.registry.records import Attempt, Lease, Run
from orchestrator.run_dirs.controlled_run import ControlledRun
from orchestrator.states import ENDED_RUNS, AttemptState, RunState
from tests.fakes.hung_files import HungFiles
from tests.fakes.memory_store import MemoryStore
from tests.fakes.model_clock import FakeClock
from tests.fakes.new_runs import create_run
from tests.fakes.outages import OutageSlurm
from trainer.protocol.config import RecoveryConfig
from trainer.protocol.events import EventLog
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.run_dir import RunDir


class Killed(BaseException):
    """The controller died here."""


def config(*, steps: int = 40, every: int = 5, **recovery: Any) -> dict[str, Any]:
    """A resolved config as the registry keeps it."""
    return {
        "name": "sim",
        "cluster": {"kind": "slurm", "nodes": 1, "cpus_per_task": 1},
        "train": {"steps": steps},
        "checkpoint": {"every": every},
        "recovery": recovery,
    }


class World:
    """Drives controller and cluster by turns and checks the promises after every turn."""

    def __init__(self, root: Path, seed: int = 0, *, store: Any = None, data: dict[str, Any] | None = None) -> None:
        self.rng = Random(seed)
        self.clock = FakeClock()
        self.store = store or MemoryStore()
        self.slurm = OutageSlurm(self.clock, Random(seed + 1))
        self.root = root
        data = data or config()
        run, _ = create_run(
            self.store,
            root,
            json.loads(canonical(data)),
            total_steps=data["train"]["steps"],
            now=self.clock.now,
            nonce="00000001",
        )
        self.name = run.name
        self.kill_at: Callable[[str], bool] = lambda point: False
        self.files = HungFiles()
        self.lives = 0
        self.reports: list[TickReport] = []
        self._checked: set[tuple[Path, int, int]] = set()  # launch tokens by file: a new one is a new file
        self.start_controller()

    def open_events(self, source: str) -> EventLog:
        """Begin the first attempt and open the event file of this source."""
        self.tick()
        return EventLog(self.folder.attempt(1).event_file(source), source, 1, clock=self.clock)

    # -- the controller

    def start_controller(self) -> None:
        """A fresh process: nothing is remembered but the registry and the files."""
        self.lives += 1
        held = self.store.lease()
        if held is not None and held.holder:
            self.store.drop_lease(held)
        self._control(self.store.take_lease(f"login:{self.lives}:0", self.clock.wall(), LEASE_TTL))

    def take_over(self) -> None:
        """Another controller watches the lease, as the first one does nothing, and takes it when it has expired."""
        observed, before = ObservedSince(self.clock), self.store.lease()
        assert before is not None
        while not observed_state(self.store.lease(), observed).may_take:
            self.slurm.step(5.0)
        self.lives += 1
        holder = f"login:{self.lives}:0"
        self._control(self.store.take_lease(holder, self.clock.wall(), LEASE_TTL, over=[before]))

    def _control(self, lease: Lease | None) -> None:
        assert lease is not None
        self.lease, clock = lease, self.clock.as_clock()
        self.controller = Controller(
            self.store, {"slurm": self.slurm}, clock=clock, files=self.files, usable_nodes=self.slurm.usable_nodes
        )
        self.controller.rng = Random(self.rng.random())

    def tick(self) -> TickReport | None:
        """One pass; None when the controller was killed in it (a new one is started), or replaced meanwhile."""
        before = self._states()
        silent, lease = not self.slurm.reachable, self.lease
        try:
            report = self.controller.tick(lease)
        except Killed:
            self.start_controller()
            self._check_inheritance()
            self.check()
            return None
        except Fenced:
            assert self.lease != lease, "only one that was paused while another took over is fenced"
            self._check_inheritance()
            self.check()
            return None
        hung = [error for error in report.errors if "has not answered" in error and self.files.hung]
        assert list(report.errors) == hung, report.errors
        if silent:
            self._check_silence(before)
        self._check_reason()
        self._check_inheritance()
        self.reports.append(report)
        self.check()
        return report

    def reach(self, point: str) -> None:
        """Stands in for `failpoints.reach`."""
        assert point in failpoints.POINTS, point
        if self.kill_at(point):
            raise Killed(point)

    # -- what people see

    def _rows(self) -> tuple[Run, list[Attempt]]:
        if isinstance(self.store, MemoryStore):
            return self.store.rows(self.name)
        return self.store.run(self.name), self.store.attempts(self.name)

    @property
    def run(self) -> Run:
        return self._rows()[0]

    @property
    def attempts(self) -> list[Attempt]:
        return self._rows()[1]

    @property
    def view(self) -> ControlledRun:
        config = self.controller.configs(self.run.config_digest)
        return ControlledRun(run=self.run, attempts=tuple(self.attempts), config=config)

    @property
    def folder(self) -> RunDir:
        return RunDir(Path(self.run.run_dir))

    def turns(self, count: int, seconds: float = 2.0, until: Callable[[], bool] = lambda: False) -> None:
        """Let the controller and the cluster take turns."""
        for _ in range(count):
            if until():
                return
            self.tick()
            self.slurm.step(seconds)
            self.check()

    def sleep(self) -> None:
        """Let the time pass for which the run waits before its next attempt, at once: nothing happens in between."""
        run = self.run
        if run.state is RunState.RECOVERING and not any(job.live for job in self.slurm.jobs):
            self.slurm.step(min(max(0.0, run.not_before - self.clock.wall()), RecoveryConfig().backoff_max))

    def finish(self, count: int = 3000, seconds: float = 5.0) -> Run:
        """Go on until the run needs nobody any more."""
        self.turns(count, seconds, lambda: self.run.state in ENDED_RUNS | {RunState.HELD})
        assert self.run.state in ENDED_RUNS | {RunState.HELD}, f"still {self.run.state}: {self.run.reason}"
        return self.run

    # -- what must always hold

    def _states(self) -> dict[int, AttemptState]:
        return {attempt.number: attempt.state for attempt in self.attempts}

    def _check_silence(self, before: dict[int, AttemptState]) -> None:
        over = (AttemptState.ENDED, AttemptState.LOST)
        after = self._states()
        assert set(after) == set(before), "an attempt was begun on silence"
        for number, state in after.items():
            # A person may cancel what was never submitted, whether Slurm answers or not.
            unsubmitted = not self.store.submissions(self.name) and not self._ours()
            kept = state not in over or before[number] is state
            assert kept or unsubmitted, f"attempt {number} was ended on silence"

    def check(self) -> None:
        """Safety: asserted after every single turn."""
        self._check_one_live_job()
        self._check_ended_means_gone()
        self._check_fence()

    def _check_reason(self) -> None:
        run = self.run
        assert run.state in ENDED_RUNS or run.reason, f"{run.name} is {run.state} and nobody is told why"

    def _check_one_live_job(self) -> None:
        training = [agents for agents in self.slurm.agents_of.get(self.name, []) if agents.training]
        given_up = [job.agents for job in self.slurm.jobs if self._given_up(job)]
        current = [agents for agents in training if agents not in self.slurm.zombies + given_up]
        assert len(current) <= 1, f"jobs {[agents.job_id for agents in current]} train at once"
        released = [job for job in self._ours() if job.live and not job.held and not self._given_up(job)]
        assert len(released) <= 1, f"jobs {[job.job_id for job in released]} were let go at once"

    def _ours(self) -> list[Any]:
        return [job for job in self.slurm.jobs if job.spec.comment.startswith(f"orch:{self.name}/")]

    def _given_up(self, job: Any) -> bool:
        """Stuck in COMPLETING for so long that its attempt was fenced off instead."""
        return job.state == "COMPLETING" and self.clock.now - job.leaving >= LEAVING_LIMIT

    def _check_ended_means_gone(self) -> None:
        live = {job.spec.attempt: job for job in self._ours() if job.live and not job.held and not job.restarts}
        for attempt in self.attempts:
            if attempt.state is AttemptState.ENDED and attempt.number in live:
                job = live[attempt.number]
                assert self._given_up(job), f"attempt {attempt.number} ENDED, job {job.job_id} is {job.state}"

    def _check_inheritance(self) -> None:
        """A launch token lets no attempt inherit from a later one; only a controller's pass writes tokens."""
        for attempt in self.attempts[-3:]:
            go = self.folder.attempt(attempt.number).go
            try:
                about = os.stat(go)
            except FileNotFoundError:
                continue
            version = (go, about.st_ino, about.st_mtime_ns)
            if version not in self._checked and not go.with_name(f"{go.name}.revoked").exists():
                token = LaunchToken.read(go)
                numbers = [int(name.split(".")[1].partition("-")[0]) for name in token.checkpoints]
                assert all(number < token.attempt for number in numbers), token
                self._checked.add(version)

    def _check_fence(self) -> None:
        """No commit of an attempt after a later one was let go."""
        agents = sorted(self.slurm.agents_of.get(self.name, []), key=lambda one: one.place.number)
        for index, old in enumerate(agents):
            later = [one.began for one in agents[index + 1 :] if one.token and one.place.number > old.place.number]
            for at, name in old.commits:
                assert not later or at <= min(later), f"{name} was committed behind the fence"


def training(world: World, step: int) -> None:
    """Go on until the run has trained so far."""
    world.turns(300, 1.0, lambda: world.run.step >= step)
    assert world.run.step >= step


def moves(world: World, kind: str = "run") -> list[str]:
    """The states that the run, or its attempts, went through."""
    return [move.after for move in world.store.transitions(world.name) if move.kind == kind]
