"""Which variables of the submitting shell a job sees: a short allow-list, so that no secret leaks into jobs.

A run must not depend on the shell in which a controller happened to start: what its submitter's shell had is recorded
with the run, and every attempt gets it. So a job gets what identifies the user, what finds programs and libraries, and
what makes `module` work; everything else comes from `env` in the run's configuration (by file, never on a command
line), from the templates, or from the node. `SBATCH_*`, `SRUN_*` and most of `SLURM_*` are left out because they
silently override the script: a controller that itself runs inside a job would pass its own job's shape on.
"""

import functools
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import trainer

_NAMES = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "MANPATH",
        "MODULEPATH", "MODULEPATH_ROOT", "MODULESHOME", "BASH_ENV", "SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT",
        "VIRTUAL_ENV", "CONDA_EXE", "CONDA_PYTHON_EXE", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_SHLVL",
        "ENROOT_CONFIG_PATH", "APPTAINER_CACHEDIR", "SSL_CERT_FILE", "SSL_CERT_DIR",
        "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG",
    }
)  # fmt: skip
_PREFIXES = ("LC_", "LMOD_", "__LMOD_", "ORCH_", "BASH_FUNC_module", "BASH_FUNC_ml", "BASH_FUNC__module_raw")

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|AUTH|JWT", re.IGNORECASE)
"""Names that sound like a secret: never written down."""
_UTF8 = {"PYTHONUTF8": "1"}
"""Names of files have the same bytes everywhere, whatever the locales of the submitter and of a node are."""
_OF_THE_CONTROLLER = frozenset({"SLURM_CONF", "SLURM_CLUSTERS"})
"""Which Slurm is meant: jobs must go to the one where the controller looks for them."""


def passes(name: str) -> bool:
    """Whether a job sees this variable of the submitting process."""
    return name in _NAMES or name.startswith(_PREFIXES)


def is_always_passed(name: str) -> bool:
    """Whether every job has this variable, so that it needs no key of the configuration."""
    return name in _NAMES and not SECRET.search(name)


def allowed(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of `environ` that a job sees."""
    return {name: value for name, value in environ.items() if passes(name)}


@functools.cache
def package_root() -> str:
    """The folder of our packages when the interpreter does not find them by itself (a source tree), else ""."""
    root = Path(trainer.__path__[0]).resolve().parent
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    return "" if root in installed else str(root)


def is_recorded(name: str) -> bool:
    """Whether a run keeps its submitter's value of this variable; for the others a job sees the controller's own."""
    return passes(name) and name not in _OF_THE_CONTROLLER and not SECRET.search(name)


@dataclass(frozen=True, kw_only=True)
class Submitter:
    """The interpreter and the variables of the process that submitted a run: what all its attempts start with."""

    python: str
    package_root: str
    variables: dict[str, str] | None = field(repr=False)  # None: not recorded, those of this process

    @classmethod
    def unrecorded(cls) -> Self:
        """This process in the place of a submitter of whom nothing is known."""
        return cls(python=sys.executable, package_root=package_root(), variables=None)

    @classmethod
    def here(cls, environ: Mapping[str, str]) -> Self:
        """This process, with what of its variables is recorded."""
        kept = {name: value for name, value in sorted(environ.items()) if is_recorded(name) and _is_text(value)}
        return cls(python=sys.executable, package_root=package_root(), variables=kept)

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> Self:
        """As `to_json` has left it in a run's identity; runs of older versions have none."""
        kept: Any = identity.get("job")
        try:
            python, root, variables = kept["python"], kept["package_root"], kept["variables"]
            return cls(
                python=str(python), package_root=str(root), variables={str(k): str(variables[k]) for k in variables}
            )
        except (KeyError, TypeError):
            return cls.unrecorded()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def environ(self, own: Mapping[str, str]) -> dict[str, str]:
        """What a job sees when a process with the variables `own` submits it."""
        if self.variables is None:
            return allowed(own) | _UTF8
        return {name: value for name, value in allowed(own).items() if not is_recorded(name)} | self.variables | _UTF8


def _is_text(value: str) -> bool:
    """Whether it can be written down: bytes that are no UTF-8 come as lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in value)
