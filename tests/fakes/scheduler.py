"""Minimal scheduler in memory that fulfills the contract."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from orchestrator.errors import SlurmUnreachable, SubmitAmbiguous
from orchestrator.scheduler.interface import ENDED_STATES, JobSpec, JobStatus, is_marked


class FakeScheduler:
    """Scheduler in memory; `silent` suppresses its answers, `ambiguous` makes accepted submissions fail."""

    kind = "slurm"

    def __init__(self) -> None:
        self.jobs: dict[str, JobStatus] = {}
        self.specs: dict[str, JobSpec] = {}
        self.silent = self.ambiguous = False
        self.out = frozenset[str]()  # nodes that are out of service
        self.calls: list[str] = []

    def submit(self, spec: JobSpec) -> str | None:
        self._answer(f"submit {spec.name}")
        job_id = str(len(self.jobs) + 1)
        self.specs[job_id] = spec
        self.jobs[job_id] = JobStatus(
            job_id=job_id, name=spec.name, state="PENDING", submit_time=f"T{job_id}", comment=spec.comment, held=True
        )
        if self.ambiguous:
            raise SubmitAmbiguous("sbatch: Socket timed out on send/recv operation")
        return job_id

    def find(self, name_prefix: str, known: Collection[str] = ()) -> list[JobStatus]:
        self._answer(f"find {name_prefix}")
        return [job for job in self.jobs.values() if is_marked(job, name_prefix, known)]

    def poll(self, ids: list[str]) -> dict[str, JobStatus]:
        self._answer(f"poll {','.join(ids)}")
        return {job_id: self.jobs[job_id] for job_id in ids if job_id in self.jobs}

    def release(self, job_id: str, submission: Path, exclude: tuple[str, ...] | None = None) -> None:
        self._answer(f"release {job_id}")
        if job_id in self.jobs and self.jobs[job_id].held:
            nodes = tuple(f"n{index + 1}" for index in range(self.specs[job_id].resources.nodes))
            self.set(job_id, held=False, state="RUNNING", nodes=nodes)

    def out_of_service(self, nodes: frozenset[str]) -> frozenset[str]:
        self._answer(f"out_of_service {','.join(sorted(nodes))}")
        return nodes & self.out

    def cancel(self, job_id: str) -> None:
        self._answer(f"cancel {job_id}")
        if job_id in self.jobs and self.jobs[job_id].state not in ENDED_STATES:
            self.set(job_id, held=False, state="CANCELLED")

    def set(self, job_id: str, **changes: object) -> None:
        """Change a job's status."""
        self.jobs[job_id] = replace(self.jobs[job_id], **changes)  # type: ignore[arg-type]

    def _answer(self, call: str) -> None:
        if self.silent:
            raise SlurmUnreachable("Unable to contact slurm controller (connect failure)")
        self.calls.append(call)
