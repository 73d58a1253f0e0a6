"""The tables of torch's own schedules, made without ranks or processes.

That of 1F1B is ours: torch 2.13 runs it without a table, and the one that it makes (`Schedule1F1B._get_pipeline_order`)
begins with the second micro-batch on the last rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from torch.distributed.pipelining.schedules import (
    FORWARD,
    FULL_BACKWARD,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from trainer.contract.config_sections.pipeline_config import PipelineConfig, Schedule
from trainer.contract.pipeline.schedule_table import Action, Kind, Table
from trainer.contract.pipeline.stage_ranks import stages_of_rank

TorchTable = Mapping[int, Sequence[_Action | None]]

_CLASSES = {
    Schedule.GPIPE: ScheduleGPipe,
    Schedule.INTERLEAVED: ScheduleInterleaved1F1B,
    Schedule.ZERO_BUBBLE: ScheduleInterleavedZeroBubble,
    Schedule.ZBV: ScheduleZBVZeroBubble,
}


def computations(config: PipelineConfig, micro_batches: int) -> dict[int, list[_Action | None]]:
    """What each rank computes in one step, by rank of the pipeline, without sends and receives."""
    if config.schedule == Schedule.ONE_F_ONE_B:
        return {rank: list(_one_f_one_b(config.stages, rank, micro_batches)) for rank in range(config.ranks)}
    kind = _CLASSES[Schedule(config.schedule)]
    stages = _stand_ins(config, rank=0)
    # torch makes the table of all ranks in each of them.
    order = kind(stages[0] if kind is ScheduleGPipe else stages, micro_batches).pipeline_order
    return {
        rank: [action for action in actions if action is not None and action.is_compute_op]
        for rank, actions in cast(TorchTable, order).items()
    }


def _one_f_one_b(stages: int, stage: int, micro_batches: int) -> Iterator[_Action]:
    """As many forward passes as there are stages after this one, then one forward and one backward pass in turn."""
    ahead = min(stages - 1 - stage, micro_batches)
    for number in range(micro_batches + ahead):
        if number < micro_batches:
            yield _Action(stage, FORWARD, number)
        if number >= ahead:
            yield _Action(stage, FULL_BACKWARD, number - ahead)


def with_communication(config: PipelineConfig, micro_batches: int) -> Table:
    """All actions of one step as ranks run them: with sends, receives, and what FSDP does once."""
    runtime = _PipelineScheduleRuntime(_stand_ins(config, rank=0), micro_batches)
    runtime._prepare_schedule_with_comms(computations(config, micro_batches))
    order = cast(TorchTable, runtime.pipeline_order_with_comms)
    return [[plain(action) for action in order[rank] if action is not None] for rank in range(config.ranks)]


def plain(action: _Action) -> Action:
    """The same action without torch."""
    micro_batch = -1 if action.microbatch_index is None else action.microbatch_index
    return Action(action.stage_index, Kind(_ComputationType(action.computation_type).value), micro_batch)


def _stand_ins(config: PipelineConfig, rank: int) -> Any:
    """What a schedule reads of its stages when it makes its table; a stage itself needs a process group."""
    return [
        SimpleNamespace(
            stage_index=stage, num_stages=config.stages, group_size=config.ranks, group_rank=rank,
            is_first=stage == 0, is_last=stage == config.stages - 1, submod=None,
        )
        for stage in stages_of_rank(config, rank)
    ]  # fmt: skip
