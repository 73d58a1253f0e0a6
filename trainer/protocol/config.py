"""Resolved configuration that a job reads from `config.json`: plain dataclasses without OmegaConf."""

import hashlib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from checkpointing.config import CheckpointConfig
from checkpointing.storage.durable import canonical, read_json
from trainer.parallel.parallel_config import ParallelConfig
from trainer.protocol import launchers
from trainer.protocol.command_progress import CommandCheckpointsConfig, CommandProgressConfig
from trainer.protocol.config_sections.fault_detection_config import DetectionConfig, DrillConfig
from trainer.protocol.config_sections.limits import require_least
from trainer.protocol.config_sections.recipe_config import ClusterShape, ModelConfig, TrainConfig
from trainer.protocol.config_sections.watch_config import WatchConfig
from trainer.protocol.logs.log_rotation import LogsConfig
from trainer.protocol.plain_data import build
from trainer.protocol.run_dir import RunDir


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
    """Decoupled weight decay, for matrices only."""
    clip_norm: float = 1.0
    """Gradient norm above which gradients are clipped; 0: no clipping."""

    def __post_init__(self) -> None:
        require_least("optimizer", self, **dict.fromkeys((item.name for item in fields(self)), 0))
        if self.min_lr_ratio > 1:
            raise ValueError(f"optimizer.min_lr_ratio={self.min_lr_ratio}: must be from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data."""

    path: str = ""
    """Folder of token shards from `orch data prepare`; with `text`, `orch submit` fills it in."""
    text: tuple[str, ...] = ()
    """Files, folders and URLs to tokenize at submission; `python-stdlib` is the source of Python's standard library."""
    tokenizer: str = ""
    """Tokenizer of transformers for `text`: a folder, or a name in the hub's cache. By default, tokens are bytes."""
    shuffle: bool = True
    """Read the sequences in a seeded order that does not depend on the number of ranks."""


HF_WORKLOAD = "trainer.models.hf_workload:HfWorkload"
"""Class that `workload: hf` means."""


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """The training workload: the built-in model or a user's class."""

    target: str = "trainer.models.built_in:LlamaWorkload"
    """`package.module:Class` with the methods of `trainer.worker.workload.Workload`, or `hf`: a model of Hugging Face's
    transformers (`workload.args.name_or_path`)."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the class."""
    path: tuple[str, ...] = ()
    """Folders added to the import path, after orch's own packages."""
    snapshot: bool = False
    """Copy the folders in `path` into the run directory at submission, and train from the copy."""

    def __post_init__(self) -> None:
        if self.target == "trainer.worker.llama:LlamaWorkload":  # the name in older runs' configs
            object.__setattr__(self, "target", WorkloadConfig.target)
        if self.target == "hf":
            object.__setattr__(self, "target", HF_WORKLOAD)


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Validation with the workload's own `validate`, or on token data held out from training."""

    every: int = 0
    """Number of steps between validations, with another after the last step; 0: only after the last step."""
    batches: int = 0
    """Number of batches of `train.batch_size`, held out at the end of `data.path`, on which to compute `val_loss`."""

    def __post_init__(self) -> None:
        require_least("validation", self, every=0, batches=0)


AUTO, NEVER = "auto", "never"
"""Values of `recovery.requeue`."""


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """Limits on retries."""

    restarts_in_place: int = 5
    """In-place restarts (new generations) allowed in an attempt without a new checkpoint."""
    max_failures: int = 10
    """The run is FAILED after this many failures possibly caused by the program, without a new checkpoint."""
    no_progress_hours: float = 24.0
    """The run is HELD after this many hours and `max_failures` cluster failures without a new checkpoint."""
    backoff: float = 10.0
    """Seconds before the first new job. The delay doubles, with jitter, after each further consecutive failure."""
    backoff_max: float = 900.0
    """Longest pause between attempts, in seconds."""
    exclude_hours: float = 24.0
    """Hours for which a faulty node is excluded."""
    exclude_share: float = 0.1
    """Largest share of the partition that may be excluded (at least one node, if the job can do without it)."""
    exclude_slow_after: int = 2
    """Number of attempts a node must slow down before it is excluded; 0: never."""
    requeue: str = "auto"
    """`auto`: where the site enables Slurm's expedited requeue, a job keeps its surviving nodes when one fails, and the
    next attempt continues in it; `never`: each attempt is a new job."""
    patience: float = 3600.0
    """Seconds a job may wait for all its nodes before the next one requests fewer (`cluster.min_nodes`)."""

    def __post_init__(self) -> None:
        numbers = (item.name for item in fields(self) if item.name != "requeue")
        require_least("recovery", self, **dict.fromkeys(numbers, 0))
        if self.requeue not in (AUTO, NEVER):
            raise ValueError(f"recovery.requeue={self.requeue}: must be {AUTO} or {NEVER}")
        if self.exclude_share > 1:
            raise ValueError(f"recovery.exclude_share={self.exclude_share}: must be at most 1")


@dataclass(frozen=True, kw_only=True)
class ProgramConfig:
    """The program that the ranks run: an orch workload, or the user's own program."""

    name: str = "run"
    """Name of the run; orch appends a number."""
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    command: tuple[str, ...] = ()
    """A torchrun script with its interpreter and arguments, to run instead of a workload."""
    launcher: str = launchers.AUTO
    """`orch`: orch starts the command once per rank; `node`: once per node, and the command starts its own ranks;
    `auto`: `node` for commands such as `torchrun`, `accelerate launch` and `deepspeed`, and otherwise `orch`."""
    checkpoints: CommandCheckpointsConfig = field(default_factory=CommandCheckpointsConfig)
    progress: CommandProgressConfig = field(default_factory=CommandProgressConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables for the ranks. Not for secrets, because `config.json` and the registry store the values."""
    env_from: tuple[str, ...] = ()
    """Secrets that `orch submit` takes from its environment (`[HF_TOKEN, WANDB_API_KEY]`)."""
    secrets_file: str = ""
    """Your own secrets file: NAME=VALUE lines, mode 0600. Each node reads it at every job start."""

    def __post_init__(self) -> None:
        if self.launcher not in (launchers.AUTO, launchers.PER_RANK, launchers.PER_NODE):
            raise ValueError(f"launcher={self.launcher}: must be auto, orch or node")


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
    """`config.json` as read by agents and ranks, without the keys used only on the login node."""

    cluster: ClusterShape = field(default_factory=ClusterShape)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    detection: DetectionConfig = field(default_factory=DetectionConfig)
    drill: DrillConfig = field(default_factory=DrillConfig)
    logs: LogsConfig = field(default_factory=LogsConfig)

    @property
    def trains_built_in_workload(self) -> bool:
        """Return whether the run trains the built-in model rather than a user's class or program."""
        return not self.command and self.workload.target == WorkloadConfig().target


def load(run: RunDir, attempt: int) -> JobConfig:
    """Read the config of an attempt, or the submitted config for attempt 0. Raises OSError or ValueError."""
    config = build(JobConfig, read_json(run.attempt_config(attempt)))
    if not config.workload.snapshot:
        return config
    copies = tuple(str(run.code / str(index)) for index in range(len(config.workload.path)))
    return replace(config, workload=replace(config.workload, path=copies))


def config_digest(path: Path) -> str:
    """Return the digest of a config file. Raises OSError or ValueError."""
    return hash_config(read_json(path))


def hash_config(config: Any) -> str:
    """Return the SHA-256 of a resolved config's canonical bytes, which is its key in the registry."""
    return hashlib.sha256(canonical(config)).hexdigest()
