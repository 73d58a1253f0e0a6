"""Files that somebody may mean who has mistyped the name of one."""

import re
from collections.abc import Collection
from pathlib import Path

from orchestrator.near_words import nearest

MOST = 5000
"""Entries of a folder beyond which nothing is looked for."""


def near_file(path: Path, endings: Collection[str]) -> str | None:
    """The name of the file beside `path` that has one of these endings and is named most like it; None without one."""
    try:
        there = [file.name for _, file in zip(range(MOST), path.parent.iterdir(), strict=False)]
        names = sorted(name for name in there if Path(name).suffix in endings and (path.parent / name).is_file())
    except OSError:
        return None
    same = [name for name in names if Path(name).stem == path.stem or name == f"{path.name}{Path(name).suffix}"]
    stems = {Path(name).stem.lower(): name for name in reversed(names)}
    return next(iter(same), None) or stems.get(nearest(path.stem.lower(), stems, 0.7))


def configs_in(folder: Path, most: int = 3) -> list[Path]:
    """The configurations in a folder, the newest first: YAML files that can be read and have a workload or a base."""
    try:
        there = [file for _, file in zip(range(MOST), folder.glob("*.y*ml"), strict=False) if file.is_file()]
        newest = sorted(there, key=lambda file: file.stat().st_mtime, reverse=True)[:_LOOKED_AT]
        return [file for file in newest if _BEGINS.search(file.read_text(errors="replace")[:_READ])][:most]
    except OSError:
        return []


_LOOKED_AT, _READ = 50, 10_000
_BEGINS = re.compile(r"^(includes|workload|command|data) *:", re.MULTILINE)


def near_module(folder: Path, name: str) -> str:
    """The module or package of a folder whose name is nearly this one; empty without one."""
    file = near_file(folder / name, (".py",))
    if file is not None and file.removesuffix(".py").isidentifier():
        return file.removesuffix(".py")
    try:
        packages = [place.parent.name for place in folder.glob("*/__init__.py")]
    except OSError:
        return ""
    return nearest(name, packages, 0.7)
