"""Comparison of a job's request with the nodes that Slurm reports."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.scheduler.interface import Resources
from orchestrator.scheduler.slurm.command_output import UnreadableField, expand_nodes, run_command, unreachable

ANSWER_WITHIN = 10.0
NODES = ("sinfo", "-h", "-a", "-N", "-o", "%N|%P|%c|%m|%G|%T")
PARTITIONS = ("sinfo", "-h", "-a", "-o", "%P")
_MEGABYTES = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}
IN_SERVICE = frozenset(
    {"IDLE", "MIXED", "MIX", "ALLOCATED", "ALLOC", "COMPLETING", "COMP", "PLANNED", "PLND", "RESERVED", "RESV"}
)
"""States of nodes in service; nodes in unknown states do not count."""
_ABSENT = "*$^"  # state suffixes of a node that does not respond, is under maintenance, or is rebooting
_GPUS = re.compile(r"(?:^|,)(?:gres/)?gpu(?::[A-Za-z_][\w.-]*)?:(\d+)", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class NodeCapacity:
    """Capacity of one node in a partition; memory is in MiB."""

    name: str
    partition: str
    cpus: int
    memory: float
    gpus: int = 0
    is_up: bool = True


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """A request that no named partition can meet, in words, and the change that would help (empty if unclear)."""

    words: str
    change: str = ""


class _Need(NamedTuple):
    """A quantity that every node of the job must have."""

    key: str
    asked: str
    amount: float
    attribute: str
    unit: str = ""


def partitions_here(text: str) -> dict[str, bool]:
    """Return the partitions printed by `PARTITIONS`, with True for the default one, which is marked by `*`."""
    names = [line.strip() for line in text.splitlines() if line.strip()]
    return {name.rstrip("*"): name.endswith("*") for name in names}


def known_partitions() -> dict[str, bool]:
    """Return the partitions of this Slurm, with the default one marked. Raises SlurmUnreachable."""
    return partitions_here(_answer(PARTITIONS))


def known_nodes() -> list[NodeCapacity]:
    """Return the nodes of all partitions of this Slurm. Raises SlurmUnreachable."""
    return read_nodes(_answer(NODES))


def _answer(command: Sequence[str]) -> str:
    done = run_command(list(command), ANSWER_WITHIN)
    if done.returncode != 0:
        raise unreachable(command[0], done.stderr)
    return done.stdout


def read_nodes(text: str) -> list[NodeCapacity]:
    """Parse the output of `NODES`; unreadable rows are skipped, and the default partition keeps its `*`."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split("|")]
        if len(parts) == 6 and parts[2].rstrip("+").isdigit() and parts[3].rstrip("+").isdigit():
            name, partition, cpus, memory, gres, state = parts
            word = state.rstrip("*~#!%$@^-+")
            node = NodeCapacity(
                name=name, partition=partition, cpus=int(cpus.rstrip("+")), memory=float(memory.rstrip("+")),
                gpus=count_gpus(gres),
                is_up=word.upper() in IN_SERVICE and not set(state[len(word) :]) & set(_ABSENT),
            )  # fmt: skip
            found.append(node)
    return found


def count_gpus(gres: str) -> int:
    """Return the number of GPUs in a GRES list (`gpu:a100:4(S:0-1),nvme:1`)."""
    return sum(map(int, _GPUS.findall(gres)))


