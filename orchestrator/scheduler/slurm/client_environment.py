"""Environment that selects a Slurm cluster.

A controller outlives the shell that started it, and a later shell may have newer settings for reaching Slurm.
"""

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

RECORDED = "slurm_client"  # key of a run's identity for its submitter's client environment
NAMES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS")
"""Variables that select a Slurm. Options of single commands (SBATCH_*, SQUEUE_*, ...) are never passed on."""
TOKEN = "SLURM_JWT"  # noqa: S105  # the name of the variable
"""A client's secret. Only its digest is stored, so it cannot be passed on."""


@dataclass(frozen=True, kw_only=True)
class ClientEnvironment:
    """The Slurm that a process's environment selects; `token` is the digest of its TOKEN, or empty."""

    variables: dict[str, str] = field(default_factory=dict)
    sbatch: str = ""  # path of sbatch; empty: not on PATH
    token: str = ""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Return the client environment of this process."""
        import hashlib  # `orch status` only reads records

        token = environ.get(TOKEN, "").encode(errors="surrogateescape")
        return cls(
            variables={name: environ[name] for name in NAMES if environ.get(name)}, sbatch=_sbatch(environ),
            token=hashlib.sha256(token).hexdigest()[:12] if token else "",
        )  # fmt: skip

    @classmethod
    def from_json(cls, fields: Any) -> Self | None:
        """Return the environment stored by `to_json`, or None for anything else."""
        try:
            variables = {str(name): str(value) for name, value in fields["variables"].items() if name in NAMES}
            return cls(variables=variables, sbatch=str(fields["sbatch"]), token=str(fields.get("token", "")))
        except (KeyError, TypeError, AttributeError):
            return None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, other: "ClientEnvironment") -> list[str]:
        """Describe the differences from another environment: `SLURM_CONF is /a, not /b`."""
        found = [
            f"{name} is {self.variables.get(name, 'unset')}, not {other.variables.get(name, 'unset')}"
            for name in NAMES
            if self.variables.get(name) != other.variables.get(name)
        ]
        if self.sbatch != other.sbatch:
            found.append(f"sbatch is {self.sbatch or 'not on PATH'}, not {other.sbatch or 'missing from PATH'}")
        return [*found, f"{TOKEN} is different"] if self.token != other.token else found

    def can_replace(self, other: "ClientEnvironment") -> bool:
        """Return whether taking over this environment would have an effect. A token cannot be taken over."""
        return (self.variables, self.sbatch) != (other.variables, other.sbatch)

    def build_environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return `environ` with these variables replacing its own."""
        changed = {name: value for name, value in environ.items() if name not in NAMES} | self.variables
        folder = os.path.dirname(self.sbatch)
        if folder and _sbatch(environ) != self.sbatch and os.access(self.sbatch, os.X_OK):
            changed["PATH"] = os.pathsep.join([folder, environ.get("PATH", os.defpath)])
        return changed

    def take_over(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Apply these variables to this process."""
        changed = self.build_environ(environ)
        for name in NAMES:
            environ.pop(name, None)
        environ.update({name: changed[name] for name in (*NAMES, "PATH") if name in changed})


def _sbatch(environ: Mapping[str, str]) -> str:
    import shutil  # `orch status` only reads records and needs no PATH search

    return shutil.which("sbatch", path=environ.get("PATH", os.defpath)) or ""
