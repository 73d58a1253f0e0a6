"""Configuration of cluster, model and training, with the sizes that a layout divides among ranks."""

from dataclasses import dataclass, field

from trainer.protocol.config_sections.limits import require_least, require_positive
from trainer.protocol.config_sections.node_setup_config import NodeSetup
from trainer.protocol.config_sections.scheduler_kinds import choice_words, choices


@dataclass(frozen=True, kw_only=True)
class ClusterShape(NodeSetup):
    """Location and size of the run, the part of `cluster` that the job itself needs."""

    kind: str = "auto"
    """`slurm`, `local` (simulated nodes on this machine), or `auto`: slurm if sbatch is found, else local."""

    root: str = "~/orch-runs"
    """Folder for all runs. On a cluster, it must be on the shared file system."""

    nodes: int = 1
    """Number of nodes; on `local`, number of simulated nodes."""

    spare_nodes: int = 0
    """Idle nodes in the job that take over the ranks of a dead node."""

    min_nodes: int = 0
    """Fewest nodes to train on, with the same batch, while nodes are missing for longer than `recovery.patience`; 0:
    always `nodes`."""

    ranks_per_node: int = 1
    """Ranks per node; on GPU nodes, one per GPU."""

    gpus_per_node: int = 0
    """GPUs per node; 0 trains on CPUs with gloo."""

    cpus_per_task: int = 1
    """CPU cores per node, shared by its ranks (Slurm runs one task per node)."""

    mem: str = ""
    """Memory per node in Slurm's notation (`64G`); `0`: all of it; empty: the partition's default."""

    time: str = "1:00:00"
    """Time limit of one attempt in Slurm's notation (`2-00:00:00`; a bare number is minutes, at most 1440); a longer
    run continues in a new attempt."""

    interface: str = ""
    """Network interface for rendezvous and collectives (`ib0`); empty: the interface that the host name resolves to."""

    signal_lead: int = 120
    """Seconds before the time limit at which the job starts to save and stop (also sbatch's `--signal`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in choices():
            raise ValueError(f"cluster.kind={self.kind}: must be {choice_words()}")
        require_least("cluster", self, nodes=1, ranks_per_node=1, cpus_per_task=1, spare_nodes=0)
        if self.gpus_per_node not in (0, self.ranks_per_node):
            raise ValueError(
                f"cluster.gpus_per_node={self.gpus_per_node}: must be 0 or equal cluster.ranks_per_node"
                f"={self.ranks_per_node}, one GPU for each rank: type cluster.gpus_per_node={self.ranks_per_node}"
            )

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def all_nodes(self) -> int:
        """Return the number of nodes requested from the scheduler: training nodes and spares."""
        return self.nodes + self.spare_nodes


VOCABULARY_MULTIPLE = 64
"""In every layout the number of embedding rows is a multiple of this, so that ranks can share them evenly."""


SCORES = ("sigmoid", "softmax")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Mixture of experts: every layer has `count` small feed-forward networks, chosen per token, instead of one."""

    count: int = 0
    """Experts in each layer; 0: every layer has one feed-forward network for all tokens (`model.ffn_dim`)."""
    per_token: int = 2
    """Number of experts that process each token. Their outputs are added with weights that sum to 1."""
    ffn_dim: int = 128
    """Inner width of each expert (SwiGLU)."""
    scores: str = "sigmoid"
    """Function of the router's outputs by which experts are chosen and weighted: `sigmoid`, or `softmax` (Mixtral)."""
    balance_rate: float = 1e-3
    """Change in an expert's bias after a step in which it got more or fewer tokens than the mean; 0: no change."""

    def __post_init__(self) -> None:
        require_least("model.experts", self, count=0, per_token=1, ffn_dim=1, balance_rate=0)
        if self.scores not in SCORES:
            raise ValueError(f"model.experts.scores={self.scores}: must be {SCORES[0]} or {SCORES[1]}")
        if 0 < self.count < self.per_token:
            raise ValueError(
                f"model.experts.per_token={self.per_token}: must be at most model.experts.count={self.count}: "
                f"type model.experts.per_token={self.count}"
            )


