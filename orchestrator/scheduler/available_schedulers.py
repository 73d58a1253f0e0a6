"""Which schedulers this machine can use, and which of them a run uses."""

import shutil
from collections.abc import Mapping

from orchestrator.errors import ConfigError
from orchestrator.scheduler.interface import Scheduler


def kinds() -> tuple[str, ...]:
    """What this machine can use: local always, Slurm where its commands are."""
    return ("slurm", "local") if shutil.which("sbatch") is not None else ("local",)


def resolve(kind: str) -> str:
    """`slurm` or `local`: `auto` is slurm where it can be used; raises ConfigError for any other kind."""
    if kind == "auto":
        return kinds()[0]
    if kind not in ("slurm", "local"):
        raise ConfigError(f"cluster.kind={kind}: no such scheduler", where="cluster.kind", hint="auto, slurm or local")
    return kind


def usable(kind: str) -> Mapping[str, Scheduler]:
    """The scheduler of this kind; empty where its commands are missing: its runs wait, untouched."""
    if kind not in kinds():
        return {}
    if kind == "slurm":
        from orchestrator.scheduler.slurm.slurm_scheduler import SlurmScheduler  # only the one that is used is loaded

        return {kind: SlurmScheduler()}
    from orchestrator.scheduler.local.local_scheduler import LocalScheduler  # see above

    return {kind: LocalScheduler()}
