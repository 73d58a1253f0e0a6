"""Schedulers available on this machine, one row per kind.

Their traits are in trainer/protocol/config_sections/scheduler_kinds.py.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orchestrator.errors import ConfigError, Precondition, SubmitRejected
from orchestrator.scheduler.interface import JobSpec, Scheduler
from orchestrator.scheduler.local.local_scheduler import LocalScheduler, check
from orchestrator.scheduler.scheduler_instance import Instance, LocalInstance, SlurmInstance, unknown_instance
from orchestrator.scheduler.slurm import slurm_scheduler
from trainer.protocol.config_sections.scheduler_kinds import AUTO, LOCAL, SLURM, choice_words

QUIET = 30.0  # seconds between queries of Slurm while nothing changes: at most two a minute


@dataclass(frozen=True, kw_only=True)
class SchedulerFactory:
    """Login-node operations for one scheduler kind."""

    is_here: Callable[[], bool]
    make: Callable[[], Scheduler]
    instance: Callable[[], Instance]
    check: Callable[[JobSpec], object]
    """Raises ConfigError or SubmitRejected, without querying the scheduler, for a job that cannot be expressed."""
    script: Callable[[JobSpec], str] | None = None  # batch script of a job; None if this kind has no scripts
    refusal: Callable[[JobSpec], SubmitRejected | None] | None = None
    """The scheduler's refusal of the job, or None; a missing answer is not a refusal."""
    has_node: Callable[[str], bool] | None = None  # whether the scheduler reports a node with this name
    for_daemon: Callable[[], Scheduler] | None = None  # variant for a process that stays; None: as `make`
    quiet: float = 0.0
    """Seconds between a controller's queries while nothing changes; 0: every pass queries."""
    named_by_environment: bool = False
    """Whether shell variables select the instance; they are then recorded with each run."""


class _Factories(dict[str, SchedulerFactory]):
    """Factories keyed by kind. An unknown kind, such as one from a run of a newer orch, raises Precondition."""

    def __missing__(self, kind: str) -> SchedulerFactory:
        raise Precondition(
            f"this version of orch has no scheduler `{kind}`",
            where="cluster.kind",
            hint=f"it has {', '.join(self)}; use the version of orch that submitted the run",
        )


FACTORIES = _Factories(
    {
        SLURM: SchedulerFactory(
            is_here=lambda: shutil.which("sbatch") is not None,
            make=slurm_scheduler.SlurmScheduler,
            instance=SlurmInstance,
            check=slurm_scheduler.render,
            script=slurm_scheduler.render,
            refusal=slurm_scheduler.refusal,
            has_node=slurm_scheduler.has_node,
            for_daemon=slurm_scheduler.SlurmScheduler.for_daemon,
            quiet=QUIET,
            named_by_environment=True,
        ),
        LOCAL: SchedulerFactory(is_here=lambda: True, make=LocalScheduler, instance=LocalInstance, check=check),
    }
)
"""Factories keyed by kind, in the order in which `auto` prefers them."""


def kinds() -> tuple[str, ...]:
    """Return the kinds that this machine can use."""
    return tuple(kind for kind, factory in FACTORIES.items() if factory.is_here())


def resolve(kind: str) -> str:
    """Return the kind, with `auto` resolved to the first usable one. Raises ConfigError for an unknown kind."""
    if kind == AUTO:
        return kinds()[0]
    if kind not in FACTORIES:
        raise ConfigError(f"cluster.kind={kind}: no such scheduler", where="cluster.kind", hint=choice_words())
    return kind


def usable(kind: str, *, daemon: bool = False) -> Mapping[str, Scheduler]:
    """Return a map from this kind to its scheduler. If its commands are missing, the map is empty and runs wait."""
    factory = FACTORIES[kind]
    make = (factory.for_daemon or factory.make) if daemon else factory.make
    return {kind: make()} if kind in kinds() else {}


def make_instance(kind: str) -> Instance:
    """Return the object that names the reachable scheduler of this kind."""
    return FACTORIES[kind].instance()


def lease_key(kind: str) -> str:
    """Return the key of a local controller's lease: the scheduler of this kind that commands now reach."""
    return make_instance(kind)() or unknown_instance(kind)
