"""Bytes of the states on rank 0, derived from the shapes of the whole model."""

from collections.abc import Iterator
from math import prod

import torch

from trainer.costs.stage_split import split_model, stages_of_rank
from trainer.models.llama import Llama
from trainer.protocol.config import JobConfig

ROWS = (".wq.", ".wk.", ".wv.", ".w1.", ".w3.", "embedding.", "output.")
COLUMNS = (".wo.", ".w2.")


def expected_states(config: JobConfig) -> dict[str, object]:
    """In float32: weights and gradients, both moments of Adam, and a step count for each parameter."""
    shapes = list(local_shapes(config))
    size = 4 * sum(map(prod, shapes))
    optimizer = 2 * size + 4 * len(shapes)
    return {
        "parameters": size, "gradients": size, "optimizer": optimizer, "on_host": list(config.parallel.fsdp.on_host),
    }  # fmt: skip


def local_shapes(config: JobConfig) -> Iterator[tuple[int, ...]]:
    """Experts are divided by number and then width, other tensors by `tp` and then by their first dimension."""
    parallel = config.parallel
    sizes, ep = parallel.parameter_sizes(config.cluster.world_size), parallel.ep
    with torch.device("meta"):
        model = Llama(config.model, config.train)
    for name, parameter in model.named_parameters():
        if not is_on_rank_zero(config, name):
            continue
        shape = list(parameter.shape)
        if ".experts." in name and ep > 1:
            yield shape[0] // ep, shape[1] * ep // (sizes["dp_shard"] * sizes["tp"]), shape[2]
            continue
        for dim, parts in enumerate((ROWS, COLUMNS)):
            if "experts" not in name and any(part in f".{name}" for part in parts):
                shape[dim] //= sizes["tp"]
        yield -(-shape[0] // sizes["dp_shard"]), *shape[1:]


def is_on_rank_zero(config: JobConfig, name: str) -> bool:
    pipeline = config.parallel.pipeline
    parts = [split_model(pipeline, config.model, config.train).parts[stage] for stage in stages_of_rank(pipeline, 0)]
    if name.startswith("layers."):
        return any(int(name.split(".")[1]) in part.layers for part in parts)
    return any(part.is_first if name.startswith("embedding") else part.is_last for part in parts)
