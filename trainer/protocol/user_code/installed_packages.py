"""Installed distributions, their versions, and the differences that affect training."""

import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

COMPUTING = ("torch", "nvidia-", "triton", "cuda", "numpy", "transformers", "flash", "apex", "xformers", "deepspeed")
"""Name prefixes of distributions that affect training even if no code imports them by name."""
OWN = frozenset({"orch", "orchestrator", "trainer", "checkpointing"})
"""Top-level names of orch, which is compared by its content."""
_INFO = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(?:-py[\d.]+.*)?\.(?:dist|egg)-info")
_VERSION = re.compile(r"^Version:\s*(\S+)", re.MULTILINE)


def find_site_folders(path: Iterable[str]) -> tuple[str, ...]:
    """Return the folders of an import path in which distributions are installed."""
    places = dict.fromkeys(os.path.abspath(place) for place in path if os.path.isdir(place))
    return tuple(place for place in places if next(_infos(place), None) is not None)


def read_versions(folders: Iterable[str]) -> dict[str, str] | None:
    """Return the versions of distributions in these folders, keyed by normalized name, or None if a folder is missing.

    The first folder with a distribution counts. `pip install --target --upgrade` keeps the old metadata, so all
    versions in the folder are listed. Only folder names are read, because reading hundreds of files takes too long.
    """
    found: dict[str, str] = {}
    for folder in folders:
        if not os.path.isdir(folder):
            return None
        here: dict[str, set[str]] = {}
        for name, version, _ in _infos(folder):
            here.setdefault(name, set()).add(version)
        found = {name: ", ".join(sorted(versions)) for name, versions in here.items()} | found
    return dict(sorted(found.items()))


def imported_names(modules: Mapping[str, Any], folders: Collection[str]) -> set[str]:
    """Return the names of top-level modules that are in one of the folders."""
    places = tuple(f"{folder}{os.sep}" for folder in folders)
    found = set[str]()
    for name, module in list(modules.items()):
        if "." not in name:
            spec = getattr(module, "__spec__", None)
            inner = getattr(spec, "submodule_search_locations", None) or ()
            origin = getattr(spec, "origin", None)
            where = [*map(str, inner), *([origin] if isinstance(origin, str) else [])]
            found |= {name} if any(place.startswith(places) for place in where) else set()
    return found


def third_party(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that belong to neither Python nor orch."""
    return tuple(sorted(set(names) - sys.stdlib_module_names - OWN))


def provided_names(name: str, folders: Iterable[str]) -> set[str]:
    """Return the top-level modules of a distribution, or its own name as a module name if they are unknown."""
    for folder in folders:
        if infos := [info for found, _, info in _infos(folder) if found == name]:
            return {top for info in infos for top in _listed_tops(Path(info))} or {name.replace("-", "_")}
    return {name.replace("-", "_")}


def changed_versions(
    before: Mapping[str, str],
    now: Mapping[str, str],
    imported: Collection[str],
    provided: Callable[[str], Collection[str]],
) -> list[str]:
    """Return the changed, new or removed distributions that affect training.

    A distribution affects training if one of its modules is imported, or if its name starts with a prefix in COMPUTING.
    """
    differ = [name for name in sorted({*before, *now} - OWN) if before.get(name) != now.get(name)]
    return [name for name in differ if name.startswith(COMPUTING) or not set(imported).isdisjoint(provided(name))]


def normalize_names(packages: Mapping[str, Any]) -> dict[str, str]:
    """Return packages keyed by normalized name (PEP 503)."""
    return {_normalize(name): str(version) for name, version in packages.items()}


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _infos(folder: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, version and metadata of each distribution in a folder."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return
    for entry in names:
        if not entry.endswith(("-info", ".egg-info")):
            continue
        place = os.path.join(folder, entry)
        if parts := _INFO.fullmatch(entry):
            yield _normalize(parts["name"]), parts["version"], place
        elif entry.endswith(".egg-info") and (version := _VERSION.search(read_text(Path(place, "PKG-INFO")))):
            yield _normalize(entry.removesuffix(".egg-info")), version[1], place


def _listed_tops(info: Path) -> Iterator[str]:
    yield from (tops := read_text(info / "top_level.txt").split())
    for line in [] if tops else read_text(info / "RECORD").splitlines():
        top = line.partition(",")[0].partition("/")[0].strip('"')
        if top and top not in ("..", "__pycache__") and not top.endswith((".dist-info", ".data")):
            yield top.partition(".")[0]


def read_text(path: Path) -> str:
    """Return the text of a file, or an empty text if it is unreadable."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
