"""Tensor parallelism: ranks share each layer's matrices, and between layers the tokens of a sequence."""

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.parallel.dimension import Dimension, Fix, Recipe, Section, Splits, check_size


@dataclass(frozen=True, kw_only=True)
class TensorSection(Section):
    """Config keys for tensor parallelism."""

    tp: int = 1
    """Ranks that share each layer's matrices (tensor parallelism); must divide `cluster.ranks_per_node`."""

    tp_across_nodes: bool = False
    """Allow a `tp` that spans several nodes, although every layer then waits for the network between them."""

    def check(self) -> None:
        check_size("tp", self.tp)


class TensorParallelism(Dimension):
    """Tensor parallelism of heads, dense feed-forward layers and vocabulary.

    Each norm sees only part of the sequence (Korthikanti et al. 2022).
    """

    name, key, splits = "tp", "tp", Splits.MATRICES
    torch_module = "tensor_parallel"

    def describe(self, name: str, size: int) -> str:
        return f"{name}={size}"

    def problems(self, job: Recipe) -> Iterator[str]:
        model, tp, ranks = job.model, job.parallel.tp, job.cluster.ranks_per_node
        if ranks % tp and not job.parallel.tp_across_nodes:
            nodes = f"nodes of cluster.ranks_per_node={ranks}"
            yield f"parallel.tp={tp} spans {nodes}, over a slower network"
        if not job.trains_built_in_workload:
            return
        sizes = {"model.heads": model.heads, "model.kv_heads": model.kv_heads, "model.dim": model.dim}
        sizes |= {} if model.experts.count else {"model.ffn_dim": model.ffn_dim}  # experts are not split
        for key, size in {**sizes, "train.seq_len": job.train.seq_len}.items():
            if size % tp:
                yield f"{key}={size}: must be a multiple of parallel.tp={tp}"
        if (rows := model.embedding_rows) % tp:
            yield f"model.vocab_size={model.vocab_size}: its {rows} rows must be a multiple of parallel.tp={tp}"
        if job.train.compile and tp > 1:
            # Losses differed by 6e-3 after 8 steps with the same weights and data.
            yield f"train.compile=true with parallel.tp={tp}: torch 2.13 computes wrong gradients for compiled layers"

    def relaxations(self, job: Recipe) -> Fix:
        return {} if job.parallel.tp_across_nodes or job.parallel.tp == 1 else {"parallel.tp_across_nodes": True}


TENSOR = TensorParallelism()