ROTARY_KINDS = ("none", "linear", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeScalingConfig:
    """Scaling of the rotary embedding, for sequences longer than those of pretraining."""

    kind: str = "none"
    """`none`, `linear` (all frequencies divided by `factor`), or `llama3` (only low ones, as in Llama 3.1)."""
    factor: float = 1.0
    """Divisor of the frequencies."""
    low_freq_factor: float = 1.0
    """`llama3`: waves longer than `original_length / low_freq_factor` are divided by `factor`."""
    high_freq_factor: float = 4.0
    """`llama3`: waves shorter than `original_length / high_freq_factor` stay as they are."""
    original_length: int = 8192
    """`llama3`: sequence length of pretraining."""

    def __post_init__(self) -> None:
        where = "model.rope_scaling"
        if self.kind not in ROTARY_KINDS:
            raise ValueError(f"{where}.kind={self.kind}: must be one of {', '.join(ROTARY_KINDS)}")
        require_positive(where, self, "factor", "low_freq_factor", "high_freq_factor")
        require_least(where, self, original_length=1)
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            low = f"{where}.low_freq_factor={self.low_freq_factor}"
            raise ValueError(f"{where}.high_freq_factor={self.high_freq_factor}: must be greater than {low}")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Differences of attention between decoders."""

    head_dim: int = 0
    """Width of a head; 0: `model.dim / model.heads`."""
    qkv_bias: bool = False
    """Add biases to queries, keys and values (Qwen 2)."""
    qk_norm: bool = False
    """Apply RMSNorm to each head of queries and keys (Qwen 3)."""
    window: int = 0
    """Each token attends to so many tokens, itself included (Mistral); 0: to all before it."""

    def __post_init__(self) -> None:
        require_least("model.attention", self, head_dim=0, window=0)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The built-in decoder: Llama and its relatives (Mistral, Mixtral, Qwen 2 and 3)."""

    vocab_size: int = 257
    """Number of tokens; byte-level data has 256 bytes and a document separator."""
    dim: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of decoder layers."""
    heads: int = 4
    """Query heads; must divide `dim`, unless `attention.head_dim` is set."""
    kv_heads: int = 2
    """Key and value heads (grouped-query attention); must divide `heads`."""
    ffn_dim: int = 384
    """Inner width of the SwiGLU feed-forward network."""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    rope_theta: float = 10000.0
    """Base of the rotary embedding's frequencies."""
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm."""
    tie_embeddings: bool = False
    """Also use the token embedding as the output matrix."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)

    def __post_init__(self) -> None:
        require_least("model", self, vocab_size=1, dim=1, layers=1, heads=1, kv_heads=1, ffn_dim=1)
        require_positive("model", self, "rope_theta", "norm_eps")

    @property
    def head_width(self) -> int:
        return self.attention.head_dim or self.dim // self.heads

    def window(self, length: int) -> int:
        """Return the sliding window in sequences of this length; 0: every token attends to all before it."""
        return self.attention.window if self.attention.window < length else 0

    @property
    def embedding_rows(self) -> int:
        """Return the vocabulary size including padding rows, which are trained too."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


KEEP = ("nothing", "products")


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Settings for activation recomputation (`train.activation_checkpointing`). They do not affect results."""

    every: int = 1
    """Recompute every n-th layer. The other layers keep their activations."""
    keep: str = "nothing"
    """Activations kept in a recomputed layer: `nothing`, or the results of its matrix `products` and of attention."""

    def __post_init__(self) -> None:
        require_least("train.recompute", self, every=1)
        if self.keep not in KEEP:
            raise ValueError(f"train.recompute.keep={self.keep}: must be {KEEP[0]} or {KEEP[1]}")


DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Training length, batch size and precision."""

    steps: int = 200
    """Optimizer steps in the whole run."""
    seed: int = 1
    """Seed for the weights, the data order and every rank's random generators."""
    batch_size: int = 16
    """Sequences per optimizer step across all ranks."""
    micro_batch_size: int = 0
    """Sequences per forward pass and data-parallel rank. Smaller values accumulate gradients.

    0: all sequences of the rank in one pass.
    """
    seq_len: int = 128
    """Tokens per sequence."""
    dtype: str = "bfloat16"
    """Precision of the forward and backward passes: `bfloat16`, `float16` (with dynamic loss scaling) or `float32`.
    Gradients are reduced in float32."""
    activation_checkpointing: bool = False
    """Recompute layers in the backward pass instead of keeping their activations (built-in model)."""
    compile: bool = False
    """Compile each layer with torch.compile (built-in model). Needs a C++ compiler on the nodes; see `orch doctor`."""
    peak_tflops: float = 0.0
    """Peak TFLOP/s of one device, the denominator of MFU; 0: look it up in a table of GPUs."""
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    loss_chunks: int = 1
    """Number of chunks per sequence whose logits are computed one after another (built-in model). More than one chunk
    needs less memory, but the logits are computed twice."""

    def __post_init__(self) -> None:
        require_least("train", self, steps=1, batch_size=1, seq_len=1, loss_chunks=1, peak_tflops=0, micro_batch_size=0)
        if self.dtype not in DTYPES:
            raise ValueError(f"train.dtype={self.dtype}: must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
