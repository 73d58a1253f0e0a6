"""A pipeline stage: its part of the model, its messages, and torch's schedule tables.

The 1F1B table is generated here: torch 2.13 runs 1F1B without one, and the table of `Schedule1F1B._get_pipeline_order`
begins with the second micro-batch on the last rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
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

from trainer.costs.simulation import Kind, PipelineAction, Table
from trainer.costs.stage_split import stages_of_rank
from trainer.protocol.config_sections.pipeline_config import PipelineConfig, Schedule
from trainer.protocol.rank_progress.progress import Activity, StageActivity

Call = Callable[[], None]
SENDS = (Activity.SEND_ACTIVATION, Activity.SEND_GRADIENT)


class Watcher(Protocol):
    """Provider of the calls to run at the start and end of each moment of a step; moments do not overlap."""

    def begin_callback(self, moment: StageActivity) -> Call | None:
        """Return the call at the start of a moment, or None."""

    def end_callback(self, moment: StageActivity) -> Call | None:
        """Return the call at the end of a moment, or None; it is skipped if the moment raised an error."""


class Watched:
    """Runs the calls of all `watchers` around a moment, in every step.

    Between two passes, a Python call takes ten times as long as in a loop, so there should be few of them.
    """

    __slots__ = ("_begins", "_ends", "moment")

    def __init__(self, watchers: Sequence[Watcher], moment: StageActivity) -> None:
        self.moment = moment
        self._begins = [call for watcher in watchers if (call := watcher.begin_callback(moment))]
        self._ends = [call for watcher in watchers if (call := watcher.end_callback(moment))]

    def __enter__(self) -> None:
        for begin in self._begins:
            begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            for end in self._ends:
                end()


class Messages:
    """Messages of one rank, identified by the moment that waits for them; no metadata is exchanged."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._posted: dict[StageActivity, tuple[torch.Tensor, dist.Work | None]] = {}
        self._sent: list[tuple[Watched, dist.Work]] = []
        self.sent_bytes = 0  # bytes sent since the start
        self.may_send: Callable[[], bool] = lambda: True
        """Called before every send."""

    def post(self, wait: StageActivity, buffer: torch.Tensor, source: int) -> None:
        """Start receiving into `buffer` from the group's rank `source`, before the data is needed."""
        self._posted[wait] = buffer, dist.irecv(buffer, group=self._group, group_src=source)

    def hand_over(self, wait: StageActivity, tensor: torch.Tensor) -> None:
        """Pass a tensor between two stages of this rank, without sending."""
        self._posted[wait] = tensor, None

    def take(self, wait: Watched) -> torch.Tensor:
        """Return the tensor posted or handed over, waiting for it if necessary."""
        tensor, work = self._posted.pop(wait.moment)
        if work is not None:
            with wait:
                work.wait()
        return tensor

    def count_posted(self, activity: Activity) -> int:
        """Return the number of pending receives for this activity."""
        return sum(wait.activity is activity for wait in self._posted)

    def send(self, send: Watched, tensor: torch.Tensor, target: int, wait: Watched) -> None:
        """Start sending to the group's rank `target`; `wait` is the moment that waits for it at the end of the step."""
        with send:
            if self.may_send():
                self.sent_bytes += tensor.nbytes
                work = dist.isend(tensor, group=self._group, group_dst=target)
                assert work is not None
                self._sent.append((wait, work))

    def wait_for_sends(self) -> None:
        """Wait for all sends to complete, oldest first."""
        for wait, work in self._sent:
            with wait:
                work.wait()
        self._sent.clear()

    def clear(self) -> None:
        """Drop all messages in flight."""
        self._posted.clear()
        self._sent.clear()


TorchTable = Mapping[int, Sequence[_Action | None]]

_CLASSES = {
    Schedule.GPIPE: ScheduleGPipe,
    Schedule.INTERLEAVED: ScheduleInterleaved1F1B,
    Schedule.ZERO_BUBBLE: ScheduleInterleavedZeroBubble,
    Schedule.ZBV: ScheduleZBVZeroBubble,
}


