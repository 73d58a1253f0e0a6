"""Context parallelism: ranks share each sequence and exchange heads, or keys and values, in attention."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trainer.parallel.dimension import Dimension, Fix, Recipe, Section, Splits, check_size, join_alternatives


class CpMethod(StrEnum):
    """Methods of context parallelism."""

    AUTO = "auto"  # `ulysses` if a rank's heads divide evenly, else `ring`
    ULYSSES = "ulysses"  # each rank has all tokens of some heads: an all-to-all before and after attention
    RING = "ring"  # each rank has some tokens of all heads: keys and values travel from rank to rank


@dataclass(frozen=True, kw_only=True)
class ContextSection(Section):
    """Config keys for context parallelism."""

    cp: int = 1
    """Ranks that share each sequence (context parallelism, built-in model); they read the same batch."""

    cp_method: str = CpMethod.AUTO
    """Attention of `cp` ranks: `ulysses`, `ring`, or `auto` (`ulysses` if `cp` divides a rank's heads, else
    `ring`)."""

    def check(self) -> None:
        check_size("cp", self.cp)
        if self.cp_method not in set(CpMethod):
            raise ValueError(f"parallel.cp_method={self.cp_method}: must be {join_alternatives(tuple(CpMethod))}")


def can_exchange_heads(heads: int, parallel: Any) -> bool:
    """Return whether the heads divide evenly among the ranks; keys and values are repeated if necessary."""
    return bool(heads % (parallel.cp * parallel.tp) == 0)


def cp_method(heads: int, parallel: Any) -> CpMethod:
    """Return `parallel.cp_method` with `auto` resolved for a model with `heads` query heads."""
    chosen = CpMethod(parallel.cp_method)
    if chosen is not CpMethod.AUTO:
        return chosen
    return CpMethod.ULYSSES if can_exchange_heads(heads, parallel) else CpMethod.RING


def chunks_per_rank(method: CpMethod) -> int:
    """Return how many chunks of a sequence a rank has: in a ring, one from each end, so that ranks do equal work."""
    return 2 if method is CpMethod.RING else 1


def padded_length(length: int, parallel: Any, method: CpMethod) -> int:
    """Return the sequence length, padded so that ranks have equal chunks that tensor-parallel ranks can divide."""
    unit: int = parallel.cp * math.lcm(chunks_per_rank(method), parallel.tp)
    return -(-length // unit) * unit


class ContextParallelism(Dimension):
    """Ulysses (Jacobs et al. 2023) or ring attention (Liu et al. 2023); accepts sequences of any length."""

    name, key, splits = "cp", "cp", Splits.SEQUENCE
    torch_module = "context_parallel"
    sends_messages = True

    def problems(self, job: Recipe) -> Iterator[str]:
        heads, parallel = job.model.heads, job.parallel
        if not job.trains_built_in_workload:
            return
        if parallel.cp_method == CpMethod.ULYSSES and not can_exchange_heads(heads, parallel):
            unit = "parallel.cp" if parallel.tp == 1 else "parallel.cp x tp"
            size = parallel.cp * parallel.tp
            yield f"model.heads={heads}: must be a multiple of {unit}={size} for parallel.cp_method=ulysses"
        if parallel.cp > 1 and job.model.window(job.train.seq_len) and cp_method(heads, parallel) is CpMethod.RING:
            window = f"model.attention.window={job.model.attention.window}"
            yield f"{window}: must be 0 with ring attention (parallel.cp_method)"
        if job.train.compile and parallel.cp > 1:
            yield f"train.compile=true with parallel.cp={parallel.cp}: compiled layers cannot share a sequence"

    def relaxations(self, job: Recipe) -> Fix:
        return {"parallel.cp_method": str(CpMethod.AUTO)} if job.parallel.cp_method != CpMethod.AUTO else {}


CONTEXT = ContextParallelism()
