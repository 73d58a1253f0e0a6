"""The whole configuration of a run, with its notifications; the job reads `trainer.protocol.config`."""

import re
from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.restore_tests_config import RestoreTestsConfig
from orchestrator.states import RunState
from trainer.protocol.config import ClusterShape, JobConfig

_ADDRESS = re.compile(r"[^\s<>,;:\"'\\]+")
_STATES = tuple(str(state) for state in RunState)


@dataclass(frozen=True, kw_only=True)
class NotifyConfig:
    """Notifications about this run, sent by the controller once for each change of state."""

    webhook: str = ""
    """URL that receives a POST with JSON; its `text` is a sentence, in the format of Slack and Mattermost."""

    mail: str = ""
    """Mail addresses, separated by commas; sent with `sendmail`, or by SMTP on localhost if it is missing."""

    command: tuple[str, ...] = ()
    """A program with arguments, or one line for `sh`; it gets `ORCH_*` variables, and the JSON on stdin."""

    on: tuple[str, ...] = ("HELD", "FAILED", "SUCCEEDED")
    """Run states that trigger a notification."""

    def __post_init__(self) -> None:
        if self.webhook and not re.fullmatch(r"https?://[^\s/?#@]+([/?#]\S*)?", self.webhook, re.ASCII):
            raise ValueError("notify.webhook: must be a http:// or https:// URL without spaces, user and password")
        for address in self.addresses:
            if not _ADDRESS.fullmatch(address) or address.startswith("-"):
                raise ValueError(f"notify.mail={self.mail}: must be addresses, separated by commas")
        object.__setattr__(self, "on", tuple(state.upper() for state in self.on))
        for state in self.on:
            if state not in _STATES:
                raise ValueError(f"notify.on: {state}: must be one of {', '.join(_STATES)}")

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(address.strip() for address in self.mail.split(",")) if self.mail else ()


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(ClusterShape):
    """Resources to request from Slurm, or to simulate on this machine."""

    shared_root: bool = False
    """Allow a `root` that others can write to; [security.md](security.md) describes the protection of its runs."""
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
    """Further sbatch options, by their long names (`switches: 1@10:00`: wait for nodes under one switch); values keep
    their spelling."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(JobConfig):
    """The complete configuration for `orch submit`."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    restore_tests: RestoreTestsConfig = field(default_factory=RestoreTestsConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)
