"""Number of micro-batches per step, checked against the schedule. Pure functions."""

from trainer.costs.simulation import formula
from trainer.protocol.config_sections.pipeline_config import LARGE_ROUNDS, PipelineConfig, Schedule
from trainer.protocol.config_sections.recipe_config import TrainConfig

SHOWN = 3
"""Maximum number of counts that a message suggests."""
ENOUGH = 4
"""Number of micro-batches per pipeline rank from which on ranks wait for less than a fifth of a step."""


class MicroBatchError(ValueError):
    """The requested number of micro-batches is impossible; the text suggests possible ones."""


def micro_batch_count(pipeline: PipelineConfig, train: TrainConfig, dp_size: int) -> int:
    """Return the number of micro-batches per step on each data-parallel rank.

    Raises MicroBatchError, which suggests valid counts.
    """
    share = train.batch_size // dp_size
    fitting = _fitting(pipeline, share)
    key, count = _requested_count(pipeline, train, share, fitting)
    if count in fitting:
        return count
    if not fitting:  # only with 1f1b: other schedules accept one micro-batch
        raise MicroBatchError(
            f"train.batch_size={train.batch_size}: each data-parallel rank has {share} sequences per step, but "
            f"schedule {pipeline.schedule} needs one micro-batch or more for each of {pipeline.stages} stages: "
            f"type train.batch_size={pipeline.stages * dp_size}"
        )
    why = _why_not(pipeline, share, count)
    near = sorted(fitting, key=lambda one: (abs(one - (count or 1)), one))[:SHOWN]
    offered = " or ".join(f"parallel.pipeline.micro_batches={one}" for one in sorted(near))
    more = " train.micro_batch_size=0" if train.micro_batch_size else ""
    raise MicroBatchError(f"{key}: {why}: type{more} {offered}")


def micro_batch_size(pipeline: PipelineConfig, train: TrainConfig, dp_size: int) -> int:
    """Return the number of sequences per forward pass. Raises MicroBatchError."""
    share = train.batch_size // dp_size
    if pipeline.stages == 1:
        return train.micro_batch_size or share
    return share // micro_batch_count(pipeline, train, dp_size)


def _fitting(pipeline: PipelineConfig, share: int) -> list[int]:
    return [count for count in range(1, share + 1) if share % count == 0 and takes(pipeline, count)]


def _requested_count(pipeline: PipelineConfig, train: TrainConfig, share: int, fitting: list[int]) -> tuple[str, int]:
    """Return KEY=VALUE for the key that sets the count, and the count (0 if the size does not divide the share)."""
    count, size = pipeline.micro_batches, train.micro_batch_size
    if count:
        if size and size * count != share:
            raise MicroBatchError(
                f"parallel.pipeline.micro_batches={count} x train.micro_batch_size={size} = {size * count}, but each "
                f"data-parallel rank has {share} sequences per step: type train.micro_batch_size=0"
            )
        return f"parallel.pipeline.micro_batches={count}", count
    if size:
        return f"train.micro_batch_size={size}", share // size if share % size == 0 else 0
    enough = [count for count in fitting if count >= ENOUGH * pipeline.ranks]
    chosen = min(enough) if enough else max(fitting, default=0)
    return f"train.batch_size={train.batch_size}", chosen


def _why_not(pipeline: PipelineConfig, share: int, count: int) -> str:
    if count == 0 or share % count:
        return f"each data-parallel rank has {share} sequences per step, which must be divided into equal micro-batches"
    if pipeline.schedule == Schedule.ONE_F_ONE_B:
        return f"{count} micro-batches, but schedule 1f1b needs one or more for each of {pipeline.stages} stages"
    rounds = max(1, count // pipeline.ranks)
    return f"{count} micro-batches, but schedule {pipeline.schedule} needs {rounds} rounds of equal size"


def takes(pipeline: PipelineConfig, count: int) -> bool:
    """Return whether torch's implementation of the schedule can run `count` micro-batches."""
    if pipeline.schedule == Schedule.ONE_F_ONE_B:
        return count >= pipeline.stages
    if pipeline.schedule in LARGE_ROUNDS:
        return count % max(1, count // pipeline.ranks) == 0
    return count >= 1


def too_few(pipeline: PipelineConfig, train: TrainConfig, dp_size: int) -> str | None:
    """Return a warning and a fix if ranks wait for a fifth of each step or more, else None.

    With `gpipe` and `1f1b` each rank is a stage. The zero-bubble schedules need just as many micro-batches to fill
    their idle time. Raises MicroBatchError like `micro_batch_count`.
    """
    count, enough = micro_batch_count(pipeline, train, dp_size), ENOUGH * pipeline.ranks
    if pipeline.ranks == 1 or count >= enough:
        return None
    share = formula(pipeline.ranks, count, pipeline.per_rank)
    known = "" if pipeline.splits_backward else f": ranks wait for {share:.0%} of each step"
    better = [count for count in _fitting(pipeline, train.batch_size // dp_size) if count >= enough]
    keys = [f"parallel.pipeline.micro_batches={min(better, default=enough)}"]
    keys += [] if better else [f"train.batch_size={enough * dp_size}"]
    keys += ["train.micro_batch_size=0"] if train.micro_batch_size else []
    return (
        f"{count} micro-batches for a pipeline of {pipeline.ranks} ranks{known}; efficient from {enough} on: "
        f"type {' '.join(keys)}"
    )
