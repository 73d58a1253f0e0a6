"""Contract of schedulers; test modules of implementations inherit the suite and define the fixture `world`."""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.scheduler.interface import ENDED_STATES, JobSpec, JobStatus, Resources, Scheduler
from orchestrator.scheduler.local import local_scheduler
from orchestrator.scheduler.local.local_scheduler import LocalScheduler

PATIENCE_S = 120.0


def eventually(question: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> None:
    """Ask until the answer is true; fail with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not question():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


@dataclass
class World:
    """A scheduler with a folder for its jobs, which call `tests.slurm.payload:record`."""

    scheduler: Scheduler
    folder: Path
    really: bool = True  # jobs are processes that leave files
    resources: Resources = field(default_factory=lambda: Resources(nodes=2, time="5"))

    def spec(self, run: str = "", attempt: int = 1) -> JobSpec:
        name = f"orch-{run or secrets.token_hex(3)}-{attempt}-{secrets.token_hex(4)}"
        run_dir = self.folder / name
        (run_dir / "submission").mkdir(parents=True)
        return JobSpec(
            name=name, comment=f"orch:{name.rpartition('-')[0]}", run_dir=run_dir, attempt=attempt,
            submission=run_dir / "submission", resources=self.resources,
        )  # fmt: skip

    def submit(self, spec: JobSpec) -> JobStatus:
        """Submit and adopt, as the controller does."""
        self.scheduler.submit(spec)
        (job,) = self.scheduler.find(spec.name)
        return job

    def release(self, job: JobStatus, spec: JobSpec) -> None:
        self.scheduler.release(job.job_id, spec.submission)

    def state(self, job: JobStatus) -> str:
        return self.scheduler.poll([job.job_id])[job.job_id].state

    def started(self, spec: JobSpec) -> int:
        return len(list(spec.run_dir.glob("started-*.json")))

    def until_running(self, job: JobStatus, spec: JobSpec) -> None:
        eventually(lambda: self.state(job) == "RUNNING", "the job runs")
        if self.really:
            eventually(lambda: self.started(spec) == spec.resources.nodes, "every node's task has started")

    def until_ended(self, job: JobStatus) -> str:
        eventually(lambda: self.state(job) in ENDED_STATES, "the job has ended")
        return self.state(job)


@contextmanager
def local_world(folder: Path, index: Path) -> Iterator[World]:
    """Yield local jobs below `folder`, and end those that are left."""
    yield World(scheduler=LocalScheduler(entry="tests.slurm.payload:record", index=index), folder=folder)
    for intent in local_scheduler.intents(index):
        local_scheduler.end_marked(intent.name, 0.0)


class SchedulerContract:
    """Suite to inherit; subclasses define a fixture `world`."""

    def test_a_held_job_is_found_and_cancelled_before_it_starts(self, world: World) -> None:
        spec = world.spec()
        job = world.submit(spec)
        assert (job.name, job.state, job.held, job.comment) == (spec.name, "PENDING", True, spec.comment)
        assert job.submit_time
        time.sleep(0.5 if world.really else 0)  # nothing can be waited for: it must not happen
        assert world.state(job) == "PENDING"
        assert world.started(spec) == 0
        assert [found.job_id for found in world.scheduler.find(spec.name[:-4])] == [job.job_id]
        assert world.scheduler.find(spec.name + "0") == []
        assert world.scheduler.find(spec.name[1:]) == []
        assert set(world.scheduler.poll(["99999999", job.job_id])) == {job.job_id}, "an unknown id is missing"
        assert world.scheduler.poll(["99999999"]) == {}
        assert world.scheduler.poll([]) == {}
        world.scheduler.cancel("99999999")
        assert world.state(job) == "PENDING"
        world.scheduler.cancel(job.job_id)
        assert world.until_ended(job) == "CANCELLED"
        world.scheduler.cancel(job.job_id)
        world.release(job, spec)
        assert world.until_ended(job) == "CANCELLED"
        assert world.started(spec) == 0

    def test_release_starts_it_once_and_repeating_is_harmless(self, world: World) -> None:
        spec = world.spec()
        job = world.submit(spec)
        world.release(job, spec)
        world.release(job, spec)
        world.until_running(job, spec)
        world.release(job, spec)
        running = world.scheduler.poll([job.job_id])[job.job_id]
        assert (running.held, len(running.nodes), running.submit_time) == (False, 2, job.submit_time)
        assert (running.name, running.comment, running.restarts) == (spec.name, spec.comment, 0)
        world.scheduler.cancel(job.job_id)
        assert world.until_ended(job) == "CANCELLED"

    def test_many_ids_are_answered_in_one_batch(self, world: World) -> None:
        world.resources = replace(world.resources, nodes=1)
        specs = [world.spec("batch", attempt) for attempt in (1, 2)]
        jobs = [world.submit(spec) for spec in specs]
        answer = world.scheduler.poll([job.job_id for job in jobs])
        assert [answer[job.job_id].name for job in jobs] == [spec.name for spec in specs]
        for job in jobs:
            world.scheduler.cancel(job.job_id)

    def test_a_job_whose_tasks_are_done_has_completed(self, world: World) -> None:
        if not world.really:
            return
        world.resources = replace(world.resources, nodes=1)
        spec = world.spec()
        job = world.submit(spec)
        (spec.run_dir / "stop").touch()
        world.release(job, spec)
        assert world.until_ended(job) == "COMPLETED"
        ended = world.scheduler.poll([job.job_id])[job.job_id]
        assert (ended.exit_code, ended.signal) == (0, None)
        assert ended.end_time is not None
        assert abs(ended.end_time - time.time()) < 60
