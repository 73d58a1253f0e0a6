"""A run's tiers, the check on them before a run is submitted, and Lustre striping.

`python -P -m checkpointing.tiers.tier ANSWER` reads `{tiers: [path ...]}` from stdin. It writes one JSON object per
line to the descriptor ANSWER: `trying` before each tier, `refused` (tier, reason, remedy) for an unusable tier, and
finally `done`.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, TextIO

from checkpointing.config import RUN, CheckpointConfig, TierConfig
from checkpointing.errors import TierUnavailable
from checkpointing.storage.backends import LocalStorage, Storage, open_storage, without_secrets
from checkpointing.storage.durable import make_folder
from checkpointing.tiers.catalog import Catalog

_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")


@dataclass(frozen=True)
class ResolvedTier:
    """A tier as seen from this node.

    `path` is the absolute path or URL of the checkpoints, as given in events and verdicts; `catalog.place` is the path
    by which this process and its writer access them.
    """

    path: str
    storage: Storage
    catalog: Catalog
    every: int = 0
    keep: int = 3
    shared: bool = True
    bandwidth: float = 0.0  # MiB/s that each rank may write; 0 means no limit
    stripes: int = 0  # Lustre stripe count for a new checkpoint's folder; 0 means the site's default


@dataclass(frozen=True)
class RunTiers:
    """All of a run's tiers, fastest first.

    `pins` is the storage of the run's own folder, which holds pins and verdicts.
    """

    tiers: tuple[ResolvedTier, ...]
    pins: Storage

    @classmethod
    def single(cls, root: Path | str, storage: Storage | None = None, keep: int = 3) -> "RunTiers":
        """Return the folder `root` as the only tier, in `storage` or in the default storage for its path."""
        path = str(root) if "://" in str(root) else str(Path(root).absolute())
        storage = storage if storage is not None else open_storage(path)
        catalog = Catalog(Path(root), storage)
        return cls((ResolvedTier(path=path, storage=storage, catalog=catalog, keep=keep),), storage)


def resolve_tiers(
    config: CheckpointConfig, run_checkpoints: Path, run_name: str, node_name: str, known_as: Path | None = None
) -> tuple[ResolvedTier, ...]:
    """Return the configured tiers in order, or just the run's own folder if none is configured.

    Raises the same errors as `resolve_tier`. A relative path is resolved from the run's folder, not from the current
    directory. If `run_checkpoints` is under an alias of that folder, `known_as` is the folder's own path.
    """
    tiers = config.tiers or (TierConfig(keep=config.keep),)
    return tuple(resolve_tier(tier, run_checkpoints, run_name, node_name, known_as) for tier in tiers)


def resolve_tier(
    tier: TierConfig, run_checkpoints: Path, run_name: str, node_name: str, known_as: Path | None = None
) -> ResolvedTier:
    """Resolve one tier, without creating its folder.

    Raises ValueError for a name that cannot be a folder, TierUnavailable if the library for a URL is missing.
    """
    for name in (run_name, node_name):
        if not _FOLDER.fullmatch(name):
            raise ValueError(f"checkpoint.tiers: {name!r} cannot be the name of a folder")
    opened = path = _root(tier, run_checkpoints, run_name, node_name)
    if known_as is not None:
        path = _root(tier, known_as / run_checkpoints.name, run_name, node_name)
    try:
        storage = open_storage(opened)
    except ImportError as error:
        raise TierUnavailable(f"checkpoint.tiers: {tier.path} needs a library that is missing: {error}") from error
    return ResolvedTier(
        path=path,
        storage=storage,
        catalog=Catalog(opened, storage),
        every=tier.every,
        keep=tier.keep,
        shared=tier.shared,
        bandwidth=tier.bandwidth,
        stripes=tier.stripes,
    )


def _root(tier: TierConfig, run_checkpoints: Path, run_name: str, node_name: str) -> str:
    if tier.path == RUN:
        if not tier.shared:
            raise ValueError("checkpoint.tiers: `run` is the run's own, shared folder; leave `shared` out")
        return str(run_checkpoints.absolute())
    if "://" in tier.path:
        return f"{tier.path.rstrip('/')}/{run_name}"
    try:
        folder = run_checkpoints.absolute().parent / Path(tier.path).expanduser() / run_name
    except RuntimeError as error:  # the home directory is unknown
        raise ValueError(f"checkpoint.tiers: {tier.path}: {error}; give the full path") from error
    return str(folder if tier.shared else folder / node_name)


def absent_paths(tiers: Iterable[ResolvedTier]) -> list[str]:
    """Return the paths of shared tiers whose folder does not exist, for example because it is not mounted."""
    return [
        tier.path
        for tier in tiers
        if tier.shared and isinstance(tier.storage, LocalStorage) and not tier.storage.root.exists()
    ]


def one_folder(tiers: Sequence[ResolvedTier]) -> tuple[str, str] | None:
    """Return the paths of two tiers that a link or a mount makes the same folder. They need not exist yet."""
    known: dict[tuple[int, int, Path], str] = {}
    for tier in tiers:
        place = _identity(tier.storage.root) if isinstance(tier.storage, LocalStorage) else None
        if place is None:
            continue
        if place in known:
            return known[place], tier.path
        known[place] = tier.path
    return None


def _identity(folder: Path) -> tuple[int, int, Path] | None:
    """Return the device and inode of the nearest existing folder, and the path still to be created under it."""
    for place in (folder, *folder.parents):
        with suppress(OSError):
            found = place.stat()
            return found.st_dev, found.st_ino, folder.relative_to(place)
    return None


MOUNTS = Path("/proc/self/mounts")
_SECONDS = 20.0


def make_striped_folder(place: ResolvedTier, name: str, mounts: Path = MOUNTS) -> str | None:
    """Create a checkpoint's folder with the tier's stripe count, before any file is written into it.

    Called once, by one rank. Unless the tier is on Lustre and `lfs` is installed, it does nothing, and the folder is
    created with its first file. Returns a warning if `lfs` failed, in which case the checkpoint has the site's default
    striping.
    """
    storage = place.storage
    lfs = shutil.which("lfs") if place.stripes and isinstance(storage, LocalStorage) else None
    if lfs is None or not isinstance(storage, LocalStorage) or not on_lustre(storage.root, mounts):
        return None
    folder = storage.root / name
    make_folder(folder)
    return _set_stripes(lfs, folder, place.stripes)


def _set_stripes(lfs: str, folder: Path, count: int) -> str | None:
    command = [lfs, "setstripe", "-c", str(count), str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}"
    if done.returncode:
        return f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip() or done.stdout.strip()}"
    return None


def on_lustre(folder: Path, mounts: Path = MOUNTS) -> bool:
    """Return whether a folder, existing or not, is on Lustre according to the mount table.

    Returns False if the table is unreadable.
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    table = [fields for line in lines if len(fields := line.split()) >= 3]
    place = Path(os.path.realpath(folder))
    above = [(Path(_unescape(point)), kind) for _, point, kind, *_ in table]
    # The longest mount point wins; for two mounts at the same point, the later one.
    covering = [(len(point.parts), at, kind) for at, (point, kind) in enumerate(above) if place.is_relative_to(point)]
    return max(covering, default=(0, 0, ""))[2] == "lustre"


