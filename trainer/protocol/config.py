"""Resolved configuration as the job reads it from `config.json`: plain dataclasses without OmegaConf."""

import functools
import hashlib
import types
import typing
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from checkpointing.config import CheckpointConfig
from checkpointing.storage.durable import canonical, read_json
from trainer.protocol.command_progress import CommandCheckpointsConfig, CommandProgressConfig
from trainer.protocol.config_sections.fault_detection_config import DetectionConfig, DrillConfig
from trainer.protocol.config_sections.moved_keys import in_present_keys
from trainer.protocol.config_sections.parallel_config import ExpertsConfig, ParallelConfig
from trainer.protocol.config_sections.scheduler_kinds import choice_words, choices
from trainer.protocol.logs.log_rotation import LogsConfig
from trainer.protocol.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """Location and size of the run: the part of `cluster` that the job itself needs."""

    kind: str = "auto"
    """`slurm`, `local` (simulated nodes on this machine), or `auto`: slurm if sbatch is found, else local."""

    root: str = "~/orch-runs"
    """Folder of all runs; on a cluster it must be on the shared file system."""

    nodes: int = 1
    """Number of nodes; on `local`, number of simulated nodes."""

    spare_nodes: int = 0
    """Extra nodes in the job, idle until another node dies; they then take over its ranks in the same job."""

    min_nodes: int = 0
    """Fewest nodes to train on, with the same batch, while nodes are missing for longer than `recovery.patience`; 0:
    always `nodes`."""

    ranks_per_node: int = 1
    """Ranks per node; on GPU nodes one per GPU."""

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
        if self.kind not in choices():
            raise ValueError(f"cluster.kind={self.kind}: must be {choice_words()}")
        for name in ("nodes", "ranks_per_node", "cpus_per_task"):
            if getattr(self, name) < 1:
                raise ValueError(f"cluster.{name}={getattr(self, name)}: must be at least 1")
        if self.spare_nodes < 0:
            raise ValueError(f"cluster.spare_nodes={self.spare_nodes}: must be 0 or more")
        if self.gpus_per_node not in (0, self.ranks_per_node):
            raise ValueError(
                f"cluster.gpus_per_node={self.gpus_per_node}: must be 0 or equal cluster.ranks_per_node"
                f"={self.ranks_per_node}, one GPU for each rank: type cluster.gpus_per_node={self.ranks_per_node}"
                + (f", or cluster.ranks_per_node={self.gpus_per_node}" if self.gpus_per_node > 0 else "")
            )

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def all_nodes(self) -> int:
        """Return the number of nodes requested from the scheduler: training nodes and spares."""
        return self.nodes + self.spare_nodes


