"""Problems of a layout, and the nearest layout without problems. Pure functions."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from operator import itemgetter
from typing import Any

from trainer.parallel.data import DATA, ONE_GROUP, Strategy, batch_problems
from trainer.parallel.dimension import Dimension, Fix, divisors
from trainer.parallel.parallel_config import DIMENSIONS
from trainer.parallel.pipeline import micro_batch_problem
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.recipe_config import ModelConfig

MayChange = Callable[[str], bool]
"""Whether the value of a key may change: a run that has trained keeps its sizes."""


def problems(config: JobConfig) -> list[str]:
    """Return all problems of the layout, each beginning with its key and value; empty if ranks can start.

    A user's own program gets neither batches nor a model from orch, and a user's workload divides its own model.
    """
    world = config.cluster.world_size
    found = list(DATA.problems(config))
    try:
        ranks = config.parallel.data_parallel_size(world)
    except ValueError as error:
        return [*found, str(error)] if config.command else [*found, str(error), *_recipe_problems(config)]
    if config.command:
        return found
    for dimension in DIMENSIONS:
        if dimension is not DATA:
            found += dimension.problems(config)
    return [*found, *batch_problems(config.train, ranks), *_recipe_problems(config)]


def _recipe_problems(config: JobConfig) -> Iterator[str]:
    train, model = config.train, config.model
    if train.seq_len % train.loss_chunks:
        yield f"train.loss_chunks={train.loss_chunks}: must divide train.seq_len={train.seq_len}"
    yield from model_problems(model)


def model_problems(model: ModelConfig) -> Iterator[str]:
    """Yield the conflicts between the sizes of a model."""
    if model.heads % model.kv_heads:
        yield f"model.kv_heads={model.kv_heads}: must divide model.heads={model.heads}"
    if model.dim % model.heads and not model.attention.head_dim:
        yield f"model.heads={model.heads}: must divide model.dim={model.dim}"
    elif (width := model.head_width) % 2:
        name = "model.attention.head_dim" if model.attention.head_dim else "model.dim / model.heads"
        yield f"{name} = {width}: must be even for the rotary embedding"


SHOWN = 3
"""Maximum number of problems in a message; the suggested keys solve all problems."""


@dataclass(frozen=True, kw_only=True)
class LayoutRefusal:
    """Refusal of a layout: the layout's problems, and the nearest layout that fits (empty if none was found)."""

    what: str
    fix: Fix

    @property
    def hint(self) -> str:
        """Return the keys to set, or an empty string if no fitting layout was found."""
        return " ".join(["type", *map(_format_key, self.fix.items())]) if self.fix else ""

    def __str__(self) -> str:
        return f"{self.what}: {self.hint}" if self.fix else self.what


def _format_key(item: tuple[str, Any]) -> str:
    key, value = item
    return f"{key}={'[]' if value == () else str(value).lower() if isinstance(value, bool) else value}"


