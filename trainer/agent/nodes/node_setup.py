"""Preparation of a node before its fork server starts: staged archive, caches, topology."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpointing.python_command import is_mounted
from trainer.agent.fork_server.rank_binding import Topology, read_topology
from trainer.agent.nodes.node_disk import (
    CACHES,
    FolderLock,
    NotPrepared,
    OnWait,
    delete_unused,
    explain_folder_error,
    ignore_wait,
    make_own_folder,
)
from trainer.agent.nodes.stage_archive import StagedArchive, stage_archive
from trainer.protocol.config import JobConfig
from trainer.protocol.messages.agents import PreflightFault
from trainer.protocol.rank_variables import PYTHON_VARIABLE, STAGE_VARIABLE, node_caches

_KEEP_DAYS = 7.0
_SLURMS_TMPDIR = ("TMPDIR", "/tmp")
"""Slurm sets this for tasks without TMPDIR, so it is not the user's choice."""
_FORK_SERVER = "import trainer.agent.fork_server.server"
_IMPORT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class PreparedNode:
    """A prepared node: `variables` for all of its ranks, and its topology."""

    variables: dict[str, str] = field(default_factory=dict)
    topology: Topology = field(default_factory=Topology)
    staged: StagedArchive | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the data of the event `node.prepared`."""
        staged = self.staged
        return {
            "variables": self.variables,
            "staged": None if staged is None else str(staged.folder),
            "reused": None if staged is None else staged.reused,
            "seconds": None if staged is None else round(staged.seconds, 2),
        }


def prepare_node(
    config: JobConfig, run: str, environ: Mapping[str, str], visible: str | None, on_wait: OnWait = ignore_wait
) -> tuple[PreparedNode, list[PreflightFault]]:
    """Prepare the calling node, and return what was done and the faults. `visible` is CUDA_VISIBLE_DEVICES.

    `on_wait` is called before a wait for another process that unpacks the archive.
    """
    cluster = config.cluster
    topology = read_topology(visible, gpus=cluster.gpus_per_node > 0)
    variables: dict[str, str] = {}
    staged = None
    try:
        if cluster.stage.archive:
            staged = stage_archive(cluster.stage, environ, on_wait)
            variables[STAGE_VARIABLE] = str(staged.folder)
            if staged.python:
                variables[PYTHON_VARIABLE] = staged.python
                _require_own_packages(config, staged.python, {**environ, **config.env})
        if cluster.caches:
            chosen = {name: value for name, value in environ.items() if (name, value) != _SLURMS_TMPDIR}
            variables |= _make_caches(cluster.caches, run, {**chosen, **config.env})
    except NotPrepared as error:
        # The other nodes' reports show whether the fault is this node's own.
        return PreparedNode(topology=topology), [PreflightFault(check=error.check, reason=str(error), shared=True)]
    return PreparedNode(variables=variables, topology=topology, staged=staged), []


def _make_caches(text: str, run: str, environ: Mapping[str, str]) -> dict[str, str]:
    key = "cluster.caches"
    above = make_own_folder(key, text, environ)
    try:
        lock = FolderLock.use(above / f"{CACHES}{run}")
        (lock.folder / "tmp").mkdir(mode=0o700, parents=True, exist_ok=True)
        delete_unused(above, _KEEP_DAYS, caches=True)
    except OSError as error:
        raise explain_folder_error(key, text, error) from error
    return node_caches(lock.folder, environ)


def _require_own_packages(config: JobConfig, python: str, environ: Mapping[str, str]) -> None:
    """Raise NotPrepared if a workload's fork server cannot run with the archive's interpreter."""
    if config.command or is_mounted():  # a program needs nothing of orch; mounted packages serve every interpreter
        return
    what = f"the Python of {config.cluster.stage.archive} cannot run workloads"
    try:
        done = subprocess.run(
            [python, "-P", "-c", _FORK_SERVER], env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=_IMPORT_SECONDS, check=False,
        )  # fmt: skip
    except OSError as error:
        raise NotPrepared(f"{what}: {python}: {error.strerror}; pack an environment of this kind of node") from error
    except subprocess.TimeoutExpired as error:
        raise NotPrepared(f"{what}: `{_FORK_SERVER}` took longer than {_IMPORT_SECONDS:g} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise NotPrepared(f"{what}: {last}; install orch in that environment and pack it again")
