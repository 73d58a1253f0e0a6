"""PURE: which node sits in which seat.

A job has a seat for every node that trains; seat s holds the ranks from s x ranks_per_node on, whoever sits there.
Nodes beyond the seats are spares: they wait with a warm fork server and no ranks until a seat falls vacant.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

LEADER = 0
"""The node whose agent leads the job: it has the first seat, and nobody can replace it."""

NodeRanks = dict[int, int]
"""Seat -> node."""


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """One seat changes hands."""

    node_rank: int
    node: int
    instead: int


def assign_node_ranks_to(count: int, fit: Collection[int]) -> tuple[NodeRanks | None, str]:
    """The first seating: the leader, then the lowest nodes; None when there are too few."""
    if LEADER not in fit:
        return None, f"node {LEADER}, which leads the job, cannot train"
    if len(fit) < count:
        return None, f"{len(fit)} node(s) can train, {count} are needed"
    chosen = sorted(fit)[:count]
    return dict(enumerate(chosen)), f"{count} of {len(fit)} node(s) that can train have a seat"


def replacements(
    node_ranks: Mapping[int, int], fit: Collection[int], ready: Collection[int]
) -> tuple[tuple[Replacement, ...], str]:
    """Who takes the seats of nodes that are not fit any more; no moves when they cannot all be taken.

    Those that stay keep their seats: their ranks find the copies of their state in their own node's memory.
    """
    vacant = [node_rank for node_rank, node in sorted(node_ranks.items()) if node not in fit]
    if not vacant:
        return (), "no seat is vacant"
    if node_ranks[min(node_ranks)] not in fit:
        return (), f"node {node_ranks[min(node_ranks)]}, which leads the job, is lost"
    spares = sorted(set(fit) - set(node_ranks.values()), key=lambda node: (node not in ready, node))
    if len(spares) < len(vacant):
        return (), f"{len(vacant)} seat(s) are vacant, {len(spares)} spare node(s) are left"
    moves = tuple(
        Replacement(node_rank=node_rank, node=node, instead=node_ranks[node_rank])
        for node_rank, node in zip(vacant, spares[: len(vacant)], strict=True)
    )
    return moves, f"{len(moves)} of {len(spares)} spare node(s) take a seat"
