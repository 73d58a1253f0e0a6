"""What a refused job makes of its attempt, and the command that a person is told to type."""

import shlex
from dataclasses import replace

import click
import pytest

from orchestrator.cli.main import orch
from orchestrator.controller.submission_limits import rejection_failure
from orchestrator.errors import ConfigError, Retryable, SubmitRejected
from orchestrator.registry.records import Run
from orchestrator.states import RunState
from trainer.protocol.failures.outcome import FailureKind

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
def test_a_refusal_for_good_names_a_command_that_can_be_typed(error: SubmitRejected | ConfigError, reason: str) -> None:
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
def test_what_passes_is_tried_again_and_needs_no_command(
    retryable: Retryable, accepted: bool, kind: FailureKind
) -> None:
    failure = rejection_failure(RUN, SubmitRejected("no", hint="h", retryable=retryable), accepted=accepted)
    assert failure.kind is kind
    assert ("orch resume" in failure.reason) == (kind is FailureKind.SUBMIT_REJECTED)


def test_a_restore_test_is_not_resumed() -> None:
    test = replace(RUN, identity={"restore_test": {"run": "b-1"}})
    assert rejection_failure(test, SubmitRejected("no"), accepted=False).reason == "no"