def _unescape(point: str) -> str:
    """Decode the mount table's octal escapes for whitespace and backslashes."""
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(code, letter)
    return point


_EXTRAS = {"s3": "pip install 'orch[s3]'", "s3a": "pip install 'orch[s3]'"}

HINT = "check the name, the network and the credentials: a job only gets credentials from files and env_from variables"


def main(arguments: list[str]) -> None:
    """Try the tiers in order and stop at the first unusable one."""
    with os.fdopen(int(arguments[0]), "w", encoding="utf-8") as answer:
        for path in json.load(sys.stdin)["tiers"]:
            _write_line(answer, trying=path)
            if refused := refusal(path):
                _write_line(answer, refused=[path, *refused])
                break
        _write_line(answer, done=True)


def _write_line(answer: TextIO, **found: Any) -> None:
    answer.write(f"{json.dumps(found)}\n")
    answer.flush()


def refusal(url: str) -> tuple[str, str] | None:
    """Return why listing, writing or deleting fails at the URL, and a remedy. None if all three work."""
    probe = f".orch-probe-{token_hex(6)}"
    kind = url.partition("://")[0]
    try:
        storage = open_storage(url)
        storage.list("")
        storage.publish(probe, b"orch")
        storage.delete(probe)
    except ImportError as error:
        return f"a library is missing: {error}", _EXTRAS.get(kind, "install it for this interpreter")
    except ValueError as error:
        return without_secrets(str(error)), f"`{kind}://` must be a scheme that fsspec supports"
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        return without_secrets(reason), HINT
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
