"""Packages that orch's own workloads need in the Python of the ranks. A user's `command:` needs none of them."""

from collections.abc import Iterator, Mapping
from importlib import metadata

NEEDED_BY_RANKS = {"torch": "2.12", "xxhash": "", "psutil": ""}
"""Lowest versions; empty: any version."""


def find_unmet(needed: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each package that is missing or too old, with its installed version or "" if it is missing."""
    for name, least in needed.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, ""
            continue
        if least and _release_numbers(version) < _release_numbers(least):
            yield name, version


def _release_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without its local part: (2, 12, 0) for 2.12.0+cu130."""
    public = version.partition("+")[0]
    return tuple(int(part) for part in public.split(".") if part.isdigit())
