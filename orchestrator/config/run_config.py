"""The whole configuration of a run, as a user writes it; the job reads the part in `trainer.contract.config`."""

from dataclasses import dataclass, field
from typing import Any

from trainer.contract.config import ClusterShape, JobConfig


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(ClusterShape):
    """How the run's jobs are asked for: `ClusterShape` plus what only the login node needs."""

    partition: str = ""
    """Slurm partition; empty takes the site's default."""
    account: str = ""
    """Slurm account."""
    qos: str = ""
    """Slurm quality of service."""
    constraint: str = ""
    """Node features (`h100&ib`)."""
    exclude: str = ""
    """Nodes never to use, as a Slurm host list (`gpu[003,017]`)."""
    templates: tuple[str, ...] = ("default",)
    """Fragments of `sbatch_templates/` that prepare a node (`modules`, `conda`, `nccl`, `pyxis`, `apptainer`)."""
    template_args: dict[str, str] = field(default_factory=dict)
    """Values for the placeholders of those fragments."""
    python: str = ""
    """Interpreter on the compute nodes; empty takes the one that runs orch, or the template's."""
    sbatch: dict[str, Any] = field(default_factory=dict)
    """Any further sbatch option, by its long name."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(JobConfig):
    """Everything `orch submit` needs to know."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
