"""Slurm generations for the lab: a Debian suite's packages in a private folder, patched to run on this system's files.

Each program gets the loader and the libraries of its own suite, so jobs, tests and orch keep this machine's Python.
"""

import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.debian_suites import cached, run, unpack

MACHINE = "machine"
"""The Slurm that this machine's packages provide."""
SUITES = (MACHINE, "bookworm", "trixie", "forky")
"""A row for each generation: 22.05 is in bookworm, 24.11 in trixie, 26.05 in forky."""
NEWEST = "forky"
"""Suite of the sample that `make test` runs."""
GENERATIONS = (MACHINE, "trixie", "forky")
"""Suites of `make proof`."""
CHOICE = "ORCH_TEST_SLURM"
"""Environment variable with the suites that the Slurm tests run on, separated by commas."""
CASES_ON = "cases on {suite}"
"""Name of the figure that counts a suite's cases in docs/proof.json."""
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurmdbd", "slurm-wlm-mysql-plugin", "patchelf")
CLIENTS = (
    "sacct", "sacctmgr", "salloc", "sbatch", "scancel", "scontrol", "sdiag", "sinfo", "sprio", "squeue", "srun",
    "sshare", "sstat",
)  # fmt: skip
DAEMONS = ("slurmctld", "slurmd", "slurmdbd", "slurmstepd")
RECIPE = 1
"""Number of this recipe; folders of other ones are not used."""


class LabError(RuntimeError):
    """Raised if this machine cannot run the lab, or one of its daemons did not start."""


@dataclass(frozen=True)
class Installation:
    """Places of a Slurm's files; None for the machine's own."""

    programs: Path | None = None
    plugins: Path | None = None

    def settings(self) -> str:
        """Return the lines that slurm.conf and slurmdbd.conf need."""
        return f"PluginDir={self.plugins}\n" if self.plugins else ""

    def step_daemon(self) -> list[str]:
        """Return slurmd's options that name its slurmstepd."""
        return ["-d", str(self.programs / "slurmstepd")] if self.programs else []


def chosen_suites() -> tuple[str, ...]:
    """Return the suites that the environment names, or none."""
    names = tuple(filter(None, os.environ.get(CHOICE, "").split(",")))
    unknown = [name for name in names if name not in SUITES]
    if unknown:
        raise LabError(f"{CHOICE} names {', '.join(unknown)}; the suites are {', '.join(SUITES)}")
    return names


def installation(suite: str) -> Installation:
    """Return the suite's Slurm, downloaded at its first use. Raises SuiteError if that is impossible."""
    if suite == MACHINE:
        return Installation()
    root = cached(f"slurm-{suite}-{RECIPE}", partial(_build, suite))
    return Installation(programs=root / "programs", plugins=_plugins(root))


def _build(suite: str, unfinished: Path, root: Path) -> None:
    unpack(suite, unfinished, *PACKAGES, variant="extract")
    _adapt(unfinished, root)


def _plugins(root: Path) -> Path:
    return next(root.glob("usr/lib/*-linux-gnu/slurm-wlm"))


def _adapt(root: Path, final: Path) -> None:
    """Copy Slurm's programs to `programs`, and set the loader and libraries of the suite, as they are in `final`."""
    plugins = _plugins(root)
    libraries = [plugins.parent, plugins, root / "lib" / plugins.parent.name]
    loader = next(path for folder in libraries for path in folder.glob("ld-linux*.so.?"))
    patch = [str(loader), "--library-path", ":".join(map(str, libraries)), str(root / "usr/bin/patchelf")]
    programs = root / "programs"
    programs.mkdir()
    for name in (*CLIENTS, *DAEMONS):
        # A second name of Debian's is for the alternative that the package would configure.
        places = (root / "usr" / folder / f"{name}{end}" for folder in ("bin", "sbin") for end in ("", "-wlm"))
        shutil.copy(next(place for place in places if place.is_file()), programs / name)
    path = ":".join(str(final / folder.relative_to(root)) for folder in libraries)
    run(*patch, "--force-rpath", "--set-rpath", path, *map(str, [*programs.iterdir(), *plugins.glob("*.so*")]))
    run(*patch, "--set-interpreter", str(final / loader.relative_to(root)), *map(str, programs.iterdir()))
