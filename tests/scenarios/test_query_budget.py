"""Queries of a controller with many runs, counted on a model of Slurm and a clock of its own."""

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from checkpointing.storage.durable import canonical
from orchestrator.controller.reconcile import Controller
from orchestrator.controller.scheduler_queries import SEARCH_CALLS
from orchestrator.registry.lease import LEASE_TTL
from orchestrator.scheduler.available_schedulers import QUIET
from orchestrator.states import AttemptState, RunState
from tests.fakes.memory_store import MemoryStore
from tests.fakes.model_clock import FakeClock
from tests.fakes.model_slurm import ModelSlurm
from tests.fakes.new_runs import create_run, take_lease
from tests.scenarios.world import config


class Login:
    """A daemon's passes over some runs, each with a node of its own."""

    def __init__(self, root: Path, runs: int, *, steps: int = 10_000) -> None:
        self.clock, self.store = FakeClock(), MemoryStore()
        self.slurm = ModelSlurm(self.clock, Random(1), nodes=runs + 1)
        data = json.loads(canonical(config(steps=steps, every=5000)))
        for number in range(runs):
            create_run(
                self.store, root, data, slug=f"r{number}", total_steps=steps, now=self.clock.now,
                nonce=f"{number + 1:08x}",
            )  # fmt: skip
        self.controller = Controller(
            self.store, {"slurm": self.slurm}, clock=self.clock.as_clock(), usable_nodes=self.slurm.usable_nodes
        )
        self.controller.queries.quiet = QUIET
        self.controller.rng = Random(2)
        self.lease = take_lease(self.store, "login:1:0", self.clock.wall(), LEASE_TTL)

    def go(self, seconds: float, pause: float = 5.0) -> Counter[str]:
        """Let passes and the cluster take turns; return the calls by their first word."""
        before, end = len(self.slurm.calls), self.clock.now + seconds
        while self.clock.now < end:
            self.lease = self.store.renew_lease(self.lease, self.clock.wall(), LEASE_TTL)
            self.controller.tick(self.lease)
            self.slurm.step(pause)
        return Counter(call.partition(" ")[0] for call in self.slurm.calls[before:])

    def states(self) -> Counter[RunState]:
        return Counter(run.state for run in self.store.runs())


def per_minute(calls: Counter[str], seconds: float) -> float:
    """Return the client calls of these queries a minute."""
    return 60 / seconds * sum(SEARCH_CALLS if name == "find" else 1 for name in calls.elements())


@pytest.mark.parametrize("runs", [1, 10, pytest.param(100, marks=pytest.mark.proof)])
def test_running_jobs_cost_two_calls_a_minute(tmp_path: Path, runs: int) -> None:
    login = Login(tmp_path, runs)
    login.go(90, pause=10.0)
    assert login.states() == {RunState.RUNNING: runs}
    calls = login.go(300, pause=10.0)
    assert per_minute(calls, 300) <= 2.0
    assert calls["poll"] >= 5, "a job's state is at most a minute old"
    assert set(calls) <= {"poll", "find"}


def test_the_end_of_a_job_and_the_start_of_the_next_cost_nine_calls(tmp_path: Path) -> None:
    login = Login(tmp_path, 10)
    login.go(90)
    before = len(login.slurm.calls)
    for job in list(login.slurm.running()):
        login.slurm.preempt(job)
        login.go(30)
    queries = Counter(call.partition(" ")[0] for call in login.slurm.calls[before:])
    assert queries["submit"] >= 7, "each goes on in a new job"
    del queries["submit"], queries["release"]
    assert per_minute(queries, 60) <= 10 * 9
    login.go(60)
    assert login.states() == {RunState.RUNNING: 10}


def test_a_waiting_job_is_asked_about_rarely_and_its_start_is_seen_in_its_files(tmp_path: Path) -> None:
    login = Login(tmp_path, 1)
    login.slurm.down = set(login.slurm.nodes)
    login.go(60)
    calls = login.go(600)
    assert per_minute(calls, 600) <= 2.0
    login.slurm.down.clear()
    login.go(10, pause=1.0)
    (attempt,) = login.store.attempts("r0-1")
    assert attempt.state is AttemptState.RUNNING


def test_a_job_whose_agents_fall_silent_is_asked_about_soon(tmp_path: Path) -> None:
    login = Login(tmp_path, 1)
    login.go(90)
    (job,) = login.slurm.running()
    login.slurm.fail_node(job, zombie=False)
    died = login.clock.now
    while len(login.store.attempts("r0-1")) == 1 and login.clock.now < died + 60:
        login.go(1, pause=1.0)
    assert login.clock.now - died <= 28
