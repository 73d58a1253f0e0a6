"""The complete configuration of a run. The job reads only the part in `trainer.protocol.config`."""

from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.budgets_config import BudgetConfig
from orchestrator.config.restore_tests_config import RestoreTestsConfig
from orchestrator.notifications.channels import NotifyConfig
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.recipe_config import ClusterShape


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(ClusterShape):
    """Resources to request from Slurm, or to simulate on this machine."""

    shared_root: bool = False
    """Allow a `root` that others can write to (docs/security.md)."""
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
    gpus: str = "per-node"
    """sbatch option for the GPUs: `per-node` (`--gpus-per-node=N`), or `gres` (`--gres=gpu:N`) for sites that require
    it or a type (`cluster.sbatch.gres: gpu:h100:8`)."""
    templates: tuple[str, ...] = ("default",)
    """Scripts of `sbatch_templates/` that prepare a node (`modules`, `conda`, `nccl`, `apptainer`, ...)."""
    template_args: dict[str, str] = field(default_factory=dict)
    """Values for the placeholders in those scripts."""
    python: str = ""
    """Python on the compute nodes; empty: the Python that runs orch, or the template's."""
    sbatch: dict[str, Any] = field(default_factory=dict)
    """Other sbatch options, by their long names (`switches: 1@10:00`: wait for nodes under one switch); values are
    passed unchanged."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(JobConfig):
    """The complete configuration for `orch submit`."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    restore_tests: RestoreTestsConfig = field(default_factory=RestoreTestsConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    budgets: tuple[BudgetConfig, ...] = ()
    """Budgets of GPU-hours (`[{account: x, gpu_hours: 5000, per: month}]`), usually in the site's or your own file;
    `orch submit` checks them against the runs in your registry."""
