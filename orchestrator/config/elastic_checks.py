"""PURE: whether a run can train on as few nodes as `cluster.min_nodes` says; what to type where it cannot."""

from collections.abc import Iterator

from orchestrator.config.run_config import RunConfig
from orchestrator.recovery.world_sizes import fitting_nodes

SHOWN = 8
"""Numbers of nodes that a message names."""


def complaints(config: RunConfig) -> Iterator[tuple[str, str]]:
    """What is wrong with `cluster.min_nodes`, and what to type; nothing for a layout that does not fit by itself."""
    cluster, least = config.cluster, config.cluster.min_nodes
    if least < 0:
        yield f"cluster.min_nodes={least}: must be 0 (never fewer than cluster.nodes) or a number of nodes", ""
    elif least and config.command:
        yield (
            f"cluster.min_nodes={least}: a `command` of yours has a batch of its own, which changes with its nodes",
            "~cluster.min_nodes; the next job of a command asks for all its nodes",
        )
    elif least > cluster.nodes:
        yield (
            f"cluster.min_nodes={least}: must be at most cluster.nodes={cluster.nodes}",
            f"cluster.min_nodes={max(1, cluster.nodes - 1)}",
        )
    elif 0 < least < cluster.nodes and _divides(config):
        fits = list(fitting_nodes(config))
        if not fits or fits[0] < least:
            yield _nothing_fits(config, fits)


def _divides(config: RunConfig) -> bool:
    """Whether the full layout fits; where it does not, that is what has to be said."""
    try:
        ranks = config.parallel.data_parallel_size(config.cluster.world_size)
    except ValueError:
        return False
    return config.train.batch_size % ranks == 0


def _nothing_fits(config: RunConfig, fits: list[int]) -> tuple[str, str]:
    cluster, train, least = config.cluster, config.train, config.cluster.min_nodes
    what = (
        f"cluster.min_nodes={least}: fewer nodes than cluster.nodes={cluster.nodes}, and {least} or more, "
        f"do not fit train.batch_size={train.batch_size} and `parallel`"
    )
    if fits:
        names = ", ".join(map(str, fits[:SHOWN])) + (", ..." if len(fits) > SHOWN else "")
        return f"{what}; these do: {names}", f"cluster.min_nodes={fits[0]}"
    return f"{what}; no number of nodes does", "~cluster.min_nodes"
