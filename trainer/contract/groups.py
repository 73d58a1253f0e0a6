"""What a rank tells of its process groups, in a file beside its flight socket: gloo's own records name no ranks."""

import functools
from collections.abc import Iterable


def groups_file(socket: str) -> str:
    """JSON {name: {"name", "desc", "runs"}} of the rank that listens on `socket`."""
    return f"{socket}.groups"


def runs(ranks: Iterable[int]) -> list[list[int]]:
    """Ranks in ascending order as runs [first, last, step]: ten thousand of them in a few bytes."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and (found[-1][0] == found[-1][1] or rank - found[-1][1] == found[-1][2]):
            found[-1][2] = rank - found[-1][1]
            found[-1][1] = rank
        else:
            found.append([rank, rank, 1])
    return found


def unrun(told: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """The ranks that `runs` was given."""
    return _unrun(tuple((first, last, step) for first, last, step in told))


@functools.lru_cache(maxsize=4096)
def _unrun(told: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
    """Ten thousand ranks tell of the same groups: one copy of each is enough."""
    return tuple(rank for first, last, step in told for rank in range(first, last + 1, max(1, step)))