def computations(config: PipelineConfig, micro_batches: int) -> dict[int, list[_Action | None]]:
    """Return each rank's computations in one step, keyed by pipeline rank, without sends and receives."""
    if config.schedule == Schedule.ONE_F_ONE_B:
        return {rank: list(_one_f_one_b(config.stages, rank, micro_batches)) for rank in range(config.ranks)}
    kind = _CLASSES[Schedule(config.schedule)]
    stages = _stand_ins(config, rank=0)
    # Every torch schedule object builds the table for all ranks.
    order = kind(stages[0] if kind is ScheduleGPipe else stages, micro_batches).pipeline_order
    return {
        rank: [action for action in actions if action is not None and action.is_compute_op]
        for rank, actions in cast(TorchTable, order).items()
    }


def _one_f_one_b(stages: int, stage: int, micro_batches: int) -> Iterator[_Action]:
    """Yield as many forward passes as there are later stages, then alternate forward and backward passes."""
    ahead = min(stages - 1 - stage, micro_batches)
    for number in range(micro_batches + ahead):
        if number < micro_batches:
            yield _Action(stage, FORWARD, number)
        if number >= ahead:
            yield _Action(stage, FULL_BACKWARD, number - ahead)


def with_communication(config: PipelineConfig, micro_batches: int) -> Table:
    """Return all actions of one step as executed: with sends, receives, and FSDP's actions once per step."""
    runtime = _PipelineScheduleRuntime(_stand_ins(config, rank=0), micro_batches)
    runtime._prepare_schedule_with_comms(computations(config, micro_batches))
    order = cast(TorchTable, runtime.pipeline_order_with_comms)
    return [[plain(action) for action in order[rank] if action is not None] for rank in range(config.ranks)]


def plain(action: _Action) -> PipelineAction:
    """Convert an action from torch's type."""
    micro_batch = -1 if action.microbatch_index is None else action.microbatch_index
    return PipelineAction(action.stage_index, Kind(_ComputationType(action.computation_type).value), micro_batch)


def _stand_ins(config: PipelineConfig, rank: int) -> Any:
    """Return the stage attributes that a schedule reads to build its table; a real stage would need a process group."""
    return [
        SimpleNamespace(
            stage_index=stage, num_stages=config.stages, group_size=config.ranks, group_rank=rank,
            is_first=stage == 0, is_last=stage == config.stages - 1, submod=None,
        )
        for stage in stages_of_rank(config, rank)
    ]  # fmt: skip


