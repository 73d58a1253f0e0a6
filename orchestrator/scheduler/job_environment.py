"""Which variables of the submitting shell a job sees: a short allow-list, so that no secret leaks into jobs.

A run must not depend on the shell it was submitted from: its later attempts are submitted by a controller that started
in another one. So a job gets what identifies the user, what finds programs and libraries, and what makes `module` work;
everything else comes from `env` in the run's configuration (by file, never on a command line), from the templates, or
from the node. `SBATCH_*`, `SRUN_*` and most of `SLURM_*` are left out because they silently override the script: a
controller that itself runs inside a job would pass its own job's shape on.
"""

import sysconfig
from collections.abc import Mapping
from pathlib import Path

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


def passes(name: str) -> bool:
    """Whether a job sees this variable of the submitting process."""
    return name in _NAMES or name.startswith(_PREFIXES)


def allowed(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of `environ` that a job sees."""
    return {name: value for name, value in environ.items() if passes(name)}


def package_root() -> str:
    """The folder of our packages when the interpreter does not find them by itself (a source tree), else ""."""
    root = Path(trainer.__path__[0]).resolve().parent
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    return "" if root in installed else str(root)
