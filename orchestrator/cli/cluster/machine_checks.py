"""Checks of this machine for `orch doctor`: Python, packages, compiler, folders, registry."""

import os
import secrets
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from checkpointing.storage.trusted_path import weakness
from orchestrator.cli.terminal.render import size
from orchestrator.errors import RegistryError
from orchestrator.home import registry_path, state_home

OK, INFO, WARN, FAIL = "ok", "info", "warn", "fail"
NEEDED = {
    "torch": "2.12", "click": "8.2.1", "sqlalchemy": "2.0", "omegaconf": "2.3.1",
    "submitit": "1.5.3", "fsspec": "", "xxhash": "", "psutil": "", "setproctitle": "", "jinja2": "", "ClusterShell": "",
    "rich": "",
}  # fmt: skip
_LITTLE = 5 * 1024**3


@dataclass(frozen=True)
class Check:
    """Result of a check. `fail` must be fixed before runs can continue; `warn` is worth knowing."""

    name: str
    level: str
    text: str
    hint: str = ""


def machine(root: Path | None) -> Iterator[Check]:
    """Run every check that does not need Slurm."""
    yield python()
    yield from packages()
    yield compiler()
    home = state_folder()
    yield home
    if home.level != FAIL:
        yield from registry(registry_path())
    yield from run_folder(root)


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    text = ".".join(map(str, version))
    if version < (3, 11):
        return Check("python", FAIL, f"Python {text} is too old", "use Python 3.11 or newer")
    return Check("python", OK, f"Python {text}")


def packages() -> Iterator[Check]:
    """Check installed versions by their metadata, without importing anything, in particular torch."""
    missing, found = [], {}
    for name, least in NEEDED.items():
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if least and _numbers(found[name]) < _numbers(least):
            yield Check(name, FAIL, f"{name} {found[name]} is older than {least}", f"pip install '{name}>={least}'")
    if missing:
        yield Check("packages", FAIL, f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    if "torch" in found:
        yield Check("torch", OK, f"torch {found['torch']}")


def compiler(headers: Path | None = None) -> Check:
    """Check for the requirements of `train.compile` on nodes: a C++ compiler and the headers of this Python."""
    word = os.environ.get("CXX", "g++")
    file = (headers or Path(sysconfig.get_path("include"))) / "Python.h"
    if shutil.which(word) is None:
        why, hint = f"there is no {word}", "install it on the nodes: apt-get install g++, dnf install gcc-c++"
    elif not file.exists():
        why, hint = (
            f"there is no {file}",
            "install it on the nodes: apt-get install python3-dev, dnf install python3-devel",
        )
    else:
        return Check("compiler", OK, f"{word} and Python.h, for train.compile")
    return Check("compiler", INFO, f"train.compile=true would fail here: {why}", hint)


def _numbers(version: str) -> tuple[int, ...]:
    public = version.partition("+")[0]
    return tuple(int(part) for part in public.split(".") if part.isdigit())


def state_folder() -> Check:
    """Check that `ORCH_HOME` can be written, or created."""
    hint = "set ORCH_HOME to a folder that you may write"
    try:
        home = state_home()
    except OSError as error:
        return Check("state", FAIL, f"{error.filename}: {error.strerror}", hint)
    there = _nearest(home)
    try:
        _write_and_rename(there)
    except OSError as error:
        what = "written" if there == home else f"made in {there}"
        return Check("state", FAIL, f"state folder {home} cannot be {what}: {error.strerror}", hint)
    if there != home:
        return Check("state", OK, f"state folder {home}; it will be made")
    if home.stat().st_mode & 0o077:
        return Check("state", WARN, f"{home} is open to others", f"chmod 700 {home}")
    return Check("state", OK, f"state folder {home}")


def registry(path: Path) -> Iterator[Check]:
    """Check the registry's file system, the journal mode that is safe there, and its version."""
    from orchestrator.registry import file_systems, versions

    try:
        place = _nearest(path.absolute().parent) / path.name
        mount = file_systems.find_mount(place.parent)
        journal = file_systems.choose_journal_mode(place, mount)
        version = versions.read_version(path)
        versions.require_known(version, path)
    except RegistryError as error:
        yield Check("registry", FAIL, error.what, error.hint)
        return
    except OSError as error:
        yield Check("registry", FAIL, f"{path}: {error.strerror}", "set ORCH_REGISTRY to a file on a local disk")
        return
    kind = mount.kind if mount else "unknown"
    what = "not made yet" if version is None else f"version {version}"
    if journal == "wal":
        yield Check("registry", OK, f"registry {path} ({kind}, {what}, write-ahead log)")
    else:
        text = f"registry {path} is on {kind} ({what}), which all hosts share: the slower rollback journal is used"
        yield Check("registry", WARN, text, "a local disk is faster: ORCH_REGISTRY=/local/disk/registry.db")


def run_folder(root: Path | None) -> Iterator[Check]:
    """Check that the folder of all runs is writable, supports rename, and has free space."""
    if root is None:
        yield Check("root", INFO, "no folder for runs was checked", "orch doctor --root FOLDER")
        return
    there = _nearest(root)
    try:
        _write_and_rename(there)
    except OSError as error:
        hint = "choose a folder that you may write: cluster.root=FOLDER"
        yield Check("root", FAIL, f"run folder {root} cannot be written: {error.strerror} ({there})", hint)
        return
    disk, inodes = shutil.disk_usage(there), os.statvfs(there)
    text = f"run folder {root} ({_kind(there)}, {size(disk.free)} free)"
    yield Check("root", OK, text if there == root else f"{text}; it will be made")
    if weak := weakness(there):
        hint = weak.closing() or "cluster.shared_root=true uses it anyway, or cluster.root=FOLDER names another"
        yield Check("root", WARN, f"`orch submit` refuses this folder: {weak}", hint)
    if disk.free < _LITTLE:
        yield Check(
            "root",
            WARN,
            f"only {size(disk.free)} free for checkpoints",
            "free some space, or cluster.root=FOLDER on another disk",
        )
    if inodes.f_files and inodes.f_ffree < inodes.f_files * 0.02:
        yield Check(
            "root",
            WARN,
            f"only {inodes.f_ffree} of {inodes.f_files} inodes are free",
            "remove small files, or set checkpoint.files=node, which writes fewer",
        )


def is_local(root: Path) -> bool:
    """Return whether the folder is on a file system that other hosts cannot see."""
    from orchestrator.registry.file_systems import find_mount

    mount = find_mount(_nearest(root))
    return mount is not None and mount.is_local


def _kind(path: Path) -> str:
    from orchestrator.registry.file_systems import find_mount

    mount = find_mount(path)
    return mount.kind if mount else "unknown file system"


def _nearest(path: Path) -> Path:
    """Return the path, or its nearest ancestor that exists."""
    path = path.expanduser().absolute()
    while not os.path.exists(path):  # an inaccessible one counts as missing
        path = path.parent
    return path


def _write_and_rename(folder: Path) -> None:
    """Try the operations of every commit: write, fsync, rename, read under the new name. Cleans up; raises OSError."""
    if not folder.is_dir():
        raise NotADirectoryError(20, "is not a folder", str(folder))
    first = folder / f".orch-probe-{secrets.token_hex(6)}"
    second = first.with_name(first.name + "-renamed")
    try:
        with first.open("xb") as stream:
            stream.write(b"probe")
            stream.flush()
            os.fsync(stream.fileno())
        first.rename(second)
        if second.read_bytes() != b"probe":
            raise OSError(5, "a renamed file does not hold what was written", str(second))
    finally:
        first.unlink(missing_ok=True)
        second.unlink(missing_ok=True)
