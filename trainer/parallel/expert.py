"""PURE: expert parallelism: problems of `parallel.ep`, and sizes that fit."""

from collections.abc import Iterator

from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.parallel_config import ParallelConfig, Strategy


def has_experts(config: JobConfig) -> bool:
    """Return whether layers of the built-in model have experts."""
    return config.trains_built_in_workload and config.model.experts.count > 0


def ep_problems(config: JobConfig, sharding: int) -> Iterator[str]:
    """Yield the problems of `parallel.ep`; `sharding`: number of ranks that share experts or shards of them."""
    parallel, experts = config.parallel, config.model.experts
    ep = parallel.ep
    if ep == 1:
        return
    if config.trains_built_in_workload and not experts.count:
        yield f"parallel.ep={ep}, but the model has no experts (model.experts.count=0)"
        return
    if parallel.strategy == Strategy.DDP:
        yield f"parallel.ep={ep} with parallel.strategy=ddp, whose replicas share no parameters"
        return
    if sharding % ep:
        yield f"parallel.ep={ep}: must divide the {sharding} ranks that share layers ({_product(parallel)})"
    if not config.trains_built_in_workload:
        return
    if experts.count % ep:
        yield f"model.experts.count={experts.count}: must be a multiple of parallel.ep={ep}"
    if sharding % ep == 0 and experts.ffn_dim % (same := sharding // ep):
        ranks = f"the {same} ranks that have the same experts ({_product(parallel)} / ep)"
        yield f"model.experts.ffn_dim={experts.ffn_dim}: must be a multiple of {ranks}"


def expert_problems(config: JobConfig) -> Iterator[str]:
    """Yield the settings that models with experts do not support, however many ranks share them."""
    if not has_experts(config):
        return
    count = config.model.experts.count
    if config.parallel.ep > 1 and _keeps_products(config):
        # FSDP's hooks around experts run inside the recomputed region, and torch 2.13 mistakes them for its operations.
        yield f"parallel.ep={config.parallel.ep} with train.recompute.keep=products: only keep=nothing goes with it"
    if config.train.compile:
        yield f"train.compile=true with model.experts.count={count}: each step gives experts other numbers of tokens"


def nearest_ep(config: JobConfig, parallel: ParallelConfig) -> int:
    """Return the `ep` nearest to `parallel.ep` that fits all other sizes; the larger of two."""
    sharding = parallel.expert_ranks(config.cluster.world_size)
    dense = config.trains_built_in_workload and not config.model.experts.count
    if parallel.ep == 1 or parallel.strategy == Strategy.DDP or dense:
        return 1
    if has_experts(config) and _keeps_products(config):
        return 1
    fitting = [ep for ep in range(1, sharding + 1) if can_share(config, sharding, ep)]
    return min(fitting, key=lambda ep: (max(ep / parallel.ep, parallel.ep / ep), -ep))


def can_share(config: JobConfig, sharding: int, ep: int) -> bool:
    """Return whether `ep` of the `sharding` ranks can share the experts, and the others shards of these."""
    if ep == 1 or sharding % ep:
        return ep == 1
    experts = config.model.experts
    return not config.trains_built_in_workload or (experts.count % ep == 0 and experts.ffn_dim % (sharding // ep) == 0)


def _product(parallel: ParallelConfig) -> str:
    return "parallel.dp_shard x cp" + (" x tp" if parallel.tp > 1 else "")


def _keeps_products(config: JobConfig) -> bool:
    return config.train.activation_checkpointing and config.train.recompute.keep == "products"
