"""Run identity, for reproducing a run: code, environment and data. It contains no secrets."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from orchestrator.config.run_config import RunConfig
from orchestrator.scheduler.available_schedulers import FACTORIES
from orchestrator.scheduler.job_environment import SECRET, Submitter
from orchestrator.scheduler.slurm.client_environment import RECORDED, ClientEnvironment
from trainer.protocol.config_sections.scheduler_kinds import SLURM
from trainer.protocol.user_code.code_record import CodeFile, CodeRecord, printable
from trainer.protocol.user_code.installed_packages import find_site_folders, read_versions
from trainer.protocol.user_code.record_code import record_named

DIFF_LIMIT = 256 * 1024
"""Maximum size, in bytes, of an uncommitted diff that is kept. The digest covers the whole diff."""
ANSWER_WITHIN = 10.0
_REPOSITORY_VARIABLES = frozenset(
    {
        "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE",
        "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_PREFIX",
    }
)  # fmt: skip
_ROOT = Path(__file__).resolve().parents[2]
_VARIABLES = re.compile(r"(NCCL|CUDA|TORCH|PYTORCH|OMP|MKL|GLOO|UCX|FI|TRITON)_[A-Z0-9_]+|LD_LIBRARY_PATH|PYTHONPATH")


def identify(
    config: RunConfig, kind: str, *, data: dict[str, Any], environ: Mapping[str, str] = os.environ,
    imported: CodeRecord | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the identity of a run about to be submitted, as plain JSON."""
    return {
        "code": code(config, imported=imported),
        "env": environment(kind, environ),
        "job": Submitter.from_environ(environ).to_json(),
        "data": data,
        "submit_dir": os.getcwd(),
        **client(kind, environ),
    }


def client(kind: str, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the settings that select a Slurm cluster, so that any controller can continue the run there."""
    return {RECORDED: ClientEnvironment.from_environ(environ).to_json()} if FACTORIES[kind].named_by_environment else {}


def code(config: RunConfig, folder: Path | None = None, imported: CodeRecord | None = None) -> dict[str, Any]:
    """Return orch's version and digest, the user's files, and the git commit of each user folder or script.

    `folder` is the base of relative script paths, by default this process's folder. `imported` is the record of the
    imported modules; without it, the imports in the workload's source are followed.
    """
    base = folder or Path()
    places = [Path(place).expanduser() for place in config.workload.path]
    places += [Path(word) for word in config.command if word.endswith(".py") and (base / word).is_file()]
    ours = [_ROOT / package for package in ("trainer", "checkpointing")]
    record = None if config.trains_built_in_workload else imported or record_named(config, base)
    return {
        "orch": {"version": _version("orch"), "sha256": digest(ours)},
        "user": [{**_place(base / place), "path": str(place)} for place in places],
        "files": None if record is None else record.to_json(),
    }


def _place(place: Path) -> dict[str, Any]:
    """Return the git commit of a folder or file, and its uncommitted changes."""
    folder = place if place.is_dir() else place.parent
    sha = _git(folder, "rev-parse", "HEAD")
    if sha is None:
        return {"path": str(place)}
    diff = _git(folder, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", "--", ".")
    # Without -z, git quotes non-ASCII names, and such files would not be found.
    listed = _git(folder, "ls-files", "-z", "--others", "--exclude-standard", "--", ".")
    untracked = [name for name in (listed or "").split("\0") if name]
    found: dict[str, Any] = {"path": str(place), "git": sha.strip(), "dirty": bool((diff or "").strip() or untracked)}
    silent = [name for name, answer in (("git diff", diff), ("git ls-files", listed)) if answer is None]
    if silent:
        found["dirty"] = found["dirty"] or None
        found["dirty_reason"] = f"{' and '.join(silent)} failed, or took longer than {ANSWER_WITHIN:.0f} s"
    if diff and diff.strip():
        found["diff"] = printable(diff[:DIFF_LIMIT])
        found["diff_sha256"] = hashlib.sha256(diff.encode(errors="surrogateescape")).hexdigest()
    if untracked:
        found["untracked"] = [printable(name) for name in untracked[:1000]]
    return found


def _git(folder: Path, *arguments: str) -> str | None:
    """Return git's output for this folder's repository, ignoring a repository selected by a hook or shell."""
    environ = {name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES}
    return _answer(["git", "-C", str(folder), *arguments], environ)


def digest(places: Iterable[Path]) -> str:
    """Return the SHA-256 of the names and contents of all source files below `places`, in a fixed order."""
    total = hashlib.sha256()
    for place in places:
        for path in _files(place):
            total.update(f"{path.relative_to(place)}\0{CodeFile.read(path).sha256}\0".encode())
    return total.hexdigest()


def _files(place: Path) -> list[Path]:
    found: list[Path] = []
    for folder, below, names in os.walk(place):
        below[:] = sorted(name for name in below if name != "__pycache__")
        found += [Path(folder) / name for name in sorted(names)]
    return [path for path in found if path.is_file()]


def environment(kind: str, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the interpreter, packages, driver, selected variables, and the versions of Slurm and torch.

    Torch is not imported to get its version.
    """
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "torch": _version("torch"),
        "packages": packages(),
        "slurm": (_answer(["sbatch", "--version"]) or "").strip() or None if kind == SLURM else None,
        "driver": _driver(),
        "variables": variables(environ),
    }


def packages() -> dict[str, str]:
    """Return each installed distribution with its version, in the format of job records."""
    return read_versions(find_site_folders(sys.path)) or {}


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that affect a job's computation, except those whose names suggest a secret."""
    return {
        name: value for name, value in sorted(environ.items()) if _VARIABLES.fullmatch(name) and not SECRET.search(name)
    }


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    output = _answer(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return printable(output.splitlines()[0].strip()) if output and output.strip() else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _answer(command: list[str], environ: Mapping[str, str] | None = None) -> str | None:
    """Return a command's output, or None if it fails, is missing or times out."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=ANSWER_WITHIN,
            check=False,
            env=environ,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
