"""What it takes to reproduce a run: its code, its environment, its data. Never a secret."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import Any

from orchestrator.config.run_config import RunConfig
from orchestrator.scheduler.available_schedulers import FACTORIES
from orchestrator.scheduler.job_environment import SECRET, Submitter
from orchestrator.scheduler.slurm.client_environment import RECORDED, ClientEnvironment
from orchestrator.submission.imported_files import imported_names
from trainer.contract.config_sections.scheduler_kinds import SLURM

DIFF_LIMIT = 256 * 1024
"""Bytes of a dirty diff that are kept; its digest always covers all of it."""
FILES_LIMIT = 20_000
"""Files of a folder without git that are hashed at most."""
BYTES_LIMIT = 256 * 1024 * 1024
"""Bytes of them that are read; of files beyond that, name, size and time of change stand for the content."""
FILES_NAMED = 300
"""Files whose digests are kept one by one, so that the one that differs can be named."""
ANSWER_WITHIN = 10.0
_ROOT = Path(__file__).resolve().parents[2]
_VARIABLES = re.compile(r"(NCCL|CUDA|TORCH|PYTORCH|OMP|MKL|GLOO|UCX|FI|TRITON)_[A-Z0-9_]+|LD_LIBRARY_PATH|PYTHONPATH")
_LEFT_OUT = {"__pycache__", ".git", ".venv", "venv", "node_modules", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


def identify(
    config: RunConfig, kind: str, *, data: dict[str, Any], environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """The identity of a run that is about to be submitted, as plain JSON."""
    return {
        "code": code(config),
        "env": environment(kind, environ),
        "job": Submitter.here(environ).to_json(),
        "data": data,
        "submit_dir": os.getcwd(),
        **client(kind, environ),
    }


def client(kind: str, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What says which Slurm was meant, for a run that goes there: a controller without it can go on with it."""
    return {RECORDED: ClientEnvironment.here(environ).to_json()} if FACTORIES[kind].named_by_environment else {}


def code(config: RunConfig, folder: Path | None = None) -> dict[str, Any]:
    """orch's own version and content, and every folder or script of the user's.

    `folder`: where the run was submitted, from which scripts are meant; this process's by default.
    """
    beside = folder or Path()
    places = [Path(place).expanduser() for place in config.workload.path]
    places += [Path(word) for word in config.command if word.endswith(".py") and (beside / word).is_file()]
    module = "" if config.command else config.workload.target.partition(":")[0]
    names = imported_names([beside / place for place in places], module) if module and places else None
    imported = {} if names is None else {"imported": names}
    ours = [_ROOT / package for package in ("trainer", "checkpointing")]
    return {
        "orch": {"version": _version("orch"), "sha256": digest(ours)},
        "user": [{**_place(beside / place), "path": str(place), **imported} for place in places],
    }


def _place(place: Path) -> dict[str, Any]:
    """One folder or file: git's word where there is git, else the digest of its content."""
    folder = place if place.is_dir() else place.parent
    sha = _git(folder, "rev-parse", "HEAD")
    if sha is None:
        contents = list(_contents([place]))
        return {"path": str(place), "sha256": _digest_of(contents)} | _named(contents, "files")
    diff = _git(folder, "diff", "HEAD", "--binary", "--", ".")
    # -z: without it git quotes names that are not ASCII, and no such file is found.
    listed = _git(folder, "ls-files", "-z", "--others", "--exclude-standard", "--", ".")
    untracked = [name for name in (listed or "").split("\0") if name]
    found: dict[str, Any] = {"path": str(place), "git": sha.strip(), "dirty": bool((diff or "").strip() or untracked)}
    silent = [name for name, answer in (("git diff", diff), ("git ls-files", listed)) if answer is None]
    if silent:
        found["dirty"] = found["dirty"] or None
        found["dirty_reason"] = f"{' and '.join(silent)} failed, or took longer than {ANSWER_WITHIN:.0f} s"
    if diff and diff.strip():
        found["diff"] = _printable(diff[:DIFF_LIMIT])
        found["diff_sha256"] = hashlib.sha256(diff.encode(errors="surrogateescape")).hexdigest()
    if untracked:
        found["untracked"] = [_printable(name) for name in untracked[:1000]]
        contents = list(_contents((folder / name for name in untracked), folder))
        found |= {"untracked_sha256": _digest_of(contents)} | _named(contents, "untracked_files")
    return found


def _named(contents: Sequence[tuple[str, str]], key: str) -> dict[str, Any]:
    """The beginning of each file's digest, by its name; nothing where there are too many files to name."""
    if len(contents) > FILES_NAMED:
        return {}
    return {key: {_printable(name): content[:16] if content.isalnum() else content for name, content in contents}}


def _printable(name: str) -> str:
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _git(folder: Path, *arguments: str) -> str | None:
    return _answer(["git", "-C", str(folder), *arguments])


def digest(places: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of all source files below `places`, in a fixed order.

    Of what lies beyond `BYTES_LIMIT`, sizes and times of change stand for the contents.
    """
    return _digest_of(_contents(places))


def _digest_of(contents: Iterable[tuple[str, str]]) -> str:
    total = hashlib.sha256()
    for name, content in contents:
        total.update(f"{name}\0{content}\0".encode(errors="surrogateescape"))
    return total.hexdigest()


def _contents(places: Iterable[Path], folder: Path | None = None) -> Iterator[tuple[str, str]]:
    """Name and digest of each file; names are those below `folder`, by default below the file's own place."""
    left = BYTES_LIMIT
    for place in places:
        for path in _files(place):
            try:
                status = path.stat()
                if status.st_size <= left:
                    left -= status.st_size
                    content = _content(path)
                else:
                    content = f"size {status.st_size} mtime {status.st_mtime_ns}"
            except OSError as error:
                content = f"unreadable: {error.strerror}"
            name = path.relative_to(folder or place) if folder or path != place else Path(path.name)
            yield str(name), content


def _content(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    found: list[Path] = []
    for folder, below, names in os.walk(place):
        below[:] = sorted(name for name in below if name not in _LEFT_OUT)
        found += [Path(folder) / name for name in sorted(names) if not name.endswith(".pyc")]
        if len(found) > FILES_LIMIT:
            break
    return [path for path in found[:FILES_LIMIT] if path.is_file()]


def environment(kind: str, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Interpreter, packages, Slurm, driver and a short list of variables; torch is asked for, not imported."""
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
    """Every installed distribution with its version; of two with one name the first on the path is what is imported."""
    found: dict[str, str] = {}
    for name, version in map(_name_and_version, metadata.distributions()):
        if name and version:
            found.setdefault(name, version)
    return dict(sorted(found.items()))


def _name_and_version(distribution: metadata.Distribution) -> tuple[str | None, str | None]:
    """From its headers alone: the text below them is long, and `Distribution` would parse it for each word."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    headers = HeaderParser().parsestr(text.partition("\n\n")[0])
    return headers["Name"], headers["Version"]


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that change how a job computes; names that sound like a secret are left out."""
    return {
        name: value for name, value in sorted(environ.items()) if _VARIABLES.fullmatch(name) and not SECRET.search(name)
    }


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    said = _answer(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return _printable(said.splitlines()[0].strip()) if said and said.strip() else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _answer(command: list[str]) -> str | None:
    """What a command prints; None when it fails, is missing or does not answer in time."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="surrogateescape", timeout=ANSWER_WITHIN, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
