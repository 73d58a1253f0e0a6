"""Job specification of an attempt, and the choice among its duplicate jobs."""

from collections.abc import Iterable
from pathlib import Path

from orchestrator.config.run_config import RunConfig
from orchestrator.registry.records import Attempt, Run
from orchestrator.scheduler.interface import ENDED_STATES, JobSpec, JobStatus, Resources, job_comment
from orchestrator.scheduler.job_environment import Submitter
from trainer.protocol.config import AUTO
from trainer.protocol.run_dir import RunDir


def is_live(job: JobStatus) -> bool:
    """Return whether the job may still run; unknown states count as live."""
    return job.state not in ENDED_STATES


def oldest(jobs: Iterable[JobStatus]) -> JobStatus:
    """Return the job to adopt for an attempt: the one with the earliest submit time, then the lowest id."""
    return min(jobs, key=lambda job: (job.submit_time, len(job.job_id), job.job_id))


def job_spec(run: Run, attempt: Attempt, config: RunConfig) -> JobSpec:
    cluster, folder = config.cluster, RunDir(Path(run.run_dir))
    named = (cluster.exclude,) if cluster.exclude else ()
    return JobSpec(
        name=attempt.job_name,
        comment=job_comment(run.name, attempt.number, attempt.nonce),
        run_dir=folder.path,
        attempt=attempt.number,
        submission=folder.attempt(attempt.number).submission,
        resources=Resources(
            nodes=cluster.all_nodes, spares=cluster.spare_nodes, cpus_per_task=cluster.cpus_per_task,
            gpus_per_node=cluster.gpus_per_node, gpus=cluster.gpus, mem=cluster.mem, time=cluster.time,
            partition=cluster.partition, account=cluster.account, qos=cluster.qos, constraint=cluster.constraint,
            exclude=named + attempt.excluded, avoided=attempt.excluded, signal_lead=cluster.signal_lead,
            sbatch=dict(cluster.sbatch),
        ),
        templates=cluster.templates,
        template_args=dict(cluster.template_args),
        python=cluster.python,
        submitter=Submitter.from_identity(run.identity),
        expedite=config.recovery.requeue == AUTO,
    )  # fmt: skip
