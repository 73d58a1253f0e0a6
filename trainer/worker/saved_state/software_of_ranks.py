"""The software of every rank in a checkpoint, and how that of the present ranks differs from it."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.worker.startup.software import differences

FIRST = "software"
"""Key in a checkpoint's facts: the software of rank 0."""
RANKS = "rank_software"
"""Key in a checkpoint's facts: `others`, the distinct sets that rank 0 does not have, and `ranks`, the number of each
rank's set: 0 for rank 0's, n for `others[n - 1]`. Both are empty where all ranks have the same."""


def software_facts(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the facts of a checkpoint about the software of all ranks, each distinct set once."""
    distinct: list[Mapping[str, Any]] = []
    for each in of_ranks:
        if each not in distinct:
            distinct.append(each)
    numbers = [distinct.index(each) for each in of_ranks] if len(distinct) > 1 else []
    return {FIRST: dict(of_ranks[0]), RANKS: {"others": [dict(each) for each in distinct[1:]], "ranks": numbers}}


def changed_software(
    saved: Mapping[str, Any], of_ranks: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, list[Any]], dict[str, int]]:
    """Return what any rank has otherwise than the rank of its number had, in a checkpoint with the facts `saved`.

    The first value maps a name to [before, now] of the first rank that differs, the second one to the number of that
    rank where it is not 0. Checkpoints of earlier releases have rank 0's software only. What other ranks have otherwise
    than rank 0 has now was None before: it is not known to be the same. Ranks that the saving world did not have are
    compared with its rank 0.
    """
    changes: dict[str, list[Any]] = {}
    ranks: dict[str, int] = {}
    if FIRST not in saved:
        return changes, ranks
    for rank, now in enumerate(of_ranks):
        for name, pair in _changes_of_rank(saved, rank, now, of_ranks[0]).items():
            if name not in changes:
                changes[name] = pair
                if rank:
                    ranks[name] = rank
    return changes, ranks


def _changes_of_rank(
    saved: Mapping[str, Any], rank: int, now: Mapping[str, Any], first: Mapping[str, Any]
) -> dict[str, list[Any]]:
    if rank and RANKS not in saved:
        return {name: [None, value] for name, value in now.items() if first.get(name) != value}
    numbers = saved[RANKS]["ranks"] if RANKS in saved else []
    number = numbers[rank] if rank < len(numbers) else 0
    return differences(saved[RANKS]["others"][number - 1] if number else saved[FIRST], now)
