"""Whether the policy may count steps: of a command only its own checkpoints tell, once one was seen."""

import pytest

from orchestrator.config.run_config import RunConfig
from orchestrator.controller.reconciler.conclude import _steps_known
from orchestrator.controller.run_view import RunView
from orchestrator.registry.records import Attempt, Run
from orchestrator.states import AttemptState, RunState
from trainer.contract.user_command.command_progress import CommandCheckpointsConfig


@pytest.mark.parametrize(
    ("config", "saved", "known"),
    [
        (RunConfig(), None, True),
        (RunConfig(command=("python", "t.py")), None, False),
        (RunConfig(command=("python", "t.py"), checkpoints=CommandCheckpointsConfig(path="wrong")), None, False),
        (RunConfig(command=("python", "t.py"), checkpoints=CommandCheckpointsConfig(path="out")), 40, True),
    ],
)
def test_steps_are_known(config: RunConfig, saved: int | None, known: bool) -> None:
    run = Run(
        name="a-1", state=RunState.RUNNING, reason="", cluster="slurm", run_dir="/r", config_digest="", total_steps=0
    )
    attempt = Attempt(run="a-1", number=1, state=AttemptState.RUNNING, nonce="a", job_name="j", saved_step=saved)
    assert _steps_known(RunView(run=run, attempts=(attempt,), config=config)) is known
