"""Layouts that fit and are near the requested layout. Pure."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

from trainer.costs.micro_batches import MicroBatchError, micro_batch_count, takes
from trainer.costs.stage_split import measured_costs, problems
from trainer.parallel.context import can_exchange_heads
from trainer.parallel.expert import has_experts, nearest_ep
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.parallel_config import (
    ONE_GROUP,
    CpMethod,
    ParallelConfig,
    PipelineConfig,
    Strategy,
)
from trainer.protocol.config_sections.recipe_config import VOCABULARY_MULTIPLE, ModelConfig, TrainConfig

Fix = dict[str, Any]
"""Config keys and values to set together."""
PIPELINE = "parallel.pipeline."


def other_stages(config: JobConfig) -> Iterator[Fix]:
    """Yield fixes that divide the ranks into pipelines and the model into stages; an empty fix if they already do.

    A single stage is always included. Micro-batches depend on the other sizes, see `fitting_batch`.
    """
    pipeline, world = config.parallel.pipeline, config.cluster.world_size
    if pipeline.stages == 1:
        yield {}
        return
    for ranks in (ranks for ranks in range(2, world + 1) if world % ranks == 0):
        stages = ranks * pipeline.per_rank
        fix: Fix = {} if stages == pipeline.stages else {f"{PIPELINE}stages": stages}
        if not config.command:
            fix |= _incompatible_settings(config, pipeline)
        changed = with_fix(config, fix)
        if config.command or not list(problems(changed.parallel.pipeline, changed)):
            yield fix
    yield {f"{PIPELINE}stages": 1}


def _incompatible_settings(config: JobConfig, pipeline: PipelineConfig) -> Fix:
    """Return changes of settings incompatible with several stages, with split backward passes, or with the layers."""
    fix: Fix = {"model.tie_embeddings": False} if config.model.tie_embeddings else {}
    if pipeline.splits_backward:
        keys = ("activation_checkpointing", "compile")
        fix |= {f"train.{key}": False for key in keys if getattr(config.train, key)}
    if pipeline.layer_seconds and not _matches_layers(pipeline.layer_seconds, config):
        fix[f"{PIPELINE}layer_seconds"] = ()
    return fix


def _matches_layers(seconds: tuple[float, ...], config: JobConfig) -> bool:
    """Return whether the measured seconds match the layers of the model."""
    try:
        measured_costs(seconds, config.model)
    except ValueError:
        return False
    return True


def with_fix(config: JobConfig, fix: Fix) -> JobConfig:
    """Apply a fix found by `other_stages`."""
    of = {
        section: {key.removeprefix(section): value for key, value in fix.items() if key.startswith(section)}
        for section in (PIPELINE, "model.", "train.")
    }
    pipeline = replace(config.parallel.pipeline, **of[PIPELINE])
    return replace(
        config,
        parallel=replace(config.parallel, pipeline=pipeline),
        model=replace(config.model, **of["model."]),
        train=replace(config.train, **of["train."]),
    )


def fitting_batch(pipeline: PipelineConfig, train: TrainConfig, ranks: int, batch: int) -> Fix:
    """Return keys with which `ranks` data-parallel ranks can divide each batch into micro-batches.

    Prefers the fewest keys, then the batch size nearest to `batch`.
    """
    options = []
    for size in _batches(pipeline, train, ranks, batch):
        share = size // ranks
        counts = {pipeline.micro_batches, 0, *_nearest(pipeline, share)}
        for count, micro in product(counts, {train.micro_batch_size, 0}):
            changed = replace(train, batch_size=size, micro_batch_size=micro)
            if _can_count(replace(pipeline, micro_batches=count), changed, ranks):
                fix = {"train.batch_size": size, "train.micro_batch_size": micro, f"{PIPELINE}micro_batches": count}
                before = (train.batch_size, train.micro_batch_size, pipeline.micro_batches)
                options.append({key: fix[key] for key, old in zip(fix, before, strict=True) if fix[key] != old})
    return min(options, key=lambda fix: _rank(fix, pipeline, train))


def _batches(pipeline: PipelineConfig, train: TrainConfig, ranks: int, batch: int) -> set[int]:
    """Return multiples of the data-parallel ranks: `batch`, and the nearest sizes with a micro-batch for each stage."""
    units = (ranks * pipeline.stages, ranks * max(1, pipeline.micro_batches) * max(1, train.micro_batch_size))
    return {batch, *(max(unit, round(batch / unit) * unit) for unit in units)}


def _nearest(pipeline: PipelineConfig, share: int) -> list[int]:
    fitting = [count for count in range(1, share + 1) if share % count == 0 and takes(pipeline, count)]
    return sorted(fitting, key=lambda count: (abs(count - pipeline.micro_batches), -count))[:1]  # fewer idle ranks


def _can_count(pipeline: PipelineConfig, train: TrainConfig, ranks: int) -> bool:
    try:
        micro_batch_count(pipeline, train, ranks)
    except MicroBatchError:
        return False
    return train.batch_size % ranks == 0


def _rank(fix: Fix, pipeline: PipelineConfig, train: TrainConfig) -> tuple[int, int, int, int]:
    batch = abs(fix.get("train.batch_size", train.batch_size) - train.batch_size)
    count = abs(fix.get(f"{PIPELINE}micro_batches", pipeline.micro_batches) - pipeline.micro_batches)
    return len(fix), "train.batch_size" in fix, batch, count


MayChange = Callable[[str], bool]
"""Whether the value of a key may change: a run that has trained keeps its sizes."""

_PARALLEL, _MODEL, _TRAIN = "parallel.", "model.", "train."
_SPLIT = (_MODEL, "train.seq_len", "train.compile")
_MODEL_WEIGHT = 3.0
"""A different model is a different experiment, unlike a different layout."""
_ACROSS = "parallel.tp_across_nodes"
_ACROSS_COST = 3.0
"""Cost of waiting for the network in every layer."""
_WHOLE_COST = 4.0
"""Cost of reducing several stages to one: the model may be too large for it."""


def fixes(config: JobConfig, may_change: MayChange, *, second: bool) -> list[Fix]:
    """Return alternative ways to make the config fit, best first; empty if none is known.

    `second`: also return the best fix that changes other keys. If the sizes of model and batch may not change, only
    other numbers of nodes may be left.
    """
    found = _sort_fixes(config, may_change)
    if not found:
        return _other_nodes(config, may_change)
    others = [fix for fix in found[1:] if not fix.keys() & found[0].keys()]
    return [found[0], *others[: int(second)]]


def workable_tp(config: JobConfig) -> list[int]:
    """Return the sizes of `parallel.tp` that require no change of model or sequence."""
    world, cp = _ranks_of_stage(config), config.parallel.cp
    if config.cluster.world_size % config.parallel.pipeline.ranks:
        return []
    dividing = [tp for tp in _divisors(world) if world % (cp * tp) == 0]
    possible = [tp for tp in dividing if _within_node(config, tp)]
    return [tp for tp in possible if not any(key.startswith(_SPLIT) for key in _sizes(config, cp, tp))]


def _sort_fixes(config: JobConfig, may_change: MayChange) -> list[Fix]:
    possible = [fix for fix in _candidates(config) if all(map(may_change, fix))]
    return sorted(possible, key=lambda fix: _cost(fix, config))


def _candidates(config: JobConfig) -> Iterator[Fix]:
    """Yield fixes for each possible number of stages."""
    for fix in other_stages(config):
        for other in _meshes(with_fix(config, fix)):
            yield {**fix, **other}


def _meshes(config: JobConfig) -> Iterator[Fix]:
    """Yield one fix for each `tp` and `cp` that divide the ranks; all other sizes follow from them."""
    layout, world = config.parallel, _ranks_of_stage(config)
    for tp in _divisors(world):
        across = {} if _within_node(config, tp) else {_ACROSS: True}
        if across and tp != layout.tp:
            continue
        for cp in _divisors(world // tp) if layout.cp > 1 else (1,):
            mesh = {
                **_changed_values(_PARALLEL, cp=(layout.cp, cp), tp=(layout.tp, tp)),
                **_replicas_and_shards(layout, world // (cp * tp)),
            }
            yield {**mesh, **_experts(config, mesh), **across, **_sizes(config, cp, tp)}


def _experts(config: JobConfig, mesh: Fix) -> Fix:
    """Return a change of `ep` if the ranks of this mesh cannot share experts as requested."""
    if config.command:
        return {}
    sizes = {key.removeprefix(_PARALLEL): value for key, value in mesh.items()}
    ep = config.parallel.ep
    return _changed_values(_PARALLEL, ep=(ep, nearest_ep(config, replace(config.parallel, **sizes))))


def _other_nodes(config: JobConfig, may_change: MayChange) -> list[Fix]:
    """Return fixes with the next smaller and the next larger number of nodes on which the sizes fit."""
    cluster = config.cluster
    least = 2 if cluster.spare_nodes else 1  # the node that leads the job has no spare
    ways = []
    for numbers in (range(cluster.nodes - 1, least - 1, -1), range(cluster.nodes + 1, 2 * cluster.nodes + 1)):
        for nodes in numbers:
            if found := _sort_fixes(replace(config, cluster=replace(cluster, nodes=nodes)), may_change):
                ways.append({"cluster.nodes": nodes, **found[0]})
                break
    return ways


def _ranks_of_stage(config: JobConfig) -> int:
    """Return the number of ranks that hold the same layers."""
    return config.cluster.world_size // config.parallel.pipeline.ranks


def _within_node(config: JobConfig, tp: int) -> bool:
    """Return whether the ranks of a tensor-parallel group are on one node or may span several."""
    return bool(config.command) or config.parallel.tp_across_nodes or config.cluster.ranks_per_node % tp == 0


def _replicas_and_shards(layout: ParallelConfig, ranks: int) -> Fix:
    """Return the changes of strategy, replicas and shards for `ranks` data-parallel ranks."""
    strategy = layout.strategy
    if strategy == Strategy.HSDP and ranks == 1:
        strategy = Strategy.FSDP
    options = [
        _changed_values(
            _PARALLEL,
            strategy=(layout.strategy, str(strategy)),
            dp_replicate=(layout.dp_replicate, replicas),
            dp_shard=(layout.dp_shard, shards),
        )
        for replicas in {layout.dp_replicate, *_divisors(ranks)}
        for shards in {layout.dp_shard, 0}
        if _multiply(strategy, replicas, shards, ranks)
    ]
    return min(options, key=lambda fix: _distance(fix, vars(layout), _PARALLEL))


def _multiply(strategy: str, replicas: int, shards: int, ranks: int) -> bool:
    """Return whether replicas x shards equals `ranks` and suits the strategy; 0 shards: all remaining ranks."""
    if strategy == Strategy.DDP:
        return shards <= 1 and replicas in (1, ranks)
    if (strategy in ONE_GROUP and replicas > 1) or (strategy == Strategy.HSDP and replicas == 1):
        return False
    return ranks % replicas == 0 and shards in (0, ranks // replicas)


def _sizes(config: JobConfig, cp: int, tp: int) -> Fix:
    """Return the changes of model, batch and sequence for these sizes of `cp` and `tp`."""
    if config.command:
        return {}
    split = tp if config.trains_built_in_workload else 1
    sizes = {**_batch(config, _ranks_of_stage(config) // (cp * tp)), **_sequence(config.train, split)}
    sizes |= _heads(config.model, split)
    if not config.trains_built_in_workload:
        return sizes
    compiles = config.train.compile
    return {
        **sizes,
        **_widths(config.model, split),
        **_changed_values(_TRAIN, compile=(compiles, compiles and cp * tp == 1 and not has_experts(config))),
        **_method(config, sizes.get("model.heads", config.model.heads), cp, tp),
    }


def _method(config: JobConfig, heads: int, cp: int, tp: int) -> Fix:
    """Return a change of `cp_method` if it cannot divide `heads`."""
    method = config.parallel.cp_method
    fits = method != CpMethod.ULYSSES or can_exchange_heads(heads, replace(config.parallel, cp=cp, tp=tp))
    return _changed_values(_PARALLEL, cp_method=(method, method if fits else str(CpMethod.AUTO)))


def _batch(config: JobConfig, ranks: int) -> Fix:
    train = config.train
    batch, micro = train.batch_size, train.micro_batch_size
    if batch % ranks:
        keeps_micro = ranks * micro
        batch = _nearest_multiple(batch, keeps_micro if 0 < keeps_micro <= 2 * batch else ranks)
    if config.parallel.pipeline.stages > 1:
        return fitting_batch(config.parallel.pipeline, train, ranks, batch)
    share = batch // ranks
    fitting = _largest_divisor(share, micro) if micro else 0
    return _changed_values(_TRAIN, batch_size=(train.batch_size, batch), micro_batch_size=(micro, fitting))


def _sequence(train: TrainConfig, split: int) -> Fix:
    length, chunks = train.seq_len, train.loss_chunks
    if length % split:
        keeps_chunks = math.lcm(split, chunks)
        length = _nearest_multiple(length, keeps_chunks if keeps_chunks <= 2 * length else split)
    fitting = _largest_divisor(length, chunks)
    return _changed_values(_TRAIN, seq_len=(train.seq_len, length), loss_chunks=(chunks, fitting))


def _heads(model: ModelConfig, split: int) -> Fix:
    """Return heads that `split` ranks can share, with the fewest changes of heads, key and value heads, and width."""
    kv_heads, width = model.kv_heads, model.dim
    if not (kv_heads % split or model.heads % kv_heads or width % (2 * model.heads)):
        return {}
    near = (_nearest_multiple(model.heads, unit) for unit in (split, math.lcm(split, kv_heads)))
    shared = {model.heads, *_divisors(width), *near}
    options = []
    for heads in (number for number in shared if number % split == 0):
        fitting = [number for number in _divisors(heads) if number % split == 0]
        options.append(
            _changed_values(
                _MODEL,
                heads=(model.heads, heads),
                kv_heads=(kv_heads, kv_heads if kv_heads in fitting else min(fitting, key=_near(kv_heads))),
                dim=(width, width if width % (2 * heads) == 0 else _nearest_multiple(width, 2 * heads)),
            )
        )
    return min(options, key=lambda fix: _distance(fix, vars(model), _MODEL))


def _widths(model: ModelConfig, split: int) -> Fix:
    """Return the feed-forward's width and a vocabulary that is never smaller, because the data contains its tokens."""
    fits = model.experts.count or model.ffn_dim % split == 0
    ffn_dim = model.ffn_dim if fits else _nearest_multiple(model.ffn_dim, split)
    vocabulary = model.vocab_size
    if model.embedding_rows % split:
        rows = math.lcm(VOCABULARY_MULTIPLE, split)
        vocabulary = -(-vocabulary // rows) * rows
    return _changed_values(_MODEL, ffn_dim=(model.ffn_dim, ffn_dim), vocab_size=(model.vocab_size, vocabulary))


def _changed_values(section: str, **values: tuple[Any, Any]) -> Fix:
    """Return the names whose values differ, with their new values."""
    return {f"{section}{name}": now for name, (before, now) in values.items() if before != now}


def _cost(fix: Fix, config: JobConfig) -> float:
    sections = ((_PARALLEL, config.parallel), (PIPELINE, config.parallel.pipeline), (_TRAIN, config.train))
    cost = sum(_distance(fix, vars(values), section) for section, values in sections)
    cost += _MODEL_WEIGHT * _distance(fix, vars(config.model), _MODEL)
    return cost + _ACROSS_COST * (_ACROSS in fix) + _WHOLE_COST * (fix.get(f"{PIPELINE}stages") == 1)


def _distance(fix: Fix, before: Mapping[str, Any], section: str) -> float:
    """Return the cost of a section's changes: one per key, plus its distance from the requested value in octaves."""
    names = [key.removeprefix(section) for key in fix if key.startswith(section)]
    names = [name for name in names if "." not in name]
    return sum(1.0 + _octaves(before[name], fix[f"{section}{name}"]) for name in names)


def _octaves(before: Any, now: Any) -> float:
    is_size = isinstance(now, int) and not isinstance(now, bool) and before > 0 and now > 0
    return abs(math.log2(now / before)) if is_size else 0.0


def _near(wanted: int) -> Callable[[int], float]:
    return lambda number: abs(math.log2(number / wanted))


def _nearest_multiple(number: int, unit: int) -> int:
    """Return the nearest multiple that is not 0; the smaller of two."""
    return max(unit, (number + (unit - 1) // 2) // unit * unit)


def _largest_divisor(whole: int, most: int) -> int:
    return max(number for number in _divisors(whole) if number <= most)


@cache
def _divisors(whole: int) -> tuple[int, ...]:
    small = [number for number in range(1, math.isqrt(whole) + 1) if whole % number == 0]
    return tuple(sorted({*small, *(whole // number for number in small)}))


def format_fix(fix: Fix) -> str:
    """Format a fix for the command line."""
    return " ".join(f"{key}={_format_value(value)}" for key, value in fix.items())


def _format_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
