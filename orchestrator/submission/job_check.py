"""The job that a configuration asks for, before there is a run: can its script be made, and would Slurm take it?"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from orchestrator.config.run_config import RunConfig
from orchestrator.controller.jobs.job_spec import job_spec
from orchestrator.errors import Retryable, SlurmUnreachable, SubmitRejected
from orchestrator.registry.records import Attempt, Run
from orchestrator.scheduler.available_schedulers import FACTORIES
from orchestrator.scheduler.interface import JobSpec
from orchestrator.states import AttemptState, RunState

Warn = Callable[[str], None]
"""Called with what Slurm says against a job that it may take all the same."""


_BY_NODES = "node configuration is not available"


def first_job(config: RunConfig, kind: str, name: str = "") -> JobSpec:
    """The job of a first attempt, with placeholders where a submitted run has its number and nonce."""
    name = name or f"{config.name}-N"
    root = Path(config.cluster.root).expanduser().absolute()
    run = Run(
        name=name, state=RunState.CREATED, reason="", cluster=kind, run_dir=str(root / name), config_digest="",
        total_steps=0 if config.command else config.train.steps,
    )  # fmt: skip
    attempt = Attempt(run=name, number=1, state=AttemptState.INTENT, nonce="0" * 8, job_name=f"orch-{name}-1-00000000")
    return job_spec(run, attempt, config)


def check_script(config: RunConfig, kind: str) -> None:
    """Raises ConfigError, or SubmitRejected on this machine, for a job that could not even be written down."""
    FACTORIES[kind].check(first_job(config, kind))


def check_with_scheduler(config: RunConfig, kind: str, warn: Warn) -> None:
    """Raises SubmitRejected, with its words and what to type, for a job that the scheduler would never take or start.

    No answer is no refusal. What passes, and what only nodes explain that are down now, is told to `warn`.
    """
    from orchestrator.scheduler.slurm.node_capacity import known_nodes, shortfall

    spec, refusal = first_job(config, kind), FACTORIES[kind].refusal
    refused = refusal(spec) if refusal is not None else None
    if refused is None:
        return
    passes = refused.retryable is Retryable.YES
    if not passes and _BY_NODES in refused.what.lower():
        # sbatch takes such a job where the nodes are only down, and where it lets it wait for ever.
        passes = True
        with suppress(SlurmUnreachable):
            passes = shortfall(spec.resources, known_nodes()) is None
    if passes:
        warn(f"{refused.what}; it is submitted all the same, and may have to wait")
        return
    hints = [refused.hint, f"type {refused.change}" if refused.change else ""]
    raise SubmitRejected(refused.what, where="nothing was submitted", hint=": ".join(filter(None, hints)))
