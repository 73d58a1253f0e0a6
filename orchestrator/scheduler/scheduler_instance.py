"""Identity of the scheduler that this process's commands reach: a particular Slurm, or this host's local jobs.

Job ids and names are valid only in the Slurm that issued them. One home may serve several, and two of them may even
share a ClusterName, so an instance name includes what differs: `lab@login1:6817/1a2b3c4d`, or `local@HOST`.
"""

import hashlib
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from subprocess import CompletedProcess
from typing import Protocol

from orchestrator.errors import SlurmUnreachable
from orchestrator.scheduler.slurm.command_output import run_command
from trainer.protocol.config_sections.scheduler_kinds import LOCAL
from trainer.protocol.cut_text import cut

ANSWER_WITHIN = 10.0
KEEP_FOR, BEFORE_EFFECT = 600.0, 10.0
"""Seconds for which an answer is used while the configuration file is unchanged, and before an effect."""
_FIELD = re.compile(r"^(\w+(?:\[\d+\])?)\s*=\s?(.*)$", re.MULTILINE)
_NAMING = ("ClusterName", "SlurmctldHost[0]", "SlurmctldPort", "StateSaveLocation")
"""Settings that stay the same after a restart, a fail-over, or the addition of a backup controller."""

CommandRunner = Callable[[list[str]], CompletedProcess[str]]


def local_instance() -> str:
    """Return the instance of local jobs, which differs from host to host."""
    return f"{LOCAL}@{socket.gethostname()}"


def unknown_instance(kind: str) -> str:
    """Return a placeholder for a scheduler that has not answered this host yet. No run belongs to it."""
    return f"{kind}@{socket.gethostname()}?"


def is_known(instance: str) -> bool:
    """Return whether this names a scheduler that has answered."""
    return bool(instance) and not instance.endswith("?")


def is_one_host(instance: str) -> bool:
    """Return whether its jobs are processes of one host."""
    return instance.partition("@")[0] == LOCAL


def same_cluster_name(one: str, other: str) -> bool:
    """Return whether these differ but share a ClusterName, as they do once Slurm's head node, port or state moves."""
    name = one.partition("@")[0]
    known = is_known(one) and is_known(other)
    return one != other and known and name == other.partition("@")[0] and not is_one_host(one)


def read_instance(text: str) -> str:
    """Return the instance described by `scontrol show config`, or "" if it is incomplete."""
    fields = {name: value.strip() for name, value in _FIELD.findall(text)}
    values = [fields.get(name, "") for name in _NAMING]
    if not all(values) or "(null)" in values:
        return ""
    cluster, host, port, _ = values
    digest = hashlib.sha256("\0".join(values).encode()).hexdigest()[:8]
    return f"{cluster}@{host.partition('(')[0]}:{port}/{digest}"


class Instance(Protocol):
    """Name of the scheduler that commands of one kind reach now. If it is unknown, `silence` is the reason."""

    silence: str

    def __call__(self, within: float = KEEP_FOR) -> str:
        """Return the scheduler's name, or "" if it did not answer, which never means a different scheduler.

        `within`: greatest age of the answer in seconds.
        """


class SlurmInstance:
    """The Slurm that a process with the variables `environ` reaches. If it is unknown, `silence` is the reason."""

    def __init__(
        self, asking: CommandRunner | None = None, mono: Callable[[], float] = time.monotonic,
        environ: Mapping[str, str] = os.environ,
    ) -> None:  # fmt: skip
        self._ask = asking or (lambda command: run_command(command, ANSWER_WITHIN, environ))
        self._mono, self._environ = mono, environ
        self._known, self._answered, self._source = "", 0.0, ""
        self.silence = ""

    def __call__(self, within: float = KEEP_FOR) -> str:
        source = _source(self._environ)
        if not self._known or self._mono() - self._answered >= within or source != self._source:
            self._source = source
            self._known = self._find()
            self._answered = self._mono()
        return self._known

    def _find(self) -> str:
        try:
            done = self._ask(["scontrol", "show", "config"])
        except SlurmUnreachable as error:
            self.silence = error.what
            return ""
        found = read_instance(done.stdout) if done.returncode == 0 else ""
        words = cut(" ".join(done.stderr.split()), 300) or "it does not name its cluster"
        self.silence = "" if found else f"scontrol does not identify this Slurm: {words}"
        return found


def _source(environ: Mapping[str, str]) -> str:
    """Return a key that changes when this may be a different Slurm cluster: the configuration file's path and state."""
    place = environ.get("SLURM_CONF", "/etc/slurm/slurm.conf")
    try:
        seen = os.stat(place)
        file = f"{seen.st_dev}:{seen.st_ino}:{seen.st_mtime_ns}:{seen.st_size}"
    except OSError:
        file = "none"  # configless
    return f"{place} {file} {environ.get('SLURM_CLUSTERS', '')}"


class LocalInstance:
    """The local jobs of this host."""

    silence = ""

    def __call__(self, within: float = KEEP_FOR) -> str:
        return local_instance()
