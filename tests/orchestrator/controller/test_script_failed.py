"""Which ends of attempts the policy takes for those of a batch script that has never worked."""

from typing import Any

import pytest

from orchestrator.config.run_config import RunConfig
from orchestrator.controller.reconciler.conclude import history
from orchestrator.registry.records import Attempt, Run
from orchestrator.run_dirs.controlled_run import ControlledRun
from orchestrator.states import AttemptState, RunState
from trainer.protocol.failures.outcome import Failure, FailureKind

RUN = Run(name="a-1", state=RunState.RUNNING, reason="", cluster="slurm", run_dir="/r", config_digest="", total_steps=0)
SCRIPT = Failure(kind=FailureKind.LAUNCH_FAILED, reason="", exit_code=127, script=True)
KILLED = Failure(kind=FailureKind.LAUNCH_FAILED, reason="", signal=9, script=True)
UNKNOWN = Failure(kind=FailureKind.LAUNCH_FAILED, reason="", script=True)
BOOT = Failure(kind=FailureKind.LAUNCH_FAILED, reason="")


def ended(number: int, failure: Failure | None, **fields: Any) -> Attempt:
    return Attempt(
        run="a-1", number=number, state=AttemptState.ENDED, nonce="a", job_name="j", started_at=1.0,
        failure=failure.to_json() if failure else None, **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("earlier", "newest", "expected"),
    [
        (ended(1, SCRIPT), SCRIPT, [True, True]),
        (ended(1, BOOT), SCRIPT, [False, True]),
        (ended(1, KILLED), UNKNOWN, [True, True]),
        (ended(1, Failure(kind=FailureKind.RANK_KILLED, reason="", exit_code=1), generations=1), SCRIPT, [False] * 2),
        (ended(1, None), Failure(kind=FailureKind.AGENT_LOST, reason="", exit_code=1), [False, False]),
    ],
)
def test_only_in_a_run_that_never_trained(earlier: Attempt, newest: Failure, expected: list[bool]) -> None:
    view = ControlledRun(run=RUN, attempts=(earlier, ended(2, None)), config=RunConfig())
    assert [past.script_failed for past in history(view, newest, 2.0)] == expected
