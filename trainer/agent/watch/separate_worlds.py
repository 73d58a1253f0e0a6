"""Whether the nodes of a program train separate models, because its ranks are numbered anew on each node. Pure."""

from collections.abc import Sequence

from trainer.agent.watch.hang_limits import RankSample


def find_separate_worlds(seen: Sequence[RankSample]) -> tuple[int, tuple[str, ...]] | None:
    """Return a rank that exists on several nodes, and those nodes, or None.

    Only ranks that have trained count, since a program may number its processes before it joins them.
    """
    nodes: dict[int, set[str]] = {}
    for one in seen:
        if one.program is not None and one.program.own_rank >= 0 and not one.first and not one.ended:
            nodes.setdefault(one.program.own_rank, set()).add(one.node)
    return next(((rank, tuple(sorted(where))) for rank, where in sorted(nodes.items()) if len(where) > 1), None)


def describe_separate_worlds(rank: int, nodes: Sequence[str]) -> str:
    shown = ", ".join(nodes[:4]) + (", ..." if len(nodes) > 4 else "")
    return (
        f"the nodes train separate models: the program has a rank {rank} on each of {shown}; give its launcher the "
        "number of nodes and the address of the first one (docs/torchrun-scripts.md#launchers)"
    )
