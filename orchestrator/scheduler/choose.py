"""Which scheduler a run uses."""

import shutil

from orchestrator.errors import ConfigError
from orchestrator.scheduler.base import Scheduler


def resolve(kind: str) -> str:
    """`slurm` or `local`: `auto` is slurm where sbatch is found."""
    if kind == "auto":
        return "slurm" if shutil.which("sbatch") else "local"
    if kind not in ("slurm", "local"):
        raise ConfigError(f"cluster.kind={kind}: no such scheduler", where="cluster.kind", hint="auto, slurm or local")
    return kind


def choose(kind: str) -> Scheduler:
    """The scheduler for `cluster.kind`."""
    if resolve(kind) == "slurm":
        from orchestrator.scheduler.slurm import SlurmScheduler  # only the one that is used is loaded

        return SlurmScheduler()
    from orchestrator.scheduler.local import LocalScheduler  # see above

    return LocalScheduler()
