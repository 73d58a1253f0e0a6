"""The whole configuration of a run, as a user writes it; the job reads the part in `trainer.contract.config`."""

from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.notify_config import NotifyConfig
from orchestrator.config.restore_tests_config import RestoreTestsConfig
from trainer.contract.config import ClusterShape, JobConfig


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(ClusterShape):
    """What to request from Slurm, or to simulate on this machine."""

    shared_root: bool = False
    """Allow a `root` that others can write too; [security.md](security.md) says what protects the runs there."""
    partition: str = ""
    """Slurm partition; empty: the site's default."""
    account: str = ""
    """Slurm account."""
    qos: str = ""
    """Slurm quality of service."""
    constraint: str = ""
    """Node features (`h100&ib`)."""
    exclude: str = ""
    """Nodes never to use, as a Slurm hostlist (`gpu[003,017]`)."""
    templates: tuple[str, ...] = ("default",)
    """Scripts of `sbatch_templates/` that prepare a node (`modules`, `conda`, `nccl`, `apptainer`, ...)."""
    template_args: dict[str, str] = field(default_factory=dict)
    """Values for the placeholders in those scripts."""
    python: str = ""
    """Python on the compute nodes; empty: the one that runs orch, or the template's."""
    sbatch: dict[str, Any] = field(default_factory=dict)
    """Further sbatch options, by their long names (`switches: 1@10:00`: wait for nodes under one switch); values stay
    as they are written."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(JobConfig):
    """Everything `orch submit` needs to know."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    restore_tests: RestoreTestsConfig = field(default_factory=RestoreTestsConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
