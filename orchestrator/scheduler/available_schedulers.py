"""Which schedulers this machine can use: a row for each kind.

Their traits stand in trainer/contract/config_sections/scheduler_kinds.py.
Functions import what they need when they are called: only the scheduler that is used is loaded.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orchestrator.errors import ConfigError, Precondition, SubmitRejected
from orchestrator.scheduler.interface import JobSpec, Scheduler
from orchestrator.scheduler.scheduler_instance import Instance, LocalInstance, SlurmInstance, unknown_instance
from trainer.contract.config_sections.scheduler_kinds import AUTO, LOCAL, SLURM, choice_words


@dataclass(frozen=True, kw_only=True)
class SchedulerFactory:
    """What the login node's side does for the runs of one kind."""

    is_here: Callable[[], bool]
    make: Callable[[], Scheduler]
    instance: Callable[[], Instance]
    check: Callable[[JobSpec], object]
    """Raises ConfigError or SubmitRejected, without asking anybody, for a job that could not be written down."""
    script: Callable[[JobSpec], str] | None = None
    """The batch script of a job; None where there is none."""
    refusal: Callable[[JobSpec], SubmitRejected | None] | None = None
    """Why the scheduler, which is asked, would not take the job; no answer is no refusal."""
    has_node: Callable[[str], bool] | None = None
    """Whether it has a node of this name, as it says itself."""
    named_by_environment: bool = False
    """Whether variables of the shell say which instance is meant: they are recorded with a run."""


def _slurm_has_node(name: str) -> bool:
    from orchestrator.scheduler.slurm.command_output import run_command

    done = run_command(["sinfo", "-h", "-a", "-N", "-n", name, "-o", "%N"])
    return done.returncode == 0 and name in done.stdout.split()


def _slurm() -> Scheduler:
    from orchestrator.scheduler.slurm.slurm_scheduler import SlurmScheduler

    return SlurmScheduler()


def _sbatch_script(spec: JobSpec) -> str:
    from orchestrator.scheduler.slurm import slurm_scheduler

    return slurm_scheduler.render(spec)


def _slurm_refusal(spec: JobSpec) -> SubmitRejected | None:
    from orchestrator.scheduler.slurm import sbatch

    return sbatch.refusal(spec)


def _local() -> Scheduler:
    from orchestrator.scheduler.local.local_scheduler import LocalScheduler

    return LocalScheduler()


def _check_local(spec: JobSpec) -> None:
    from orchestrator.scheduler.local import local_scheduler

    local_scheduler.check(spec)


class _Factories(dict[str, SchedulerFactory]):
    """By kind; one that there is not, as of a run that a newer orch submitted, is told as any other error."""

    def __missing__(self, kind: str) -> SchedulerFactory:
        raise Precondition(
            f"this orch knows no scheduler `{kind}`",
            where="cluster.kind",
            hint=f"it knows {', '.join(self)}; a run of another kind is for the orch that submitted it",
        )


FACTORIES = _Factories(
    {
        SLURM: SchedulerFactory(
            is_here=lambda: shutil.which("sbatch") is not None,
            make=_slurm,
            instance=SlurmInstance,
            check=_sbatch_script,
            script=_sbatch_script,
            refusal=_slurm_refusal,
            has_node=_slurm_has_node,
            named_by_environment=True,
        ),
        LOCAL: SchedulerFactory(is_here=lambda: True, make=_local, instance=LocalInstance, check=_check_local),
    }
)
"""By kind, the one that `auto` prefers first."""


def kinds() -> tuple[str, ...]:
    """What this machine can use."""
    return tuple(kind for kind, factory in FACTORIES.items() if factory.is_here())


def resolve(kind: str) -> str:
    """The kind that is meant: `auto` is the first that can be used; raises ConfigError for an unknown one."""
    if kind == AUTO:
        return kinds()[0]
    if kind not in FACTORIES:
        raise ConfigError(f"cluster.kind={kind}: no such scheduler", where="cluster.kind", hint=choice_words())
    return kind


def usable(kind: str) -> Mapping[str, Scheduler]:
    """The scheduler of this kind; empty where its commands are missing: its runs wait, untouched."""
    return {kind: FACTORIES[kind].make()} if kind in kinds() else {}


def instance_of(kind: str) -> Instance:
    """What names the scheduler of this kind that can be reached from here."""
    return FACTORIES[kind].instance()


def lease_key(kind: str) -> str:
    """What the lease of a controller here is for: the scheduler of this kind that commands reach now."""
    return instance_of(kind)() or unknown_instance(kind)
