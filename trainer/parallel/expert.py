"""Expert parallelism: ranks hold different experts of each layer and compute them for all ranks' tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainer.parallel.data import Strategy
from trainer.parallel.dimension import Dimension, Recipe, Section, Splits, check_size


@dataclass(frozen=True, kw_only=True)
class ExpertSection(Section):
    """Config keys for expert parallelism."""

    ep: int = 1
    """Ranks that share the experts of each layer (expert parallelism, built-in model), a subset of the `dp_shard` x
    `cp` x `tp` ranks."""

    def check(self) -> None:
        check_size("ep", self.ep)


def expert_ranks(parallel: Any, world_size: int) -> int:
    """Return the number of ranks that share experts, or shards of them, if `ep` is above 1; includes `tp` ranks."""
    sizes = parallel.parameter_sizes(world_size)
    ranks: int = sizes["dp_shard"] * sizes["tp"]
    return ranks


def expert_sizes(parallel: Any, world_size: int) -> dict[str, int]:
    """Return the mesh of expert stacks, in which `dp_shard` ranks hold shards of the same experts."""
    sizes = parallel.parameter_sizes(world_size)
    del sizes["tp"]
    return {**sizes, "dp_shard": expert_ranks(parallel, world_size) // parallel.ep, "ep": parallel.ep}


def can_share_experts(job: Recipe, sharding: int, ep: int) -> bool:
    """Return whether `ep` of `sharding` ranks can share the experts, with the other ranks holding shards of them."""
    if ep == 1 or sharding % ep:
        return ep == 1
    experts = job.model.experts
    return not job.trains_built_in_workload or (experts.count % ep == 0 and experts.ffn_dim % (sharding // ep) == 0)


class ExpertParallelism(Dimension):
    """Reuses part of the mesh: ranks with the same layers have different experts of those layers."""

    name, key, splits = "ep", "ep", Splits.EXPERTS
    torch_module = "expert_parallel"

    def mesh(self, parallel: Any, data_ranks: int) -> dict[str, int]:
        return {}

    def place(self, rank: int, parallel: Any) -> str:
        return f"ep {rank % parallel.ep}" if parallel.ep > 1 else ""

    def problems(self, job: Recipe) -> Iterator[str]:
        parallel, experts = job.parallel, job.model.experts
        if parallel.ep > 1:
            yield from self._size_problems(job)
        if not (job.trains_built_in_workload and experts.count):
            return
        if parallel.ep > 1 and job.train.activation_checkpointing and job.train.recompute.keep == "products":
            # FSDP's hooks around experts run in the recomputed region, and torch 2.13 mistakes them for its operations.
            yield f"parallel.ep={parallel.ep} with train.recompute.keep=products: only keep=nothing is supported"
        if job.train.compile:
            yield (
                f"train.compile=true with model.experts.count={experts.count}: "
                "the number of tokens per expert changes every step"
            )

    def _size_problems(self, job: Recipe) -> Iterator[str]:
        parallel, experts, ep = job.parallel, job.model.experts, job.parallel.ep
        sharding = expert_ranks(parallel, job.cluster.world_size)
        product = "parallel.dp_shard x cp" + (" x tp" if parallel.tp > 1 else "")
        if job.trains_built_in_workload and not experts.count:
            yield f"parallel.ep={ep}, but the model has no experts (model.experts.count=0)"
        elif parallel.strategy == Strategy.DDP:
            yield f"parallel.ep={ep} with parallel.strategy=ddp, whose replicas share no parameters"
        elif sharding % ep:
            yield f"parallel.ep={ep}: must divide the {sharding} ranks that share layers ({product})"
        elif job.trains_built_in_workload and experts.count % ep:
            yield f"model.experts.count={experts.count}: must be a multiple of parallel.ep={ep}"
        elif job.trains_built_in_workload and experts.ffn_dim % (same := sharding // ep):
            ranks = f"the {same} ranks that have the same experts ({product} / ep)"
            yield f"model.experts.ffn_dim={experts.ffn_dim}: must be a multiple of {ranks}"


EXPERT = ExpertParallelism()
