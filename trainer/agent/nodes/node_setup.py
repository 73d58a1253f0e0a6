"""Preparation of a node before its fork server starts: staged archive, caches, topology."""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpointing.python_command import is_mounted
from checkpointing.storage.storage_errors import error_words, is_disk_error
from trainer.agent.fork_server.rank_binding import Topology, read_topology
from trainer.agent.fork_server.rank_variables import PYTHON_VARIABLE, STAGE_VARIABLE, node_caches
from trainer.agent.nodes.node_disk import CACHES, FolderLock, delete_unused, make_own_folder
from trainer.agent.nodes.stage_archive import StagedArchive, StageFailed, stage_archive
from trainer.protocol.config import JobConfig
from trainer.protocol.messages.agents import PreflightFault

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
    config: JobConfig, run: str, environ: Mapping[str, str], visible: str | None
) -> tuple[PreparedNode, list[PreflightFault]]:
    """Prepare the calling node, and return what was done and the faults. `visible` is CUDA_VISIBLE_DEVICES."""
    cluster = config.cluster
    topology = read_topology(visible, gpus=cluster.gpus_per_node > 0)
    variables: dict[str, str] = {}
    staged = None
    try:
        if cluster.stage.archive:
            staged = stage_archive(cluster.stage, environ)
            variables[STAGE_VARIABLE] = str(staged.folder)
            if staged.python:
                variables[PYTHON_VARIABLE] = staged.python
                _require_own_packages(config, staged.python, {**environ, **config.env})
        if cluster.caches:
            chosen = {name: value for name, value in environ.items() if (name, value) != _SLURMS_TMPDIR}
            variables |= _make_caches(cluster.caches, run, {**chosen, **config.env})
    except StageFailed as error:
        return PreparedNode(topology=topology), [_fault(str(error), full=error.full)]
    return PreparedNode(variables=variables, topology=topology, staged=staged), []


def _fault(reason: str, *, full: bool) -> PreflightFault:
    """Return a fault. A full disk is this node's own unless all nodes have it; other causes are those of all nodes."""
    return PreflightFault(check="node disk" if full else "staged archive", reason=reason, shared=True)


def _make_caches(text: str, run: str, environ: Mapping[str, str]) -> dict[str, str]:
    try:
        above = make_own_folder(text, environ)
        lock = FolderLock.use(above / f"{CACHES}{run}")
        (lock.folder / "tmp").mkdir(mode=0o700, parents=True, exist_ok=True)
        delete_unused(above, _KEEP_DAYS, caches=True)
    except ValueError as error:
        raise StageFailed(f"cluster.caches={error}") from error
    except OSError as error:
        raise StageFailed(f"cluster.caches={text}: {error_words(error)}", full=is_disk_error(error)) from error
    return node_caches(lock.folder, environ)


def _require_own_packages(config: JobConfig, python: str, environ: Mapping[str, str]) -> None:
    """Raise StageFailed if a workload's fork server cannot run with the archive's interpreter."""
    if config.command or is_mounted():  # a program needs nothing of orch; mounted packages serve every interpreter
        return
    what = f"the Python of {config.cluster.stage.archive} cannot run workloads"
    try:
        done = subprocess.run(
            [python, "-P", "-c", _FORK_SERVER], env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=_IMPORT_SECONDS, check=False,
        )  # fmt: skip
    except OSError as error:
        raise StageFailed(f"{what}: {python}: {error.strerror}; pack an environment of this kind of node") from error
    except subprocess.TimeoutExpired as error:
        raise StageFailed(f"{what}: `{_FORK_SERVER}` took longer than {_IMPORT_SECONDS:g} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise StageFailed(f"{what}: {last}; install orch in that environment and pack it again")
