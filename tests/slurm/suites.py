"""Slurm generations for the lab: a Debian suite's packages in a private folder, patched to run on this system's files.

Each program gets the loader and the libraries of its own suite, so jobs, tests and orch keep this machine's Python.
"""

import fcntl
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

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
    """Return the suite's Slurm, downloaded at its first use. Raises LabError if that is impossible."""
    if suite == MACHINE:
        return Installation()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orch-tests"
    cache.mkdir(parents=True, exist_ok=True)
    root = cache / f"slurm-{suite}-{RECIPE}"
    with (cache / f"slurm-{suite}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of one test run need it at the same time
        if not root.exists():
            _build(suite, root)
    return Installation(programs=root / "programs", plugins=_plugins(root))


def _build(suite: str, root: Path) -> None:
    unfinished = root.with_name(f"{root.name}.{os.getpid()}")
    try:
        _download(suite, unfinished)
        _adapt(unfinished, root)
        unfinished.rename(root)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _download(suite: str, root: Path) -> None:
    if shutil.which("mmdebstrap") is None:
        install("mmdebstrap")
    listed = _run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages").split()
    mirror = next((address for address in listed if "security" not in address), "")
    if not mirror:
        raise LabError("no Slurm lab: apt-get names no mirror of Debian")
    _run(
        "mmdebstrap", "--quiet", "--variant=extract", f"--include={','.join(PACKAGES)}",
        "--keyring=/usr/share/keyrings", '--aptopt=APT::Install-Recommends "false"',
        '--aptopt=Acquire::Check-Valid-Until "false"', suite, str(root), mirror,
    )  # fmt: skip


def install(*packages: str) -> None:
    """Install packages on this machine. Raises LabError if that is impossible."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise LabError(f"no Slurm lab: {', '.join(packages)} missing, and only root with apt-get can install it")
    environ = {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    _run("apt-get", "update", "-q", **environ)
    _run(
        "apt-get",
        "install",
        "-q",
        "-y",
        "--no-install-recommends",
        "-o",
        "DPkg::Lock::Timeout=120",
        *packages,
        **environ,
    )


def _run(*command: str, **environ: str) -> str:
    done = subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode != 0:
        raise LabError(f"no Slurm lab: {' '.join(command)} failed: {done.stderr.strip()[-300:]}")
    return done.stdout


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
    _run(*patch, "--force-rpath", "--set-rpath", path, *map(str, [*programs.iterdir(), *plugins.glob("*.so*")]))
    _run(*patch, "--set-interpreter", str(final / loader.relative_to(root)), *map(str, programs.iterdir()))
