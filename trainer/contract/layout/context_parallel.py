"""PURE: how ranks that share each sequence do it: which method, and the length to which a sequence is padded."""

import math

from trainer.contract.config_sections.parallel_config import CpMethod, ParallelConfig


def can_exchange_heads(heads: int, parallel: ParallelConfig) -> bool:
    """Whether every rank can have all tokens of the same number of heads; keys and values are repeated if need be."""
    return heads % (parallel.cp * parallel.tp) == 0


def cp_method(heads: int, parallel: ParallelConfig) -> CpMethod:
    """`parallel.cp_method` with `auto` decided, for a model with so many query heads."""
    chosen = CpMethod(parallel.cp_method)
    if chosen is not CpMethod.AUTO:
        return chosen
    return CpMethod.ULYSSES if can_exchange_heads(heads, parallel) else CpMethod.RING


def chunks_per_rank(method: CpMethod) -> int:
    """Chunks of a sequence that each rank has: in a ring one of the head and one of the tail, so that work is equal."""
    return 2 if method is CpMethod.RING else 1


def padded_length(length: int, parallel: ParallelConfig, method: CpMethod) -> int:
    """The length of a sequence that divides into equal chunks, of which tensor-parallel ranks share each rank's."""
    unit = parallel.cp * math.lcm(chunks_per_rank(method), parallel.tp)
    return -(-length // unit) * unit
