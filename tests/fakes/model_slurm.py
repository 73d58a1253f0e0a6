"""A model of Slurm with faults: ambiguous submits, lost jobs, reused ids, late accounting, silence."""

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from orchestrator.errors import SlurmUnreachable, SubmitAmbiguous, SubmitRejected
from orchestrator.scheduler.interface import (
    ENDED_STATES,
    UNREADABLE,
    UNRECORDED,
    JobSpec,
    JobStatus,
    Resources,
    is_marked,
    tags,
)
from orchestrator.scheduler.slurm.command_output import ended_jobs
from tests.fakes.model_agents import ModelAgents
from tests.fakes.model_clock import FakeClock

MIN_JOB_AGE = 300.0
KILL_WAIT = 5.0
SAVE_MAX_WAIT = 5.0


@dataclass(eq=False)
class ModelJob:
    """A job in the model's slurmctld; `shown` has the fields that its answers show differently from the request."""

    job_id: str
    spec: JobSpec
    submitted: float
    shown: dict[str, Any] = field(default_factory=dict)
    state: str = "PENDING"
    held: bool = True
    restarts: int = 0
    nodes: tuple[str, ...] = ()
    started: float | None = None
    limit: float = 3600.0
    becomes: tuple[str, float] | None = None  # final state, and when COMPLETING ends
    leaving: float | None = None
    ended: float | None = None
    accounted_at: float = 0.0
    agents: ModelAgents | None = None
    reason: str = "None"
    released: float = 0.0
    earlier: tuple[JobStatus, ...] = ()  # ended runs of the job
    eligible: float = 0.0

    @property
    def live(self) -> bool:
        return self.state not in ENDED_STATES

    @cached_property
    def files(self) -> tuple[str, ...]:
        return tuple(str(self.spec.submission / name) for name in ("submission_file_0.sh", "%j_0_log.out"))


@dataclass
class SlurmFaults:
    """Faults, as probabilities for each submission; `reject` refuses all.

    `rewrites`: fields (of REWRITES) that the site changes in every submitted job; `partial`: probability that a row is
    missing from an answer that looks complete; `garbled`: probability that a row is unreadable; `fixed`: the site does
    not allow changes to jobs.
    """

    ambiguous: float = 0.0
    late: float = 0.0
    lost: float = 0.0
    reject: str = ""
    accounting: bool = True
    accounting_silent: bool = False
    accounting_lag: float = 0.0
    rewrites: frozenset[str] = frozenset()
    partial: float = 0.0
    garbled: float = 0.0
    fixed: bool = False


REWRITES = frozenset({"name", "comment", "files", "submit_time"})
"""Fields of a job that a job_submit plugin or an sbatch wrapper may change; the id never changes."""


