"""Limits on repeated submissions, failures of refused jobs, and partition sizes."""

import shlex
from dataclasses import replace

import click
import pytest

from orchestrator.cli.main import orch
from orchestrator.controller.submission_limits import (
    ADOPTED,
    HOUR,
    MOST_IN_AN_HOUR,
    SubmitStep,
    read_sizes,
    rejection_failure,
    submit_permission,
)
from orchestrator.errors import ConfigError, Retryable, SubmitRejected
from orchestrator.registry.records import Run, Submission
from orchestrator.states import RunState
from trainer.protocol.failures.outcome import FailureKind

NOW = 1_000_000.0


def submissions(count: int, *, ago: float = 60.0, job_id: str | None = None, outcome: str = "") -> list[Submission]:
    return [
        Submission(run="a", attempt=1, number=n, submitted_at=NOW - ago + n, job_id=job_id, outcome=outcome)
        for n in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    ("own", "everyone", "step"),
    [
        ([], [], SubmitStep.SUBMIT),
        (submissions(2), submissions(2), SubmitStep.SUBMIT),
        (submissions(3), submissions(3), SubmitStep.GIVE_UP),
        (submissions(3, outcome=ADOPTED), [], SubmitStep.SUBMIT),
        ([], submissions(MOST_IN_AN_HOUR - 1), SubmitStep.SUBMIT),
        ([], submissions(MOST_IN_AN_HOUR), SubmitStep.WAIT),
        ([], submissions(100, outcome=ADOPTED), SubmitStep.SUBMIT),
        ([], submissions(MOST_IN_AN_HOUR, ago=HOUR + 100.0), SubmitStep.SUBMIT),
    ],
)
def test_three_for_an_attempt_and_twenty_in_an_hour(
    own: list[Submission], everyone: list[Submission], step: SubmitStep
) -> None:
    assert submit_permission(own, everyone, NOW)[0] is step


def test_reasons_name_the_time_and_the_command_to_type() -> None:
    waits = submit_permission([], submissions(MOST_IN_AN_HOUR, ago=1800.0), NOW)[1]
    assert waits.startswith("waits until 1970-01-12 14:16:41Z: 20 jobs that were submitted within the last hour")
    known = submit_permission(submissions(3, job_id="7"), [], NOW)[1]
    assert "sbatch gave the job ids 7, 7, 7" in known
    assert "`scontrol show job 7`" in known
    assert "`scancel 7 7 7`" in known
    unknown = submit_permission(submissions(3), [], NOW)[1]
    assert "sbatch gave no job id" in unknown
    assert "`squeue --me`" in unknown


RUN = Run(name="a-1", state=RunState.CREATED, reason="", cluster="slurm", run_dir="/r", config_digest="", total_steps=0)

CURES = [
    (
        SubmitRejected("Slurm refused the job: x", hint="partitions here: a", change="cluster.partition=a"),
        "Slurm refused the job: x; partitions here: a; orch resume a-1 cluster.partition=a",
    ),
    (SubmitRejected("Slurm refused the job: x"), "Slurm refused the job: x; orch resume a-1 KEY=VALUE"),
    (
        ConfigError("cluster.mem='8GiB': Slurm cannot read this", where="cluster.mem", hint="cluster.mem=8G"),
        "cluster.mem='8GiB': Slurm cannot read this; cluster.mem=8G; orch resume a-1 cluster.mem=8G",
    ),
    (
        ConfigError("cluster.templates: no template 'x'", where="cluster.templates", hint="there are default"),
        "cluster.templates: no template 'x'; there are default; orch resume a-1 cluster.templates=VALUE",
    ),
    (ConfigError("something", where="somewhere", hint="h"), "something; h; orch resume a-1 KEY=VALUE"),
]


@pytest.mark.parametrize(("error", "reason"), CURES)
def test_permanent_refusal_names_a_command_that_can_be_typed(error: SubmitRejected | ConfigError, reason: str) -> None:
    failure = rejection_failure(RUN, error, accepted=False)
    assert (failure.kind, failure.reason) == (FailureKind.SUBMIT_REJECTED, reason)
    _, _, typed = reason.rpartition("; ")
    program, verb, run, *changes = shlex.split(typed)
    assert (program, run) == ("orch", "a-1")
    assert orch.get_command(click.Context(orch), verb) is not None
    assert all("=" in change for change in changes)


@pytest.mark.parametrize(
    ("retryable", "accepted", "kind"),
    [
        (Retryable.NEVER, True, FailureKind.SUBMIT_REJECTED),
        (Retryable.ONCE_ACCEPTED, False, FailureKind.SUBMIT_REJECTED),
        (Retryable.ONCE_ACCEPTED, True, FailureKind.SUBMIT_DEFERRED),
        (Retryable.YES, False, FailureKind.SUBMIT_DEFERRED),
    ],
)
def test_temporary_refusal_is_retried_without_a_command(
    retryable: Retryable, accepted: bool, kind: FailureKind
) -> None:
    failure = rejection_failure(RUN, SubmitRejected("no", hint="h", retryable=retryable), accepted=accepted)
    assert failure.kind is kind
    assert ("orch resume" in failure.reason) == (kind is FailureKind.SUBMIT_REJECTED)


def test_refused_restore_test_names_no_command() -> None:
    test = replace(RUN, identity={"restore_test": {"run": "b-1"}})
    assert rejection_failure(test, SubmitRejected("no"), accepted=False).reason == "no"


SINFO = "4 gpu*\n8 gpu-long\n1 debug\n"


@pytest.mark.parametrize(
    ("partition", "size"),
    [("", 4), ("debug", 1), ("gpu-long", 8), ("gpu,gpu-long", 8), ("debug,unknown", 1), ("unknown", None)],
)
def test_partition_size(partition: str, size: int | None) -> None:
    assert read_sizes(SINFO, partition) == size
