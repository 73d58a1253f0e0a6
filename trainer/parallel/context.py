"""PURE: context parallelism: its method, and the padded length of sequences."""

import math

from trainer.protocol.config_sections.parallel_config import CpMethod, ParallelConfig


def can_exchange_heads(heads: int, parallel: ParallelConfig) -> bool:
    """Return whether the heads divide evenly among the ranks; keys and values are repeated if necessary."""
    return heads % (parallel.cp * parallel.tp) == 0


def cp_method(heads: int, parallel: ParallelConfig) -> CpMethod:
    """Return `parallel.cp_method` with `auto` resolved for a model with `heads` query heads."""
    chosen = CpMethod(parallel.cp_method)
    if chosen is not CpMethod.AUTO:
        return chosen
    return CpMethod.ULYSSES if can_exchange_heads(heads, parallel) else CpMethod.RING


def chunks_per_rank(method: CpMethod) -> int:
    """Return the chunks of a sequence per rank: in a ring one from each end, so that ranks do equal work."""
    return 2 if method is CpMethod.RING else 1


def padded_length(length: int, parallel: ParallelConfig, method: CpMethod) -> int:
    """Return the sequence length padded to equal chunks per rank, whose parts tensor-parallel ranks can share."""
    unit = parallel.cp * math.lcm(chunks_per_rank(method), parallel.tp)
    return -(-length // unit) * unit