def slurm_time(seconds: float) -> str:
    """Return a time as Slurm prints it: whole seconds, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))


class ModelSlurm:
    """Scheduler with a simulated world that `step` advances."""

    kind = "slurm"

    def __init__(self, clock: FakeClock, rng: Random, nodes: int = 4) -> None:
        self.clock, self.rng, self.slurm_faults = clock, rng, SlurmFaults()
        self.nodes = [f"n{index}" for index in range(1, nodes + 1)]
        self.down: set[str] = set()
        self.jobs: list[ModelJob] = []
        self.zombies: list[ModelAgents] = []
        self.reachable = True
        self.sluids = False  # Slurm 25.11 and later
        self.calls: list[str] = []
        self.hidden: set[str] = set()  # ids missing from answers, with frozen processes
        self.agents_of: dict[str, list[ModelAgents]] = {}
        self._next_id = 1
        self._arriving: list[tuple[float, JobSpec]] = []
        self._closed: list[JobStatus] = []  # final rows of accounting

    # -- the seam

    def submit(self, spec: JobSpec) -> str | None:
        self.calls.append(f"submit {spec.name}")
        if self.slurm_faults.reject:
            raise SubmitRejected(self.slurm_faults.reject)
        ambiguous = not self.reachable or self.rng.random() < self.slurm_faults.ambiguous
        draw = self.rng.random()
        if draw < self.slurm_faults.late:
            self._arriving.append((self.clock.now + self.rng.uniform(0.0, 50.0), spec))
        elif not (ambiguous and draw < self.slurm_faults.late + self.slurm_faults.lost) and self.reachable:
            self._accept(spec)
        if ambiguous or draw < self.slurm_faults.late:
            raise SubmitAmbiguous("Batch job submission failed: Socket timed out on send/recv operation")
        return self.jobs[-1].job_id

    def find(self, name_prefix: str, known: Collection[str] = ()) -> list[JobStatus]:
        self._answer("find")
        queue = self._listed(self._status(job) for job in self._remembered() if job.job_id not in self.hidden)
        return [job for job in queue if is_marked(job, name_prefix, known)]

    def poll(self, ids: list[str]) -> dict[str, JobStatus]:
        self._answer("poll")
        shown = [job for job in self._remembered() if job.job_id not in self.hidden]
        queue = {job.job_id: job for job in self._listed(self._status(job) for job in shown)}
        return {key: job for key, job in (self._recorded(ids) | queue).items() if key in ids}

    def _recorded(self, ids: Collection[str]) -> dict[str, JobStatus]:
        """Return rows of accounting, which may be late, silent or absent; an id may have belonged to several jobs."""
        if not self.slurm_faults.accounting:
            return {}
        if self.slurm_faults.accounting_silent:
            return {key: JobStatus(job_id=key, name="", state=UNRECORDED, reason="sacct is silent") for key in ids}
        shown = [job for job in self.jobs if job.job_id not in self.hidden and self.clock.now >= job.accounted_at]
        known = [self._status(job) for job in shown]
        return {job.job_id: job for job in ended_jobs(self._listed([*self._closed, *known]))}

    def _listed(self, jobs: Iterable[JobStatus]) -> list[JobStatus]:
        """Return the rows of one answer; some may be missing or unreadable."""
        whole = [job for job in jobs if self.rng.random() >= self.slurm_faults.partial]
        return [
            replace(job, state=UNREADABLE, reason="garbage") if self.rng.random() < self.slurm_faults.garbled else job
            for job in whole
        ]

    def release(self, job_id: str, submission: object, exclude: tuple[str, ...] | None = None) -> None:
        self._answer(f"release {job_id}")
        for job in self.jobs:
            if job.job_id == job_id and job.state == "PENDING":
                job.held, job.released = False, job.released if not job.held else self.clock.now
                if exclude is not None:
                    if self.slurm_faults.fixed:
                        raise SubmitRejected("Slurm refuses to change the nodes that the job avoids: Access denied")
                    resources = replace(job.spec.resources, exclude=exclude, avoided=exclude)
                    job.spec = replace(job.spec, resources=resources)

    def out_of_service(self, nodes: frozenset[str]) -> frozenset[str]:
        self._answer("out_of_service")
        return frozenset()

    def usable_nodes(self, asked: Resources, without: frozenset[str]) -> int | None:
        """Replace the sinfo query of `orchestrator.scheduler.slurm.node_capacity`."""
        self._answer("usable_nodes")
        return len(set(self.nodes) - self.down - without - {*asked.exclude} | ({*asked.avoided} - without - self.down))

    def cancel(self, job_id: str) -> None:
        self._answer(f"cancel {job_id}")
        for job in self.jobs:
            if job.job_id == job_id and job.live:
                self.end(job, "CANCELLED")

    def _answer(self, call: str) -> None:
        if not self.reachable:
            raise SlurmUnreachable("Unable to contact slurm controller (connect failure)")
        self.calls.append(call)

    def _remembered(self) -> list[ModelJob]:
        """Return the jobs that slurmctld still remembers."""
        return [job for job in self.jobs if job.ended is None or self.clock.now - job.ended < MIN_JOB_AGE]

    def _status(self, job: ModelJob) -> JobStatus:
        told: dict[str, Any] = dict(
            job_id=job.job_id, name=job.spec.name, state=job.state, submit_time=slurm_time(job.submitted),
            comment=job.spec.comment, nodes=job.nodes, restarts=job.restarts, held=job.held and job.state == "PENDING",
            start_time=job.started, end_time=job.started + job.limit if job.started is not None else None,
            reason=job.reason, files=job.files, sluid=f"s{job.job_id}.{job.restarts}" if self.sluids else "",
            earlier=job.earlier if self.slurm_faults.accounting else (),
        )  # fmt: skip
        status = JobStatus(**told | job.shown)
        if job.ended is not None or tags(status):
            return status
        return replace(status, script_tag=job.spec.name if job.spec.name.startswith("orch-") else "")

    def _accept(self, spec: JobSpec) -> None:
        job = ModelJob(job_id=self._new_id(), spec=spec, submitted=self.clock.now)
        self.jobs.append(job)
        self.rewrite(job, self.slurm_faults.rewrites)

    def _new_id(self) -> str:
        """Return the next id; ids are reused after a crash, but not while Slurm remembers their job."""
        known = {job.job_id for job in self._remembered()}
        while str(self._next_id) in known:
            self._next_id += 1
        self._next_id += 1
        return str(self._next_id - 1)

    def rewrite(self, job: ModelJob, what: Collection[str]) -> None:
        """Replace these fields of a job in answers, as a site does."""
        changed = {
            "name": f"site-{job.job_id}",
            "comment": "managed by the site",
            "files": ("/var/spool/site/script",),
            "submit_time": slurm_time(job.submitted + 3.0),
        }
        assert set(what) <= REWRITES
        job.shown |= {key: changed[key] for key in what}

    def add_foreign(self, name: str = "eval", comment: str = "", *, state: str = "RUNNING") -> ModelJob:
        """Add a job of the same user that belongs to no run."""
        spec = JobSpec(
            name=name, comment=comment, run_dir=Path("/home/somebody"), attempt=1, submission=Path("/home/somebody"),
            resources=Resources(nodes=1),
        )  # fmt: skip
        job = ModelJob(job_id=self._new_id(), spec=spec, submitted=self.clock.now, held=False, state=state)
        self.jobs.append(job)
        return job

    # -- the world

    def close(self) -> None:
        """Close all agents."""
        for agents in (agents for row in self.agents_of.values() for agents in row):
            agents.close()

    def step(self, seconds: float) -> None:
        """Let time pass: arrivals, starts, training, ends."""
        self.clock.advance(seconds)
        now = self.clock.now
        if self.reachable:
            for at, spec in [item for item in self._arriving if item[0] <= now]:
                self._arriving.remove((at, spec))
                self._accept(spec)
            for job in self.jobs:
                if job.state in ("PENDING", "EXPEDITING") and not job.held and now >= job.eligible:
                    self._start(job)
        for job in self.jobs:
            self._run(job, seconds, now)
        for zombie in self.zombies:
            zombie.step(seconds)

    def _start(self, job: ModelJob) -> None:
        busy = {node for other in self.jobs if other.live for node in other.nodes if other is not job}
        free = [node for node in self.nodes if node not in busy | self.down | set(job.spec.resources.exclude)]
        if len(free) < job.spec.resources.nodes:
            job.reason = "Resources"
            return
        job.state, job.started, job.reason = "RUNNING", self.clock.now, "None"
        job.nodes = tuple(free[: job.spec.resources.nodes])
        job.agents = ModelAgents(job.spec, job.job_id, job.nodes, job.restarts, self.clock)
        self.agents_of.setdefault(job.spec.comment.partition(":")[2].partition("/")[0], []).append(job.agents)

    def _run(self, job: ModelJob, seconds: float, now: float) -> None:
        if job.state == "RUNNING" and job.agents is not None and job.job_id not in self.hidden:
            job.agents.step(seconds)
            if job.agents.exit_code is not None:
                self.end(job, "COMPLETED" if job.agents.exit_code == 0 else "FAILED")
        elif job.state == "COMPLETING" and job.becomes is not None and now >= job.becomes[1]:
            job.state, job.ended = job.becomes[0], now
            job.accounted_at = now + self.slurm_faults.accounting_lag
            if job.agents is not None:
                job.agents.dead = True

    def end(self, job: ModelJob, state: str, wait: float = KILL_WAIT) -> None:
        """End a job: through COMPLETING if it ran, immediately if it waited."""
        if job.state in ("PENDING", "EXPEDITING"):
            job.state, job.ended = state, self.clock.now
            job.accounted_at = self.clock.now + self.slurm_faults.accounting_lag
        elif job.state == "RUNNING":
            job.state, job.leaving, job.becomes = "COMPLETING", self.clock.now, (state, self.clock.now + wait)

    def running(self) -> list[ModelJob]:
        return [job for job in self.jobs if job.state == "RUNNING"]

    def preempt(self, job: ModelJob) -> None:
        self.end(job, "PREEMPTED")

    def fail_node(self, job: ModelJob, *, zombie: bool) -> None:
        """Kill the first node's daemon; with `zombie`, its ranks continue without Slurm's knowledge."""
        self.down.add(job.nodes[0])
        job.state, job.ended = "NODE_FAIL", self.clock.now
        if job.agents is not None:
            job.agents.dead = not zombie
            if zombie:
                self.zombies.append(job.agents)

    def requeue(self, job: ModelJob) -> None:
        """Requeue a job under the same id, as a user or a failed prolog does.

        It gets another submit time, begins two minutes later, and leaves a permanent row in accounting.
        """
        row = replace(self._status(job), state="REQUEUED", source="accounting")
        self._closed.append(row)
        job.state, job.started, job.nodes, job.restarts = "PENDING", None, (), job.restarts + 1
        job.submitted, job.eligible, job.reason = self.clock.now, self.clock.now + 121.0, "BeginTime"
        if job.agents is not None:
            job.agents.dead = True

    def expedite(self, job: ModelJob) -> str:
        """Fail the job's last node; Slurm requeues the job with an expedited requeue. Return the node."""
        dead = job.nodes[-1]
        self.down.add(dead)
        row = replace(self._status(job), state="NODE_FAIL", source="accounting", nodes_down=(dead,), earlier=())
        job.earlier = (*job.earlier, row)
        job.state, job.started, job.nodes, job.restarts = "EXPEDITING", None, (), job.restarts + 1
        job.submitted, job.reason = self.clock.now, "Resources"
        if job.agents is not None:
            job.agents.dead = True
        return dead

    def crash(self) -> None:
        """Restart slurmctld without its unsaved state; ids of lost jobs are reused.

        Jobs that had just started wait again, held if they were when saved; their nodes kill their processes.
        """
        lost = [job for job in self.jobs if self.clock.now - job.submitted < SAVE_MAX_WAIT and job.started is None]
        self.jobs = [job for job in self.jobs if job not in lost]
        if lost:
            self._next_id = min(int(job.job_id) for job in lost)
        for job in self.running():
            if job.started is not None and self.clock.now - job.started < SAVE_MAX_WAIT:
                job.state, job.started, job.nodes = "PENDING", None, ()
                job.held = self.clock.now - job.released < SAVE_MAX_WAIT
                if job.agents is not None:
                    job.agents.dead = True

    def forget(self, job: ModelJob) -> None:
        """Lose a running job; its processes are killed, as those of a defunct batch job are."""
        self.jobs.remove(job)
        if job.agents is not None:
            job.agents.dead = True
