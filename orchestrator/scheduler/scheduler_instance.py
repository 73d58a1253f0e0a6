"""Which scheduler the commands of this process reach: one particular Slurm, or the local jobs of this host.

Job ids and names mean something to the Slurm that gave them only. One home may serve several, and two of them may even
bear the same ClusterName, so an instance is named by what differs: `lab@login1:6817/1a2b3c4d`, or `local@HOST`.
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
from trainer.contract.config_sections.scheduler_kinds import LOCAL
from trainer.contract.cut_text import cut

ANSWER_WITHIN = 10.0
KEEP_FOR = 10.0
"""Seconds for which an answer is believed while the configuration file stays as it is."""
_FIELD = re.compile(r"^(\w+(?:\[\d+\])?)\s*=\s?(.*)$", re.MULTILINE)
_NAMING = ("ClusterName", "SlurmctldHost[0]", "SlurmctldPort", "StateSaveLocation")
"""What stays the same over a restart, a fail-over, and a backup controller that is added."""

CommandRunner = Callable[[list[str]], CompletedProcess[str]]


def local_instance() -> str:
    """The instance of local jobs: those of one host mean nothing to another."""
    return f"{LOCAL}@{socket.gethostname()}"


def unknown_instance(kind: str) -> str:
    """Stands for a scheduler that has not answered yet, as it is asked from this host; it owns no run."""
    return f"{kind}@{socket.gethostname()}?"


def is_known(instance: str) -> bool:
    """Whether this names a scheduler that has answered."""
    return bool(instance) and not instance.endswith("?")


def is_one_host(instance: str) -> bool:
    """Whether its jobs are processes of one host."""
    return instance.partition("@")[0] == LOCAL


def same_cluster_name(one: str, other: str) -> bool:
    """Whether both are Slurms of one ClusterName: perhaps one Slurm whose head node, port or state has moved."""
    name = one.partition("@")[0]
    known = is_known(one) and is_known(other)
    return one != other and known and name == other.partition("@")[0] and not is_one_host(one)


def read_instance(text: str) -> str:
    """The instance in what `scontrol show config` prints; empty when it does not say."""
    fields = {name: value.strip() for name, value in _FIELD.findall(text)}
    values = [fields.get(name, "") for name in _NAMING]
    if not all(values) or "(null)" in values:
        return ""
    cluster, host, port, _ = values
    digest = hashlib.sha256("\0".join(values).encode()).hexdigest()[:8]
    return f"{cluster}@{host.partition('(')[0]}:{port}/{digest}"


class Instance(Protocol):
    """Names the scheduler of one kind that commands reach now; `silence` says why it is not known."""

    silence: str

    def __call__(self) -> str:
        """Its name; empty when it does not answer, which is never another one."""


class SlurmInstance:
    """The Slurm that this process reaches now, or would with other variables; `silence` says why it is not known."""

    def __init__(
        self, asking: CommandRunner | None = None, mono: Callable[[], float] = time.monotonic,
        environ: Mapping[str, str] = os.environ,
    ) -> None:  # fmt: skip
        self._ask = asking or (lambda command: run_command(command, ANSWER_WITHIN, environ))
        self._mono, self._environ = mono, environ
        self._known, self._until, self._source = "", 0.0, ""
        self.silence = ""

    def __call__(self) -> str:
        """Its name; empty when it does not answer, which is never another one."""
        source = _source(self._environ)
        if not self._known or self._mono() >= self._until or source != self._source:
            self._source = source
            self._known = self._find()
            self._until = self._mono() + KEEP_FOR
        return self._known

    def _find(self) -> str:
        try:
            done = self._ask(["scontrol", "show", "config"])
        except SlurmUnreachable as error:
            self.silence = error.what
            return ""
        found = read_instance(done.stdout) if done.returncode == 0 else ""
        words = cut(" ".join(done.stderr.split()), 300) or "it does not name its cluster"
        self.silence = "" if found else f"scontrol cannot tell which Slurm this is: {words}"
        return found


def _source(environ: Mapping[str, str]) -> str:
    """What a change of shows that another Slurm may be meant: the configuration's place, and its file."""
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

    def __call__(self) -> str:
        return local_instance()
