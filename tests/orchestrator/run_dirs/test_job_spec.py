"""What one attempt asks of its scheduler: the same for every attempt, whoever submits it."""

import json
import sys
from pathlib import Path

import pytest

from orchestrator.config.run_config import ClusterConfig, RunConfig
from orchestrator.registry.records import Attempt, Run
from orchestrator.run_dirs.job_spec import job_spec
from orchestrator.scheduler.interface import JobSpec
from orchestrator.scheduler.script import prepare
from orchestrator.states import AttemptState, RunState
from orchestrator.submission.run_identity import identify


def spec(identity: dict[str, object], config: RunConfig | None = None) -> JobSpec:
    run = Run(
        name="tiny-1", state=RunState.CREATED, reason="", cluster="local", run_dir="/shared/tiny-1",
        config_digest="0" * 64, total_steps=1, identity=identity,
    )  # fmt: skip
    attempt = Attempt(
        run=run.name, number=2, state=AttemptState.INTENT, nonce="0" * 8, job_name="orch-tiny-1-2-00000000"
    )
    return job_spec(run, attempt, config or RunConfig())


def test_spare_nodes_are_asked_for_beside_those_that_train() -> None:
    asked = spec({}, RunConfig(cluster=ClusterConfig(nodes=4, spare_nodes=2))).resources
    assert (asked.nodes, asked.spares) == (6, 2)


def test_a_later_attempt_starts_with_the_interpreter_and_variables_of_the_submitter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {"PATH": "/opt/bin:/bin", "SLURM_JWT": "hunter2", "ORCH_API_KEY": "hunter2", "EDITOR": "vi"}
    monkeypatch.setattr(sys, "executable", "/opt/venv/bin/python")
    identity = identify(RunConfig(), "local", data={}, environ=environ)
    monkeypatch.undo()
    assert "hunter2" not in json.dumps(identity)
    made = spec(json.loads(json.dumps(identity)))
    assert prepare(made).python == "/opt/venv/bin/python -P"
    own = {"PATH": "/bin", "VIRTUAL_ENV": "/home/ann/other", "SLURM_JWT": "mine"}
    assert made.submitter.environ(own) == {"PATH": "/opt/bin:/bin", "SLURM_JWT": "mine", "PYTHONUTF8": "1"}


@pytest.mark.parametrize("identity", [{}, {"job": None}, {"job": {"python": "/bin/python"}}, {"job": {"variables": 1}}])
def test_a_run_without_such_a_record_takes_what_the_controller_has(identity: dict[str, object]) -> None:
    made = spec(identity)
    assert prepare(made).python == f"{sys.executable} -P"
    assert made.submitter.environ({"PATH": str(Path("/bin")), "EDITOR": "vi"}) == {"PATH": "/bin", "PYTHONUTF8": "1"}
