"""Jobs of the runs: their names, what is asked for them, and which of several is the one."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config import RunConfig
from orchestrator.registry.records import Attempt, Run
from orchestrator.scheduler.base import ENDED_STATES, JobSpec, JobStatus, Resources
from orchestrator.scheduler.job_environment import Submitter
from trainer.contract.run_dir import RunDir

PREFIX = "orch-"


@dataclass(frozen=True, kw_only=True)
class JobName:
    """The parts of `orch-<run>-<attempt>-<nonce>`."""

    run: str
    attempt: int
    nonce: str


def parse_name(name: str) -> JobName | None:
    """The parts of a job's name; None when it is no job of ours."""
    head, _, nonce = name.rpartition("-")
    run, _, number = head.rpartition("-")
    if not run.startswith(PREFIX) or not number.isdigit() or len(nonce) != 8:
        return None
    return JobName(run=run.removeprefix(PREFIX), attempt=int(number), nonce=nonce)


def is_live(job: JobStatus) -> bool:
    """Whether the job may still run something; states that nobody knows count as live."""
    return job.state not in ENDED_STATES


def oldest(jobs: Iterable[JobStatus]) -> JobStatus:
    """The job to adopt among several of one name: submitted first, then the lowest id."""
    return min(jobs, key=lambda job: (job.submit_time, len(job.job_id), job.job_id))


def is_same(job: JobStatus, attempt: Attempt) -> bool:
    """Whether this is the attempt's own job: ids are given out again, so name and submit time must agree too."""
    if job.name != attempt.job_name or job.job_id != attempt.job_id:
        return False
    return not attempt.submit_time or not job.submit_time or job.submit_time == attempt.submit_time


def job_spec(run: Run, attempt: Attempt, config: RunConfig) -> JobSpec:
    """What one attempt asks of its scheduler."""
    cluster, folder = config.cluster, RunDir(Path(run.run_dir))
    named = (cluster.exclude,) if cluster.exclude else ()
    return JobSpec(
        name=attempt.job_name,
        comment=f"orch:{run.name}/{attempt.number}",
        run_dir=folder.path,
        attempt=attempt.number,
        submission=folder.attempt(attempt.number).submission,
        resources=Resources(
            nodes=cluster.all_nodes,
            spares=cluster.spare_nodes,
            cpus_per_task=cluster.cpus_per_task,
            gpus_per_node=cluster.gpus_per_node,
            mem=cluster.mem,
            time=cluster.time,
            partition=cluster.partition,
            account=cluster.account,
            qos=cluster.qos,
            constraint=cluster.constraint,
            exclude=named + attempt.excluded,
            avoided=attempt.excluded,
            signal_lead=cluster.signal_lead,
            sbatch=dict(cluster.sbatch),
        ),
        templates=cluster.templates,
        template_args=dict(cluster.template_args),
        python=cluster.python,
        submitter=Submitter.of(run.identity),
    )