def refusal(config: JobConfig, may_change: MayChange = lambda key: True) -> LayoutRefusal | None:
    """Return why the config does not fit, or None; only keys that `may_change` accepts are offered as a fix."""
    found = problems(config)
    if not found:
        return None
    words = found[:SHOWN] + ([f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else [])
    fix = nearest_fix(config, may_change) or _other_nodes(config, may_change)
    return LayoutRefusal(what="; ".join(words), fix=fix)


CHOICES = 6
"""Sizes tried for each dimension: the nearest divisors of the world size, and 1."""
EXTRA_COST = {"parallel.tp_across_nodes": 3.0, "model.tie_embeddings": 2.0}
"""Extra costs of a slow network in every layer, and of a different model. Each key costs 1, plus its octaves."""
WHOLE_COST = 4.0
"""Cost of replacing several stages with one, for which the model may be too large."""


def nearest_fix(config: JobConfig, may_change: MayChange) -> Fix:
    """Return the fewest and smallest changes that solve all problems; empty if none were found."""
    if next(model_problems(config.model), "") and not config.command:
        return {}
    best: Fix = {}
    least = math.inf
    for cost, fix in sorted(_candidates(config), key=itemgetter(0)):
        if cost >= least:
            break
        whole = fix | _batch(with_fix(config, fix))
        total = _cost(config, whole)
        if total < least and all(map(may_change, whole)) and not problems(with_fix(config, whole)):
            best, least = whole, total
    return best


def _candidates(config: JobConfig) -> Iterator[tuple[float, Fix]]:
    """Yield alternative sizes and settings with their cost; the batch follows from them."""
    for sizes in product(*(_sizes(dimension, config) for dimension in DIMENSIONS if dimension is not DATA)):
        fix: Fix = {key: value for part in sizes for key, value in part.items()}
        for data in _data_sizes(with_fix(config, fix)):
            for settings in _settings(config):
                whole = {**fix, **data, **settings}
                yield _cost(config, whole), whole


def _sizes(dimension: Dimension, config: JobConfig) -> list[Fix]:
    """Return the keys for other sizes of a dimension with several ranks, and {} for its current size."""
    now = dimension.size(config.parallel)
    if now == 1:
        return [{}]
    near = sorted(divisors(config.cluster.world_size), key=lambda size: (abs(math.log2(size / now)), -size))
    sizes = dict.fromkeys((now, *near[:CHOICES], 1))
    return [{} if size == now else dimension.resize(config.parallel, size) for size in sizes]


def _settings(config: JobConfig) -> Iterator[Fix]:
    train = config.train
    every: Fix = {"train.compile": False} if train.compile else {}
    if train.seq_len % train.loss_chunks:
        every["train.loss_chunks"] = max(size for size in divisors(train.seq_len) if size <= train.loss_chunks)
    for dimension in DIMENSIONS:
        every |= dimension.relaxations(config)
    yield {}
    yield from ({key: value} for key, value in every.items())
    yield every


def _data_sizes(config: JobConfig) -> Iterator[Fix]:
    """Yield strategies, replicas and shards for the ranks that the other dimensions leave."""
    layout, world = config.parallel, config.cluster.world_size
    ranks = max(1, world // layout.ranks_per_share)
    strategy = Strategy.FSDP if layout.strategy == Strategy.HSDP and ranks == 1 else layout.strategy
    common = math.gcd(layout.dp_replicate, ranks)
    for replicas in dict.fromkeys((layout.dp_replicate, common, 1, *divisors(ranks)[1:2])):
        for shards in dict.fromkeys((layout.dp_shard, 0)):
            fits = ranks % replicas == 0 and shards in (0, ranks // replicas)
            if strategy == Strategy.DDP:
                fits = shards <= 1 and replicas in (1, ranks)
            elif strategy in ONE_GROUP or strategy == Strategy.HSDP:
                fits = fits and (replicas == 1) is (strategy != Strategy.HSDP)
            if fits:
                new = {"strategy": str(strategy), "dp_replicate": replicas, "dp_shard": shards}
                yield {f"parallel.{key}": value for key, value in new.items() if value != getattr(layout, key)}


def _batch(config: JobConfig) -> Fix:
    """Return the changes to batch and micro-batches that give every data-parallel rank an equal share."""
    if config.command:
        return {}
    ranks = max(1, config.cluster.world_size // config.parallel.ranks_per_share)
    train, pipeline = config.train, config.parallel.pipeline
    units = (1, ranks, ranks * max(1, train.micro_batch_size), ranks * pipeline.stages)
    present = {
        "train.micro_batch_size": train.micro_batch_size,
        "parallel.pipeline.micro_batches": pipeline.micro_batches,
        "train.batch_size": train.batch_size,
    }
    batches = {max(unit, round(train.batch_size / unit) * unit) for unit in units}
    options = product({train.micro_batch_size, 0}, {pipeline.micro_batches, 0}, batches)
    fixes = [dict(set(zip(present, option, strict=True)) - set(present.items())) for option in options]
    for fix in sorted(fixes, key=lambda fix: _cost(config, fix)):
        changed = with_fix(config, fix)
        found = batch_problems(changed.train, ranks)
        if not (found or micro_batch_problem(changed.parallel.pipeline, changed.train, ranks)):
            return fix
    return {}


def _other_nodes(config: JobConfig, may_change: MayChange) -> Fix:
    """Return the nearest number of nodes on which the layout fits, with further changes; empty if none was found."""
    cluster = config.cluster
    least = 2 if cluster.spare_nodes else 1  # the job's lead node has no spare
    for nodes in sorted(range(least, 2 * cluster.nodes + 1), key=lambda nodes: (abs(nodes - cluster.nodes), nodes)):
        changed = replace(config, cluster=replace(cluster, nodes=nodes))
        if nodes != cluster.nodes:
            if not problems(changed):
                return {"cluster.nodes": nodes}
            if fix := nearest_fix(changed, may_change):
                return {"cluster.nodes": nodes, **fix}
    return {}


def with_fix(config: JobConfig, fix: Fix) -> JobConfig:
    """Return the config with some keys changed."""
    for key, value in fix.items():
        config = _replace_key(config, key.split("."), value)
    return config


def _replace_key(section: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    return replace(section, **{name: _replace_key(getattr(section, name), rest, value) if rest else value})


def _cost(config: JobConfig, fix: Fix) -> float:
    return sum(1.0 + EXTRA_COST.get(key, 0.0) + _distance(config, key, value) for key, value in fix.items())


def _distance(config: Any, key: str, value: Any) -> float:
    """Return the distance in octaves between a size and the current one; larger sizes win a tie."""
    for name in key.split("."):
        config = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or min(config, value) < 1:
        return 0.0
    whole = WHOLE_COST if key.endswith("stages") and value == 1 else 0.0
    return whole + abs(math.log2(value / config)) - 1e-6 * value
