"""Problems of a layout: sizes that its ranks cannot share. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from trainer.costs.micro_batches import MicroBatchError, micro_batch_size
from trainer.costs.stage_split import problems as pipeline_problems
from trainer.parallel.context import can_exchange_heads
from trainer.parallel.expert import ep_problems, expert_problems
from trainer.parallel.layout_fixes import Fix, MayChange, fixes, format_fix, workable_tp
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.parallel_config import ONE_GROUP, CpMethod, ParallelConfig, Strategy
from trainer.protocol.config_sections.recipe_config import ModelConfig, TrainConfig


class Problem(NamedTuple):
    """A size that does not fit; `what` begins with its key and value."""

    what: str
    of_tp: bool = False
    """Whether another `parallel.tp` would solve the problem as well as other sizes."""


def problems(config: JobConfig) -> list[Problem]:
    """Return all problems of the layout; empty if ranks can start.

    A user's own program takes neither batches nor a model from orch, and a user's workload divides its own model.
    """
    layout, world = config.parallel, config.cluster.world_size
    found = [*_strategy(layout), *_product(layout, world)]
    if config.command:
        return found
    if not found:
        found += batch_problems(config.train, layout.data_parallel_size(world)) or _pipeline(config)
        found += map(Problem, ep_problems(config, layout.expert_ranks(world)))
    found += [*_nodes(config), *_chunks(config.train), *_heads(config.model)]
    if not config.trains_built_in_workload:
        return found
    return [*found, *_split(config), *_shared_sequences(config), *map(Problem, expert_problems(config))]


def batch_problems(train: TrainConfig, ranks: int) -> list[Problem]:
    """Check that each of `ranks` data-parallel ranks gets an equal share of every batch."""
    if train.batch_size % ranks:
        return [
            Problem(
                f"train.batch_size={train.batch_size}: must be a multiple of the {ranks} data-parallel ranks "
                "(parallel.dp_replicate x dp_shard)"
            )
        ]
    share, micro = train.batch_size // ranks, train.micro_batch_size
    if micro and share % micro:
        what = f"train.micro_batch_size={micro}: must divide the {share} sequences of each data-parallel rank"
        return [Problem(what)]
    return []


def _strategy(layout: ParallelConfig) -> Iterator[Problem]:
    if layout.strategy in ONE_GROUP and layout.dp_replicate > 1:
        yield Problem(f"parallel.strategy={layout.strategy} has one replica, but dp_replicate={layout.dp_replicate}")
    if layout.strategy == Strategy.HSDP and layout.dp_replicate == 1:
        yield Problem("parallel.strategy=hsdp needs 2 replicas or more, but dp_replicate=1")
    if layout.strategy == Strategy.DDP and layout.dp_shard > 1:
        yield Problem(f"parallel.strategy=ddp shards nothing, but dp_shard={layout.dp_shard}")


def _product(layout: ParallelConfig, world: int) -> Iterator[Problem]:
    pipeline = layout.pipeline
    if world % pipeline.ranks:
        yield Problem(
            f"parallel.pipeline.stages={pipeline.stages} is a pipeline of {pipeline.ranks} ranks, which must divide "
            f"the {world} of cluster.nodes x cluster.ranks_per_node"
        )
        return
    try:
        layout.mesh_sizes(world)
    except ValueError as error:
        yield Problem(str(error), of_tp=world % layout.ranks_per_share != 0)


def _pipeline(config: JobConfig) -> list[Problem]:
    """Return problems of splitting model and batch into several stages."""
    pipeline = config.parallel.pipeline
    if pipeline.stages == 1:
        return []
    found = list(pipeline_problems(pipeline, config))
    if not found:
        try:
            micro_batch_size(pipeline, config.train, config.parallel.data_parallel_size(config.cluster.world_size))
        except MicroBatchError as error:
            found = [str(error)]
    # Their advice is sufficient only for a single problem.
    return [Problem(what.partition(": type ")[0]) for what in found]


def _nodes(config: JobConfig) -> Iterator[Problem]:
    """Check that tensor-parallel groups, which exchange activations several times per layer, stay within a node."""
    tp, ranks = config.parallel.tp, config.cluster.ranks_per_node
    if ranks % tp and config.cluster.world_size % tp == 0 and not config.parallel.tp_across_nodes:
        what = f"parallel.tp={tp} reaches across nodes of cluster.ranks_per_node={ranks}, over a network that slows it"
        yield Problem(what, of_tp=True)


def _chunks(train: TrainConfig) -> Iterator[Problem]:
    if train.seq_len % train.loss_chunks:
        yield Problem(f"train.loss_chunks={train.loss_chunks}: must divide train.seq_len={train.seq_len}")


def _heads(model: ModelConfig) -> Iterator[Problem]:
    if model.heads % model.kv_heads:
        yield Problem(f"model.kv_heads={model.kv_heads}: must divide model.heads={model.heads}")
    if model.dim % model.heads:
        yield Problem(f"model.heads={model.heads}: must divide model.dim={model.dim}")
    elif (width := model.dim // model.heads) % 2:
        yield Problem(f"model.dim / model.heads = {width}: must be even for the rotary embedding")


def _split(config: JobConfig) -> Iterator[Problem]:
    """Check the sizes that tensor parallelism splits: heads, feed-forward and vocabulary, and the sequence in norms.

    Impossible sizes of `tp` are reported elsewhere.
    """
    model, tp = config.model, config.parallel.tp
    if config.cluster.world_size % tp:
        return
    sizes = {
        "model.heads": model.heads,
        "model.kv_heads": model.kv_heads,
        "model.dim": model.dim,
        **({} if model.experts.count else {"model.ffn_dim": model.ffn_dim}),  # absent in experts
        "train.seq_len": config.train.seq_len,
    }
    for key, size in sizes.items():
        if size % tp:
            yield Problem(f"{key}={size}: must be a multiple of parallel.tp={tp}", of_tp=True)
    if (rows := model.embedding_rows) % tp:
        what = f"model.vocab_size={model.vocab_size}: its {rows} rows must be a multiple of parallel.tp={tp}"
        yield Problem(what, of_tp=True)
    if config.train.compile and tp > 1:
        # Losses differed by 6e-3 after 8 steps with the same weights and data.
        what = f"train.compile=true with parallel.tp={tp}: torch 2.13 computes other gradients for compiled layers"
        yield Problem(what, of_tp=True)


def _shared_sequences(config: JobConfig) -> Iterator[Problem]:
    """Check that the heads can be divided if the method requires it; context parallelism takes any sequence length."""
    heads, parallel = config.model.heads, config.parallel
    if config.cluster.world_size % parallel.ranks_per_share:
        return
    if parallel.cp_method == CpMethod.ULYSSES and not can_exchange_heads(heads, parallel):
        unit = "parallel.cp" if parallel.tp == 1 else "parallel.cp x tp"
        size = parallel.cp * parallel.tp
        yield Problem(f"model.heads={heads}: must be a multiple of {unit}={size} for parallel.cp_method=ulysses")
    if config.train.compile and parallel.cp > 1:
        yield Problem(f"train.compile=true with parallel.cp={parallel.cp}: compiled layers cannot share a sequence")


SHOWN = 3
"""Maximum number of problems in a message; the suggested keys solve all problems."""


@dataclass(frozen=True, kw_only=True)
class LayoutRefusal:
    """Why ranks cannot start, and alternative fixes, each sufficient alone."""

    what: str
    fixes: tuple[Fix, ...]

    @property
    def hint(self) -> str:
        """Return the keys to type; empty if no fitting sizes are known."""
        return f"type {', or '.join(map(format_fix, self.fixes))}" if self.fixes else ""

    def __str__(self) -> str:
        return f"{self.what}: {self.hint}" if self.fixes else self.what


def refusal(config: JobConfig, may_change: MayChange = lambda key: True) -> LayoutRefusal | None:
    """Return why the config does not fit, or None; only keys that `may_change` are offered as fixes."""
    found = problems(config)
    if not found:
        return None
    of_tp = any(problem.of_tp for problem in found)
    ways = fixes(config, may_change, second=of_tp)
    found += [problem for problem in _then(config, ways) if problem not in found]
    words = [problem.what for problem in found[:SHOWN]]
    if len(found) > SHOWN:
        words.append(f"and {len(found) - SHOWN} more")
    if of_tp and (sizes := workable_tp(config)):
        words.append(f"parallel.tp may be {_join_alternatives(sizes)}")
    return LayoutRefusal(what="; ".join(words), fixes=tuple(ways))


def _then(config: JobConfig, ways: list[Fix]) -> list[Problem]:
    """Return the batch problems that remain after the first fix."""
    if config.command or not ways or "cluster.nodes" in ways[0]:
        return []
    sizes = (ways[0].get(f"parallel.{name}", getattr(config.parallel, name)) for name in ("cp", "tp"))
    pipeline = config.parallel.pipeline
    stages = ways[0].get("parallel.pipeline.stages", pipeline.stages)
    ranks = config.cluster.world_size // (1 if stages == 1 else stages // pipeline.per_rank)
    return batch_problems(config.train, ranks // math.prod(sizes))


def _join_alternatives(sizes: list[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last
