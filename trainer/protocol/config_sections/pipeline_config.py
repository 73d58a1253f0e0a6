"""Configuration of pipeline parallelism: stages, schedule and micro-batches."""

from dataclasses import dataclass
from enum import StrEnum

from trainer.protocol.config_sections.limits import require_least


class Schedule(StrEnum):
    """Order in which a stage computes the forward and backward passes of a step's micro-batches."""

    GPIPE = "gpipe"  # all forward passes, then all backward passes (Huang et al. 2019)
    ONE_F_ONE_B = "1f1b"  # alternating forward and backward: fewer activations (Narayanan et al. 2019)
    INTERLEAVED = "interleaved_1f1b"  # 1f1b with several stages per rank (Narayanan et al. 2021)
    ZERO_BUBBLE = "interleaved_zero_bubble"  # ZB1P: weight gradients are computed in idle time (Qi et al. 2023)
    ZBV = "zbv"  # zero bubble with two stages per rank that form a V


ZERO_BUBBLE = (Schedule.ZERO_BUBBLE, Schedule.ZBV)
"""Schedules that compute weight gradients separately from activation gradients."""
LARGE_ROUNDS = (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE)
"""Schedules that process micro-batches in rounds of equal size, each at least as large as the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Pipeline parallelism, where ranks hold consecutive layers of the model."""

    stages: int = 1
    """Number of consecutive parts into which the layers are split, `stages_per_rank` on each rank; 1: no pipeline."""

    schedule: str = Schedule.ONE_F_ONE_B
    """`gpipe`, `1f1b`, `interleaved_1f1b`, `interleaved_zero_bubble` or `zbv`."""

    stages_per_rank: int = 0
    """Stages on each rank; 0: one with `gpipe` and `1f1b`, else two."""

    micro_batches: int = 0
    """Micro-batches per step on each data-parallel rank; 0: set by `train.micro_batch_size`, or at least four
    times the number of pipeline ranks if a rank's share can be divided that way."""

    layer_seconds: tuple[float, ...] = ()
    """Measured seconds for the embedding, each layer, and the output with its loss, used to split the layers into
    stages; empty: use modelled FLOPs."""

    def __post_init__(self) -> None:
        if self.schedule not in set(Schedule):
            *others, last = Schedule
            raise ValueError(
                f"parallel.pipeline.schedule={self.schedule}: must be {', '.join(others)} or {last}: "
                f"type parallel.pipeline.schedule={Schedule.ONE_F_ONE_B}"
            )
        require_least("parallel.pipeline", self, stages=1, stages_per_rank=0, micro_batches=0)
        if any(not 0 <= seconds < float("inf") for seconds in self.layer_seconds):
            raise ValueError(
                "parallel.pipeline.layer_seconds: must be numbers of seconds, 0 or more: "
                "type ~parallel.pipeline.layer_seconds"
            )
        if self.stages > 1:
            self._check_stages_per_rank()
            self._check_stages()

    def _check_stages_per_rank(self) -> None:
        least, most = _STAGES_PER_RANK[Schedule(self.schedule)]
        if least <= self.per_rank <= most:
            return
        needs = f"{least}" if least == most else f"{least} or more"
        raise ValueError(
            f"parallel.pipeline.stages_per_rank={self.per_rank}: schedule {self.schedule} needs {needs} on each rank: "
            f"type parallel.pipeline.stages_per_rank={least}"
        )

    def _check_stages(self) -> None:
        if self.stages % self.per_rank:
            size = -(-self.stages // self.per_rank) * self.per_rank
            raise ValueError(
                f"parallel.pipeline.stages={self.stages}: must be a multiple of the {self.per_rank} stages of each "
                f"rank: type parallel.pipeline.stages={max(size, 2 * self.per_rank)}"
            )
        if self.ranks == 1:
            raise ValueError(
                f"parallel.pipeline.stages={self.stages} with {self.per_rank} on each rank is a pipeline of one rank: "
                f"type parallel.pipeline.stages={2 * self.per_rank}"
            )

    @property
    def per_rank(self) -> int:
        """Return the number of stages on each rank, with the default resolved."""
        if self.stages == 1:
            return 1
        return self.stages_per_rank or (1 if self.schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B) else 2)

    @property
    def ranks(self) -> int:
        """Return the size of the pipeline dimension of the mesh."""
        return self.stages // self.per_rank

    @property
    def splits_backward(self) -> bool:
        """Return whether weight gradients are computed separately from activation gradients."""
        return self.stages > 1 and self.schedule in ZERO_BUBBLE


_ANY = 1 << 30
_STAGES_PER_RANK = {
    Schedule.GPIPE: (1, 1),
    Schedule.ONE_F_ONE_B: (1, 1),
    Schedule.INTERLEAVED: (2, _ANY),
    Schedule.ZERO_BUBBLE: (1, _ANY),
    Schedule.ZBV: (2, 2),
}
