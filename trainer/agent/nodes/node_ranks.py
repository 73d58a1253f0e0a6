"""PURE: which node has which node rank (torchrun's GROUP_RANK).

Node rank n runs the global ranks from n x ranks_per_node on, on whichever node that is. Nodes without a node rank are
spares: they wait with a warm fork server until they replace a node.

Nodes under one switch have neighbouring node ranks: the ranks of a shard group, which are neighbours, then exchange
their data through as few switches as can be.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

LEADER = 0
"""The node whose agent is the coordinator: it has node rank 0, and no spare can replace it."""

NodeRanks = dict[int, int]
"""Node rank -> node."""


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """`node` takes the node rank of `instead`."""

    node_rank: int
    node: int
    instead: int


Switches = Mapping[int, tuple[str, ...]]
"""Node -> the switches that lead to it, the top one first; none where that is not known."""


def assign_node_ranks_to(
    count: int, fit: Collection[int], switches: Switches = MappingProxyType({})
) -> tuple[NodeRanks | None, str]:
    """The first assignment: the leader, the nodes next to it in the network, then others; None when there are too few.

    Of nodes that are equally near, and where no switches are known, the lowest ones come first.
    """
    if LEADER not in fit:
        return None, f"node {LEADER}, which leads the job, cannot train"
    if len(fit) < count:
        return None, f"{len(fit)} node(s) can train, {count} are needed"
    chosen = sorted(fit, key=_by_switch(fit, switches))[:count]
    return dict(enumerate(chosen)), f"{count} of {len(fit)} node(s) that can train have a node rank"


def _by_switch(nodes: Collection[int], switches: Switches) -> Callable[[int], tuple[int, ...]]:
    """A key to sort nodes by: those under a switch stand together, switches in the order of their lowest nodes."""
    lowest: dict[tuple[str, ...], int] = {}
    for node in sorted(nodes):
        path = switches.get(node, ())
        for depth in range(1, len(path) + 1):
            lowest.setdefault(path[:depth], node)

    def key(node: int) -> tuple[int, ...]:
        path = switches.get(node, ())
        return *(lowest[path[:depth]] for depth in range(1, len(path) + 1)), node

    return key


def replacements(
    node_ranks: Mapping[int, int], fit: Collection[int], ready: Collection[int]
) -> tuple[tuple[Replacement, ...], str]:
    """Which spares replace the nodes that are not fit any more; no moves when there are too few.

    The other nodes keep their node ranks: their ranks find the copies of their state in their own node's memory.
    """
    vacant = [node_rank for node_rank, node in sorted(node_ranks.items()) if node not in fit]
    if not vacant:
        return (), "no node has to be replaced"
    if node_ranks[min(node_ranks)] not in fit:
        return (), f"node {node_ranks[min(node_ranks)]}, which leads the job, is lost"
    spares = sorted(set(fit) - set(node_ranks.values()), key=lambda node: (node not in ready, node))
    if len(spares) < len(vacant):
        return (), f"{len(vacant)} node(s) have to be replaced, {len(spares)} spare node(s) are left"
    moves = tuple(
        Replacement(node_rank=node_rank, node=node, instead=node_ranks[node_rank])
        for node_rank, node in zip(vacant, spares[: len(vacant)], strict=True)
    )
    return moves, f"{len(moves)} of {len(spares)} spare node(s) take a node rank"