class LocalStage:
    """A stage on this rank; it frees a micro-batch's data after the last gradient computed from it."""

    def __init__(
        self, module: nn.Module, number: int, stages: int, *,
        inputs: torch.Tensor, output: torch.Tensor, group: dist.ProcessGroup, device: torch.device,
    ) -> None:  # fmt: skip
        """`inputs`, `output`: meta tensors with the shapes and types of one micro-batch.

        `group`: the ranks of the pipeline. `module` must be sharded beforehand if necessary.
        """
        self.submod, self.stage_index, self.group = module, number, group
        self.is_first, self.is_last = number == 0, number == stages - 1
        self._like_input, self._like_output, self._device = inputs, output, device
        self._units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        self._gathers: list[Any] = []
        self._keeps_gradients = False
        self.outputs: dict[int, torch.Tensor] = {}
        """Outputs keyed by micro-batch, kept from its forward to its backward pass; the last stage stores losses."""
        self.gradients: dict[int, torch.Tensor] = {}
        """Gradients of the previous stage's outputs, keyed by micro-batch, until they are sent back."""
        self._inputs: dict[int, torch.Tensor] = {}
        self._half_done: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Any]] = {}

    def input_buffer(self) -> torch.Tensor:
        """Return a buffer for the previous stage's output."""
        return torch.empty(self._like_input.shape, dtype=self._like_input.dtype, device=self._device)

    def gradient_buffer(self) -> torch.Tensor:
        """Return a buffer for the gradient of the output, sent by the next stage."""
        return torch.empty(self._like_output.shape, dtype=self._like_output.dtype, device=self._device)

    @property
    def inputs_held(self) -> int:
        """Return the number of micro-batches with an unfinished backward pass."""
        return len(self._inputs) + len(self._half_done)

    def forward(self, micro_batch: int, x: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        """Run a forward pass on tokens or on the previous stage's output `x`.

        Raises ValueError if the output is not as the next stage expects.
        """
        self._wait_for_gathers()
        if torch.is_grad_enabled():
            if not self.is_first:
                x.requires_grad_()
            self._inputs[micro_batch] = x
        output: torch.Tensor = self.submod(x, **more)
        due = self._like_output
        if not self.is_last and (output.dtype, output.shape) != (due.dtype, due.shape):
            raise ValueError(
                f"stage {self.stage_index}: its output is {output.dtype} {list(output.shape)}, but the next stage "
                f"expects {due.dtype} {list(due.shape)}"
            )
        self.outputs[micro_batch] = output
        return output

    def backward(self, micro_batch: int, gradient: torch.Tensor | None) -> None:
        """Compute gradients of activations and weights; `gradient` is the output's, or None on the last stage."""
        self._begin_backward()
        output, x = self.outputs.pop(micro_batch), self._inputs.pop(micro_batch)
        torch.autograd.backward((output,), (gradient,))
        self._keep_gradient(micro_batch, x.grad)

    def input_gradient(self, micro_batch: int, gradient: torch.Tensor | None) -> None:
        """Compute gradients of activations only; arguments as in `backward`."""
        self._begin_backward()
        output, x = self.outputs.pop(micro_batch), self._inputs.pop(micro_batch)
        groups = None
        if not self.is_first:  # the first stage only has weight gradients
            gradients = None if gradient is None else [gradient]
            (found,), groups = stage_backward_input([output], gradients, [x], self.submod.parameters())
            self._keep_gradient(micro_batch, found)
        self._half_done[micro_batch] = output, x, gradient, groups

    def weight_gradient(self, micro_batch: int) -> None:
        """Compute the weight gradients that `input_gradient` has left out."""
        self._begin_backward()
        output, _, gradient, groups = self._half_done.pop(micro_batch)
        if self.is_first:
            torch.autograd.backward((output,), (gradient,))
        else:
            stage_backward_weight(self.submod.parameters(), groups)
        add_up_in_reduce_dtype(self.submod)

    def gather(self) -> None:
        """Start gathering sharded parameters; the first pass waits for them."""
        self._gathers = [unit.unshard(async_op=True) for unit in self._units]

    def reshard(self) -> None:
        """Free the gathered parameters."""
        for unit in self._units:
            unit.reshard()

    def reduce_gradients(self) -> None:
        """Reduce gradients over the data-parallel ranks if parameters are sharded: once per step, like torch."""
        if self._units:
            PipelineStage.perform_reduce_grad(cast(Any, self), 1)
            self._keeps_gradients = False

    def clear(self) -> None:
        """Clear an evaluation's data."""
        self.outputs.clear()
        self.gradients.clear()
        self._inputs.clear()
        self._half_done.clear()

    def _keep_gradient(self, micro_batch: int, gradient: torch.Tensor | None) -> None:
        if not self.is_first:
            assert gradient is not None, "a stage that does not use its input"
            self.gradients[micro_batch] = gradient

    def _wait_for_gathers(self) -> None:
        for gather in self._gathers:
            gather.wait()
        self._gathers.clear()

    def _begin_backward(self) -> None:
        """Make FSDP accumulate gradients, and keep parameters gathered, until the reduction."""
        self._wait_for_gathers()
        if self._units and not self._keeps_gradients:
            sharded = cast(FSDPModule, self.submod)
            sharded.set_is_last_backward(False)
            sharded.set_reshard_after_backward(False)
            sharded.set_requires_gradient_sync(False)
            self._keeps_gradients = True


def add_up_in_reduce_dtype(module: nn.Module) -> None:
    """Move gradients of half-precision weights into FSDP's sums in its reduction dtype.

    A pass that computes only weight gradients does not run FSDP's hooks, which would otherwise do this.
    """
    if not isinstance(module, FSDPModule):
        return
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    if hasattr(parameter, "_unsharded_param"):
                        parameter.accumulate_unsharded_grad_if_needed()
                        parameter.to_accumulated_grad_if_needed()
