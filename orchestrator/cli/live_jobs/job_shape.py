"""Which ranks and nodes a job has: what is asked for by number may be beyond them."""

from orchestrator.errors import ConfigError
from trainer.contract.config import ClusterShape


def require_rank_and_node(cluster: ClusterShape, rank: int | None, node: int | None) -> None:
    """Raises ConfigError for a rank or a node that a job of this shape does not have; spare nodes count."""
    there = (("rank", rank, cluster.world_size), ("node", node, cluster.nodes + cluster.spare_nodes))
    for what, given, count in there:
        if given is not None and given >= count:
            known = f"only 0 to {count - 1}" if count > 1 else "only 0"
            raise ConfigError(
                f"there is no {what} {given}, {known}", where=f"command line: --{what}", hint=f"--{what} {count - 1}"
            )
