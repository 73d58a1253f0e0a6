"""Variables of the submitting shell that a job sees: a short allow-list, so that no secret leaks into jobs.

A run must not depend on the shell that started a controller, so the variables of its submitter's shell are
recorded with the run, and every attempt gets them. A job gets variables that identify the user, find programs,
libraries and images, and make `module` work; everything else comes from `env` in the run's configuration (passed in a
file, never on a command line), from the templates, or from the node. `SBATCH_*`, `SRUN_*` and most of `SLURM_*` are
left out because they silently override the script: a controller inside a job would pass on its own job's shape.
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
OF_RUNTIMES = frozenset({"SCRATCH", "SQUASH_DIR", "EDF_PATH", "EDF_IMAGESTORE"})
"""Variables with which container runtimes find environments and images on a node. A container may not have them."""
_PREFIXES = ("LC_", "LMOD_", "__LMOD_", "ORCH_", "BASH_FUNC_module", "BASH_FUNC_ml", "BASH_FUNC__module_raw")

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|AUTH|JWT", re.IGNORECASE)
"""Names that suggest a secret; such variables are never recorded."""
_UTF8 = {"PYTHONUTF8": "1"}  # file names have the same bytes in every locale
_OF_THE_CONTROLLER = frozenset({"SLURM_CONF", "SLURM_CLUSTERS"})
"""Variables that select a Slurm. Jobs must go to the Slurm that the controller queries."""


def passes(name: str) -> bool:
    """Return whether a job sees this variable of the submitting process."""
    return name in _NAMES or name in OF_RUNTIMES or name.startswith(_PREFIXES)


def is_always_passed(name: str) -> bool:
    """Return whether every job has this variable, so that it needs no configuration key."""
    return name in _NAMES and not SECRET.search(name)


def filter_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of `environ` that a job sees."""
    return {name: value for name, value in environ.items() if passes(name)}


@functools.cache
def package_root() -> str:
    """Return the folder of orch's packages if the interpreter would not find them (a source tree), else ""."""
    root = Path(trainer.__path__[0]).resolve().parent
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    return "" if root in installed else str(root)


def is_recorded(name: str) -> bool:
    """Return whether a run records its submitter's value. For other variables, a job sees the controller's value."""
    return passes(name) and name not in _OF_THE_CONTROLLER and not SECRET.search(name)


@dataclass(frozen=True, kw_only=True)
class Submitter:
    """Interpreter and variables of the process that submitted a run, used by all its attempts."""

    python: str
    package_root: str
    variables: dict[str, str] | None = field(repr=False)  # None: not recorded; this process's are used

    @classmethod
    def from_current_process(cls) -> Self:
        """Return this process's values, as a substitute for an unknown submitter."""
        return cls(python=sys.executable, package_root=package_root(), variables=None)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Return this process's values, limited to recorded variables."""
        kept = {name: value for name, value in sorted(environ.items()) if is_recorded(name) and _is_text(value)}
        return cls(python=sys.executable, package_root=package_root(), variables=kept)

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any]) -> Self:
        """Return the submitter recorded in a run's identity, or this process's values for runs of older versions."""
        kept: Any = identity.get("job")
        try:
            python, root, variables = kept["python"], kept["package_root"], kept["variables"]
            return cls(
                python=str(python), package_root=str(root), variables={str(k): str(variables[k]) for k in variables}
            )
        except (KeyError, TypeError):
            return cls.from_current_process()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def environ(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return the job's environment if a process with the variables `own` submits it."""
        if self.variables is None:
            return filter_environ(own) | _UTF8
        return (
            {name: value for name, value in filter_environ(own).items() if not is_recorded(name)}
            | self.variables
            | _UTF8
        )


def _is_text(value: str) -> bool:
    """Return whether the value can be stored: non-UTF-8 bytes appear as lone surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in value)
