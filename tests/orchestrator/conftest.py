"""What hundreds of tests would read anew: the files of orch's own packages, for the identity of a run."""

import functools
from collections.abc import Iterable
from pathlib import Path

from orchestrator.submission import run_identity

_read, _ROOT = run_identity.digest, run_identity._ROOT


@functools.cache
def _own(places: tuple[Path, ...]) -> str:
    return _read(places)


def _digest(places: Iterable[Path]) -> str:
    """The digest of folders; of orch's own, which no test changes, as it was when it was asked for first."""
    these = tuple(places)
    return _own(these) if all(place.parent == _ROOT for place in these) else _read(these)


run_identity.digest = _digest
