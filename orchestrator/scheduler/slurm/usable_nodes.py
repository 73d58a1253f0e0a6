"""How many nodes of this Slurm are in service and have what a job asks of each, busy or not."""

from collections.abc import Collection

from orchestrator.errors import SlurmUnreachable
from orchestrator.scheduler.interface import Resources
from orchestrator.scheduler.slurm.commands import run_command
from orchestrator.scheduler.slurm.node_capacity import ANSWER_WITHIN, able_nodes, read_nodes
from trainer.contract.cut_text import cut

NODE_STATES = ("sinfo", "-h", "-a", "-N", "-o", "%N|%P|%c|%m|%G|%T")
IN_SERVICE = frozenset(
    {"IDLE", "MIXED", "MIX", "ALLOCATED", "ALLOC", "COMPLETING", "COMP", "PLANNED", "PLND", "RESERVED", "RESV"}
)
"""A word that is not known is no node that is known to be up."""
_ABSENT = "*$^"
"""Marks after the state of a node that does not answer, is under maintenance, or reboots."""


def usable_nodes(asked: Resources, without: frozenset[str]) -> int | None:
    """Nodes of the job's partition (the largest count of several) that could hold it, but none of `without`.

    What `cluster.constraint` asks for is not looked at. None for a partition that Slurm does not list; raises
    SlurmUnreachable.
    """
    done = run_command(list(NODE_STATES), ANSWER_WITHIN)
    if done.returncode != 0:
        raise SlurmUnreachable(f"sinfo failed: {cut(done.stderr.strip(), 200)}")
    return count_usable(asked, without, done.stdout)


def count_usable(asked: Resources, without: Collection[str], text: str) -> int | None:
    """The same from what `NODE_STATES` prints."""
    rows = [line.rpartition("|") for line in text.splitlines()]
    nodes = read_nodes("\n".join(row for row, _, _ in rows))
    up = {row.partition("|")[0].strip() for row, _, state in rows if _is_up(state.strip())} - set(without)
    counts = [sum(node.name in up for node in members) for members in able_nodes(asked, nodes).values()]
    return max(counts, default=None)


def _is_up(state: str) -> bool:
    word = state.rstrip("*~#!%$@^-+")
    return word.upper() in IN_SERVICE and not set(state[len(word) :]) & set(_ABSENT)
