"""PURE: what is written down of an attempt that is smaller than its run, and how that reads."""

from collections.abc import Mapping
from typing import Any

NODES, SPARES = "nodes", "spare_nodes"
FULL_NODES, FULL_SPARES = "of", "of_spare_nodes"
"""What the run itself asks for."""
BASE = "base"
"""The digest of the run's config, which the attempt's was derived from."""


def smaller_world(mine: Mapping[str, Any], full: Mapping[str, Any], base: str, reason: str) -> dict[str, Any]:
    """Out of the sections `cluster` of both configs."""
    return {
        NODES: int(mine.get("nodes", 1)),
        SPARES: int(mine.get("spare_nodes", 0)),
        FULL_NODES: int(full.get("nodes", 1)),
        FULL_SPARES: int(full.get("spare_nodes", 0)),
        "reason": reason,
        BASE: base,
    }


def asked_nodes(world: Mapping[str, Any]) -> int:
    """What a smaller attempt asked its scheduler for."""
    return int(world[NODES]) + int(world[SPARES])


def on_nodes(world: Mapping[str, Any]) -> str:
    """`on 3 of 4 nodes: 1 node was missing for 1h01m (recovery.patience=3600)`."""
    if world[NODES] < world[FULL_NODES]:
        return f"on {world[NODES]} of {_count(world[FULL_NODES], 'node')}: {world['reason']}"
    return f"with {world[SPARES]} of {_count(world[FULL_SPARES], 'spare node')}: {world['reason']}"


def size_words(number: int, world: Mapping[str, Any] | None) -> str:
    """The same with the number of the attempt, `attempt 3 runs on 3 of 4 nodes: ...`; empty for a full one."""
    return f"attempt {number} runs {on_nodes(world)}" if world else ""


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