def megabytes(text: str) -> float:
    """Return a size in Slurm's notation in MiB; 0 (all of a node's memory) if the text is not a size."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text.strip().upper(), re.ASCII)
    return int(found[1]) * _MEGABYTES[found[2]] if found else 0.0


def asked_words(asked: Resources) -> str:
    """Return the request in words: `2 nodes with 8 cores, 4 GPUs, 64G`."""
    parts = [f"{asked.cpus_per_task} core{'s' if asked.cpus_per_task > 1 else ''}"]
    parts += [f"{asked.gpus_per_node} GPU{'s' if asked.gpus_per_node > 1 else ''}"] if asked.gpus_per_node else []
    parts += [part for part in (asked.mem, asked.constraint) if part]
    parts += [f"none of {','.join(asked.exclude)}"] if asked.exclude else []
    return f"{_nodes(asked.nodes)} with {', '.join(parts)}"


def shortfall(asked: Resources, nodes: Sequence[NodeCapacity]) -> Shortfall | None:
    """Return why none of the job's partitions (the default one if none is named) can ever run it, or None if one can.

    The result is also None if no nodes are known. Whether a partition exists is checked elsewhere.
    """
    found = [_of_partition(asked, name, members) for name, members in _candidates(asked, nodes).items()]
    return None if not found or None in found else found[0]


def _is_able(node: NodeCapacity, needs: Sequence[_Need]) -> bool:
    return all(getattr(node, need.attribute) >= need.amount for need in needs)


def _candidates(asked: Resources, nodes: Sequence[NodeCapacity]) -> dict[str, list[NodeCapacity]]:
    wanted = set(asked.partition.split(",")) if asked.partition else set()
    found: dict[str, list[NodeCapacity]] = {}
    for node in nodes:
        name = node.partition.rstrip("*")
        if name in wanted or (not wanted and node.partition.endswith("*")):
            found.setdefault(name, []).append(node)
    return found


def _of_partition(asked: Resources, partition: str, nodes: list[NodeCapacity]) -> Shortfall | None:
    excluded = _excluded_nodes(asked)
    usable = [node for node in nodes if node.name not in excluded]
    if len(usable) < asked.nodes <= len(nodes):
        words = f"cluster.exclude leaves {_nodes(len(usable))} of {len(nodes)} in partition {partition}"
        return Shortfall(words=words, change="~cluster.exclude")
    nodes, needs = usable, _needs(asked)
    enough = [node for node in nodes if _is_able(node, needs)]
    if len(enough) >= asked.nodes:
        return None
    if len(nodes) < asked.nodes:
        training = asked.nodes - asked.spares
        spares = f" and cluster.spare_nodes={asked.spares}" if asked.spares else ""
        words = f"cluster.nodes={training}{spares}: partition {partition} has {_nodes(len(nodes))}"
        left = len(nodes) - training  # spare nodes are given up first
        fewer = f"cluster.nodes={len(nodes)}" + (" cluster.spare_nodes=0" if asked.spares else "")
        return Shortfall(words=words, change=f"cluster.spare_nodes={left}" if left >= 0 else fewer)
    for need in needs:
        have = sorted((getattr(node, need.attribute) for node in nodes), reverse=True)
        most = have[asked.nodes - 1]
        if most < need.amount:
            words = (
                f"{need.key}={need.asked} on {_nodes(asked.nodes)}: partition {partition} has "
                f"{_nodes(sum(amount >= need.amount for amount in have))} with that much"
            )
            ranks = f" cluster.ranks_per_node={most:.0f}" if need.attribute == "gpus" and most else ""
            return Shortfall(words=words, change=f"{need.key}={most:.0f}{need.unit}{ranks}")
    together = ", ".join(f"{need.key}={need.asked}" for need in needs)
    return Shortfall(words=f"{together}: partition {partition} has {_nodes(len(enough))} with all of that")


def _excluded_nodes(asked: Resources) -> set[str]:
    """Return the nodes excluded by the configuration, except nodes that orch avoids temporarily."""
    try:
        return {name for text in asked.exclude for name in expand_nodes(text)} - set(asked.avoided)
    except UnreadableField:
        return set()


def _needs(asked: Resources) -> list[_Need]:
    found = (
        _Need("cluster.mem", asked.mem, megabytes(asked.mem), "memory", "M"),
        _Need("cluster.cpus_per_task", str(asked.cpus_per_task), asked.cpus_per_task, "cpus"),
        _Need("cluster.gpus_per_node", str(asked.gpus_per_node), asked.gpus_per_node, "gpus"),
    )
    return [need for need in found if need.amount]


def _nodes(count: int) -> str:
    return "no node" if count == 0 else "1 node" if count == 1 else f"{count} nodes"


def usable_nodes(asked: Resources, without: frozenset[str]) -> int | None:
    """Return how many nodes outside `without` could run the job: with several partitions, the largest number.

    `cluster.constraint` is not considered. Return None for a partition that Slurm does not list. Raises
    SlurmUnreachable.
    """
    return count_usable(asked, without, known_nodes())


def count_usable(asked: Resources, without: Collection[str], nodes: Sequence[NodeCapacity]) -> int | None:
    """Count usable nodes among all nodes of this Slurm, as `usable_nodes` does."""
    excluded, needs = _excluded_nodes(asked) | set(without), _needs(asked)
    counts = [
        sum(node.is_up and node.name not in excluded and _is_able(node, needs) for node in members)
        for members in _candidates(asked, nodes).values()
    ]
    return max(counts, default=None)
