"""Programs of other Debian suites in private root folders, downloaded once into ~/.cache/orch-tests."""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path


class SuiteError(RuntimeError):
    """Raised if this machine cannot install packages."""


def cached(name: str, build: Callable[[Path, Path], None]) -> Path:
    """Return a folder of the cache. At its first use, `build` fills an unfinished folder that is then renamed to it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orch-tests"
    cache.mkdir(parents=True, exist_ok=True)
    final = cache / name
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of one test run need it at the same time
        if not final.exists():
            unfinished = final.with_name(f"{name}.{os.getpid()}")
            try:
                build(unfinished, final)
                unfinished.rename(final)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return final


def unpack(suite: str, root: Path, *packages: str, variant: str) -> None:
    """Create a root folder with these packages; `variant` is mmdebstrap's. Raises SuiteError if that is impossible."""
    if shutil.which("mmdebstrap") is None:
        install("mmdebstrap")
    listed = run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages").split()
    mirror = next((address for address in listed if "security" not in address), "")
    if not mirror:
        raise SuiteError("apt-get names no mirror of Debian")
    run(
        "mmdebstrap", "--quiet", f"--variant={variant}", f"--include={','.join(packages)}",
        "--keyring=/usr/share/keyrings", '--aptopt=APT::Install-Recommends "false"',
        '--aptopt=Acquire::Check-Valid-Until "false"', suite, str(root), mirror,
    )  # fmt: skip


def install(*packages: str) -> None:
    """Install packages on this machine. Raises SuiteError if that is impossible."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SuiteError(f"{', '.join(packages)} missing, and only root with apt-get can install it")
    environ = {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    run("apt-get", "update", "-q", **environ)
    options = ("-q", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=120")
    run("apt-get", "install", *options, *packages, **environ)


def run(*command: str, seconds: float = 600, **environ: str) -> str:
    """Return a command's output. Raises SuiteError if it fails."""
    done = subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=seconds, check=False
    )
    if done.returncode != 0:
        raise SuiteError(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")
    return done.stdout
