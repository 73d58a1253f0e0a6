"""What a site has changed of a job since orch asked for it: told to people, and nothing else follows from it. Pure."""

from collections.abc import Iterator

from orchestrator.errors import ConfigError
from orchestrator.scheduler.interface import JobSpec, JobStatus
from orchestrator.scheduler.slurm.sbatch_values import minutes

_SHOWN = 80
"""Characters of a name or comment of theirs."""


def changes(job: JobStatus, asked: JobSpec) -> str:
    """What Slurm says of the job otherwise than was asked for, in words; "" for nothing."""
    return "; ".join(_changes(job, asked))


def _changes(job: JobStatus, asked: JobSpec) -> Iterator[str]:
    if job.name and job.name != asked.name:
        yield f"Slurm renamed the job: {asked.name} -> {job.name[:_SHOWN]}"
    # Accounting may keep no comments. Older jobs of ours have a shorter one, and a site may add words of its own.
    same = job.comment.startswith(asked.comment) or (job.comment and asked.comment.startswith(job.comment))
    if job.source == "queue" and not same:
        yield f"Slurm changed its comment to {job.comment[:_SHOWN]!r}"
    for name, wanted in _wanted(asked):
        found = job.settings.get(name, "")
        if found and not _agrees(name, found, wanted):
            yield f"Slurm changed its {name}: {wanted} -> {found[:_SHOWN]}"


def _wanted(asked: JobSpec) -> Iterator[tuple[str, str]]:
    """Settings for which the site's default does not count."""
    of = asked.resources
    yield "requeue", "0"
    settings = (("time limit", of.time), ("partition", of.partition), ("account", of.account), ("qos", of.qos))
    yield from ((name, value) for name, value in settings if value)


def _agrees(name: str, found: str, wanted: str) -> bool:
    if name == "time limit":
        try:
            return minutes(name, found) == minutes(name, wanted)
        except ConfigError:
            return False
    # Of several partitions Slurm picks one.
    return set(found.lower().split(",")) <= set(wanted.lower().split(","))
