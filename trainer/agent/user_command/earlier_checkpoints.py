"""Checkpoints from before a run's first start: of another run, or an earlier one of the program.
They may have higher steps than the run's own. Once the run has saved one, it cannot have continued from a higher one.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from trainer.protocol.command_progress import CommandCheckpointsConfig

Stamps = dict[str, int]
"""Identity -> time of the last change (ns) before the run's first start."""
_MOST, _MOST_ENTRIES = 1000, 100


def scan_identities(folder: Path) -> dict[str, str]:
    """Return the identity of each entry by its name; empty if the folder is missing. Raises OSError."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: f"{entry.name}.{entry.inode():x}" for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return {}


def record_earlier(folder: Path, config: CommandCheckpointsConfig) -> Stamps:
    """Return the checkpoints that exist now, limited to those with the highest steps. Raises OSError."""
    there = scan_identities(folder)
    steps = {name: config.parse_step(name) for name in there}
    newest = sorted((step, name) for name, step in steps.items() if step is not None)[-_MOST:]
    return {there[name]: _newest_change(folder / name) for _, name in newest}


def leave_out_earlier(
    folder: Path, there: Mapping[str, str], config: CommandCheckpointsConfig, earlier: Stamps
) -> tuple[dict[str, str], set[str]]:
    """Return the entries without earlier checkpoints above the run's newest one, and the earlier ones' names.
    A checkpoint changed since the first start is the run's own. Raises OSError.
    """
    steps = {name: step for name in there if (step := config.parse_step(name)) is not None}
    old = {name for name in steps if there[name] in earlier}
    newest = max((step for name, step in steps.items() if name not in old), default=-1)
    for name in sorted(old, key=lambda name: steps[name], reverse=True):
        if steps[name] <= newest:
            break
        if _newest_change(folder / name) != earlier[there[name]]:
            old.remove(name)
            newest = steps[name]
    above = {name for name in old if steps[name] > newest} if newest >= 0 else set()
    return {name: identity for name, identity in there.items() if name not in above}, old


def _newest_change(path: Path) -> int:
    """Return the time of the newest change of an entry or, if readable, within its folder. Raises OSError."""
    times = [path.lstat().st_mtime_ns]
    with suppress(OSError):
        times += [os.lstat(entry).st_mtime_ns for entry in islice(_entries(path), _MOST_ENTRIES)]
    return max(times)


def _entries(folder: Path) -> Iterator[str]:
    for at, folders, names in os.walk(folder):
        yield from (os.path.join(at, name) for name in (*folders, *names))