VOCABULARY_MULTIPLE = 64
"""The number of embedding rows is a multiple of this in every layout, so that ranks can share them evenly."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The built-in Llama-style decoder."""

    vocab_size: int = 257
    """Number of tokens; byte-level data has 256 bytes and a document separator."""
    dim: int = 128
    """Width of the residual stream."""
    layers: int = 4
    """Number of decoder layers."""
    heads: int = 4
    """Query heads; must divide `dim`."""
    kv_heads: int = 2
    """Key and value heads (grouped-query attention); must divide `heads`."""
    ffn_dim: int = 384
    """Inner width of the SwiGLU feed-forward."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding's frequencies."""
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm."""
    tie_embeddings: bool = False
    """Use the token embedding as the output matrix as well."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)}: must be at least 1")
        for name in ("rope_theta", "norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"model.{name}={getattr(self, name)}: must be above 0")

    @property
    def embedding_rows(self) -> int:
        """Return the vocabulary size including padding rows, which are trained too."""
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


KEEP = ("nothing", "products")


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Settings of activation recomputation (`train.activation_checkpointing`); results do not depend on them."""

    every: int = 1
    """Recompute every n-th layer; the others keep their activations."""
    keep: str = "nothing"
    """Activations kept in a recomputed layer: `nothing`, or the results of its matrix `products` and of attention,
    which take most of the time."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"train.recompute.every={self.every}: must be at least 1")
        if self.keep not in KEEP:
            raise ValueError(f"train.recompute.keep={self.keep}: must be {KEEP[0]} or {KEEP[1]}")


DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, batch size and precision of training."""

    steps: int = 200
    """Optimizer steps of the whole run."""
    seed: int = 1
    """Seed of weights, data order and every rank's generators."""
    batch_size: int = 16
    """Sequences per optimizer step over all ranks."""
    micro_batch_size: int = 0
    """Sequences per forward pass and data-parallel rank; smaller values accumulate gradients.

    0: the whole share at once.
    """
    seq_len: int = 128
    """Tokens per sequence."""
    dtype: str = "bfloat16"
    """Precision of forward and backward: `bfloat16`, `float16` (with dynamic loss scaling) or `float32`; gradients are
    reduced in float32."""
    activation_checkpointing: bool = False
    """Recompute layers in the backward pass instead of keeping their activations (built-in model)."""
    compile: bool = False
    """Compile each layer with torch.compile (built-in model); needs a C++ compiler on the nodes, see `orch doctor`."""
    peak_tflops: float = 0.0
    """Peak TFLOP/s of one device, the denominator of MFU; 0: look it up in a table of GPUs."""
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    loss_chunks: int = 1
    """Chunks of each sequence whose logits are computed one after the other (built-in model): less memory, computed
    twice."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "seq_len", "loss_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)}: must be at least 1")
        if not 0 <= self.peak_tflops < float("inf"):
            raise ValueError(f"train.peak_tflops={self.peak_tflops}: must be 0 or more")
        if self.micro_batch_size < 0:
            raise ValueError(f"train.micro_batch_size={self.micro_batch_size}: must be 0 or more")
        if self.dtype not in DTYPES:
            raise ValueError(f"train.dtype={self.dtype}: must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its learning-rate schedule, and gradient clipping."""

    lr: float = 3e-3
    """Peak learning rate of AdamW."""
    min_lr_ratio: float = 0.1
    """Final learning rate of the cosine schedule, as a share of `lr`."""
    warmup_steps: int = 10
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices."""
    clip_norm: float = 1.0
    """Gradient norm above which gradients are clipped; 0: no clipping."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if not 0 <= getattr(self, item.name) < float("inf"):
                raise ValueError(f"optimizer.{item.name}={getattr(self, item.name)}: must be 0 or more")
        if self.min_lr_ratio > 1:
            raise ValueError(f"optimizer.min_lr_ratio={self.min_lr_ratio}: must be from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data."""

    path: str = ""
    """Folder of token shards from `orch data prepare`; with `text`, submit fills it in."""
    text: tuple[str, ...] = ()
    """Text files and folders to tokenize at submit; `python-stdlib` is the source code of Python's standard library."""
    shuffle: bool = True
    """Visit the sequences in a seeded order that does not depend on the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """The training workload: the built-in model or a user's class."""

    target: str = "trainer.models.built_in:LlamaWorkload"
    """`package.module:Class` with the methods of `trainer.worker.workload.Workload`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that class."""
    path: tuple[str, ...] = ()
    """Folders added to the import path, after orch's own packages."""
    snapshot: bool = False
    """Copy those folders into the run directory at submit (without pipes and sockets) and train from the copy."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Validation schedule: with the workload's own `validate`, or on token data held out from training."""

    every: int = 0
    """Validate after every this many steps, and after the last one; 0: only after the last one."""
    batches: int = 0
    """Number of batches of `train.batch_size` held out at the end of `data.path` to report `val_loss` on."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(
                f"validation.every={self.every}: must be 0 (only after the last step) or a number of steps"
            )
        if self.batches < 0:
            raise ValueError(f"validation.batches={self.batches}: must be 0 (none) or a number of batches")


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """Limits on retries."""

    restarts_in_place: int = 5
    """Restarts in place (new generations) allowed in an attempt without a new checkpoint."""
    max_failures: int = 10
    """The run is FAILED after this many failures possibly caused by the program, without a new checkpoint."""
    no_progress_hours: float = 24.0
    """The run is HELD after this many hours (and `max_failures`) of cluster failures without a new checkpoint."""
    backoff: float = 10.0
    """Seconds before the first new job; doubled, with jitter, for every further consecutive failure."""
    backoff_max: float = 900.0
    """Longest pause between attempts in seconds."""
    exclude_hours: float = 24.0
    """Hours for which a faulty node is excluded."""
    exclude_share: float = 0.1
    """Largest share of the partition that may be excluded (but always one node, if the job can do without it)."""
    exclude_slow_after: int = 2
    """Attempts that a node must have slowed down before it is excluded; 0: never."""
    patience: float = 3600.0
    """Seconds a job may wait for all its nodes before the next one requests fewer (`cluster.min_nodes`)."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if not 0 <= getattr(self, item.name) < float("inf"):
                raise ValueError(f"recovery.{item.name}={getattr(self, item.name)}: must be 0 or more")
        if self.exclude_share > 1:
            raise ValueError(f"recovery.exclude_share={self.exclude_share}: is a share, at most 1")


@dataclass(frozen=True, kw_only=True)
class ProgramConfig:
    """The program that the ranks run: a workload of orch, or the user's own program."""

    name: str = "run"
    """Name of the run; orch appends a number."""
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    command: tuple[str, ...] = ()
    """A torchrun script with its interpreter and arguments, to run instead of a workload."""
    checkpoints: CommandCheckpointsConfig = field(default_factory=CommandCheckpointsConfig)
    progress: CommandProgressConfig = field(default_factory=CommandProgressConfig)
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables for the ranks; not for secrets: they are stored in `config.json` and the registry."""
    env_from: tuple[str, ...] = ()
    """Variables that `orch submit` takes from its shell as secrets (`[HF_TOKEN, WANDB_API_KEY]`)."""
    secrets_file: str = ""
    """A file of yours with NAME=VALUE lines and mode 0600, read on each node at every job start."""


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(ProgramConfig):
    """The recipe: parallelism, model, training, optimizer, data and validation."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)


@dataclass(frozen=True, kw_only=True)
class JobConfig(RecipeConfig):
    """`config.json` as agents and ranks see it; keys that only the login node needs are ignored."""

    cluster: ClusterShape = field(default_factory=ClusterShape)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    detection: DetectionConfig = field(default_factory=DetectionConfig)
    drill: DrillConfig = field(default_factory=DrillConfig)
    logs: LogsConfig = field(default_factory=LogsConfig)

    @property
    def trains_built_in_workload(self) -> bool:
        """Return whether the run trains the built-in model, not a user's class or program."""
        return not self.command and self.workload.target == WorkloadConfig().target


def load(run: RunDir, attempt: int) -> JobConfig:
    """Read the config of an attempt; 0: the submitted one. Raises OSError or ValueError."""
    config = build(JobConfig, in_present_keys(read_json(run.attempt_config(attempt))))
    assert isinstance(config, JobConfig)
    if not config.workload.snapshot:
        return config
    copies = tuple(str(run.code / str(index)) for index in range(len(config.workload.path)))
    return replace(config, workload=replace(config.workload, path=copies))


def config_digest(path: Path) -> str:
    """Return the digest of a config file; raises like `load`."""
    return hash_config(read_json(path))


def hash_config(config: Any) -> str:
    """Return the SHA-256 of a resolved config's canonical bytes, its key in the registry."""
    return hashlib.sha256(canonical(config)).hexdigest()


def build(kind: Any, value: Any) -> Any:
    """Turn plain JSON data into the dataclass `kind`, nested ones included; unknown keys are ignored."""
    if is_dataclass(kind):
        hints = _types_of(typing.cast(type, kind))
        known = [
            item.name for item in fields(kind) if item.name in value
        ]  # in order, so that the first error is always the same
        return typing.cast(Any, kind)(**{name: build(hints[name], value[name]) for name in known})
    origin = typing.get_origin(kind)
    if origin is tuple:
        return tuple(build(typing.get_args(kind)[0], item) for item in value)
    if origin in (typing.Union, types.UnionType):
        inner = next(arg for arg in typing.get_args(kind) if arg is not type(None))
        return None if value is None else build(inner, value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    return float(value) if kind is float else value


@functools.cache  # it evaluates the text of every annotation
def _types_of(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
