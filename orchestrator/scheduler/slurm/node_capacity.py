"""Do the nodes that Slurm reports have what a job asks for? Those that are down or busy now are counted too."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import SlurmUnreachable
from orchestrator.scheduler.interface import Resources
from orchestrator.scheduler.slurm.command_output import UnreadableField, expand_nodes
from orchestrator.scheduler.slurm.commands import run_command
from trainer.contract.cut_text import cut

ANSWER_WITHIN = 10.0
NODES = ("sinfo", "-h", "-a", "-N", "-o", "%N|%P|%c|%m|%G")
PARTITIONS = ("sinfo", "-h", "-a", "-o", "%P")
_MEGABYTES = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}
_GPUS = re.compile(r"(?:^|,)(?:gres/)?gpu(?::[A-Za-z_][\w.-]*)?:(\d+)", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class NodeCapacity:
    """What one node of a partition has; memory in MiB."""

    name: str
    partition: str
    cpus: int
    memory: float
    gpus: int = 0


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """What no partition of those asked for has: in words, and what to type instead (empty where that is not clear)."""

    words: str
    change: str = ""


@dataclass(frozen=True)
class _Need:
    """One quantity that every node of the job must have."""

    key: str
    asked: str
    amount: float
    attribute: str
    unit: str = ""


def partitions_here(text: str) -> dict[str, bool]:
    """What `PARTITIONS` prints; true for the default one, which is marked by `*`."""
    names = [line.strip() for line in text.splitlines() if line.strip()]
    return {name.rstrip("*"): name.endswith("*") for name in names}


def known_partitions() -> dict[str, bool]:
    """The partitions of this Slurm, the default one marked; raises SlurmUnreachable."""
    return partitions_here(_answer(PARTITIONS))


def known_nodes() -> list[NodeCapacity]:
    """The nodes of all partitions of this Slurm; raises SlurmUnreachable."""
    return read_nodes(_answer(NODES))


def _answer(command: Sequence[str]) -> str:
    done = run_command(list(command), ANSWER_WITHIN)
    if done.returncode != 0:
        raise SlurmUnreachable(f"sinfo failed: {cut(done.stderr.strip(), 200)}")
    return done.stdout


def read_nodes(text: str) -> list[NodeCapacity]:
    """Rows of what `NODES` prints; one that cannot be read is left out. The default partition keeps its `*`."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split("|")]
        if len(parts) == 5 and parts[2].rstrip("+").isdigit() and parts[3].rstrip("+").isdigit():
            name, partition, cpus, memory, gres = parts
            found.append(
                NodeCapacity(
                    name=name, partition=partition, cpus=int(cpus.rstrip("+")), memory=float(memory.rstrip("+")),
                    gpus=sum(map(int, _GPUS.findall(gres))),
                )
            )  # fmt: skip
    return found


def megabytes(text: str) -> float:
    """A size in Slurm's notation as MiB; 0 (all that a node has) for what is none."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text.strip().upper(), re.ASCII)
    return int(found[1]) * _MEGABYTES[found[2]] if found else 0.0


def asked_words(asked: Resources) -> str:
    """`2 nodes with 8 cores, 4 GPUs, 64G`."""
    parts = [f"{asked.cpus_per_task} core{'s' if asked.cpus_per_task > 1 else ''}"]
    parts += [f"{asked.gpus_per_node} GPU{'s' if asked.gpus_per_node > 1 else ''}"] if asked.gpus_per_node else []
    parts += [part for part in (asked.mem, asked.constraint) if part]
    parts += [f"none of {','.join(asked.exclude)}"] if asked.exclude else []
    return f"{_nodes(asked.nodes)} with {', '.join(parts)}"


def shortfall(asked: Resources, nodes: Sequence[NodeCapacity]) -> Shortfall | None:
    """Why no partition that the job names (the default one, if none) can ever run it; None if one can.

    None too when nothing is known of them: whether a partition exists is asked elsewhere.
    """
    found = [_of_partition(asked, name, members) for name, members in _candidates(asked, nodes).items()]
    return None if not found or None in found else found[0]


def able_nodes(asked: Resources, nodes: Sequence[NodeCapacity]) -> dict[str, list[NodeCapacity]]:
    """By partition that the job may run in: the nodes that have what it asks of each, and that it does not exclude."""
    excluded, needs = _excluded(asked), [need for need in _needs(asked) if need.amount]
    return {
        partition: [
            node
            for node in members
            if node.name not in excluded and all(getattr(node, need.attribute) >= need.amount for need in needs)
        ]
        for partition, members in _candidates(asked, nodes).items()
    }


def _candidates(asked: Resources, nodes: Sequence[NodeCapacity]) -> dict[str, list[NodeCapacity]]:
    wanted = set(asked.partition.split(",")) if asked.partition else set()
    found: dict[str, list[NodeCapacity]] = {}
    for node in nodes:
        name = node.partition.rstrip("*")
        if name in wanted or (not wanted and node.partition.endswith("*")):
            found.setdefault(name, []).append(node)
    return found


def _of_partition(asked: Resources, partition: str, nodes: list[NodeCapacity]) -> Shortfall | None:
    excluded = _excluded(asked)
    usable = [node for node in nodes if node.name not in excluded]
    if len(usable) < asked.nodes <= len(nodes):
        words = f"cluster.exclude leaves {_nodes(len(usable))} of {len(nodes)} of partition {partition}"
        return Shortfall(words=words, change="~cluster.exclude")
    nodes = usable
    needs = [need for need in _needs(asked) if need.amount]
    enough = [node for node in nodes if all(getattr(node, need.attribute) >= need.amount for need in needs)]
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
            return Shortfall(words=words, change=_less(need, most))
    together = ", ".join(f"{need.key}={need.asked}" for need in needs)
    return Shortfall(words=f"{together}: partition {partition} has {_nodes(len(enough))} with all of that")


def _excluded(asked: Resources) -> set[str]:
    """What the configuration excludes; what orch itself avoids comes back by itself."""
    try:
        return {name for text in asked.exclude for name in expand_nodes(text)} - set(asked.avoided)
    except UnreadableField:
        return set()


def _less(need: _Need, most: float) -> str:
    """What to type for less of it; every rank has a GPU, or none has."""
    change = f"{need.key}={most:.0f}{need.unit}"
    ranks = f" cluster.ranks_per_node={most:.0f}" if need.attribute == "gpus" and most else ""
    return change + ranks


def _needs(asked: Resources) -> tuple[_Need, ...]:
    return (
        _Need("cluster.mem", asked.mem, megabytes(asked.mem), "memory", "M"),
        _Need("cluster.cpus_per_task", str(asked.cpus_per_task), asked.cpus_per_task, "cpus"),
        _Need("cluster.gpus_per_node", str(asked.gpus_per_node), asked.gpus_per_node, "gpus"),
    )


def _nodes(count: int) -> str:
    return "no node" if count == 0 else "1 node" if count == 1 else f"{count} nodes"
