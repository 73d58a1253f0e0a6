"""Execution of a rank's pipeline stages in table order, and measurement of the bubble."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.costs.simulation import Kind, PipelineAction, RankSeconds
from trainer.costs.stage_split import rank_of_stage
from trainer.parallel.apply.pipeline_stage import (
    SENDS,
    Call,
    LocalStage,
    Messages,
    Watched,
    Watcher,
    with_communication,
)
from trainer.protocol.config_sections.pipeline_config import PipelineConfig
from trainer.protocol.rank_progress.progress import AWAITED_SENDS, RECEIVES, Activity, StageActivity
from trainer.worker.reporting.work_timer import DeviceClock


class BubbleMeter:
    """A watcher that measures one step after another; `take` returns the measurements since `start`."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock, self._mark = clock, clock.mark
        self._moments: list[tuple[StageActivity, Any, Any]] = []
        self._start = self._begin = clock.mark()

    def start(self) -> None:
        """Start measuring a step."""
        self._moments.clear()
        self._start = self._clock.mark()

    def begin_callback(self, moment: StageActivity) -> Call | None:
        """Return the call at the start of a moment, or None for sends, which are asynchronous."""
        return None if moment.activity in SENDS else self._mark_begin

    def _mark_begin(self) -> None:
        self._begin = self._mark()

    def end_callback(self, moment: StageActivity) -> Call | None:
        """Return the call at the end of a moment, as in `begin_callback`."""
        if moment.activity in SENDS:
            return None

        def end() -> None:
            self._moments.append((moment, self._begin, self._mark()))

        return end

    def take(self) -> RankSeconds:
        """Return the times of the finished step. On a GPU this waits for the stream, so call it one step later."""
        computed: dict[int, float] = {}
        waited: dict[int, float] = {}
        span = sends = reductions = 0.0
        for moment, begin, end in self._moments:
            seconds = self._clock.seconds(begin, end)
            if moment.activity in AWAITED_SENDS:
                sends += seconds
            elif moment.activity is Activity.REDUCE:
                reductions += seconds
            elif moment.activity in RECEIVES:
                waited[moment.stage] = waited.get(moment.stage, 0.0) + seconds
            else:
                computed[moment.stage] = computed.get(moment.stage, 0.0) + seconds
                span = self._clock.seconds(self._start, end)
        return RankSeconds(span=span, computed=computed, waited=waited, sends=sends, reductions=reductions)


class ActionCalls:
    """The calls that execute a table's actions for the stages of one rank."""

    def __init__(
        self, config: PipelineConfig, stages: Sequence[LocalStage], messages: Messages, watchers: Sequence[Watcher],
        given: Callable[[LocalStage, int], dict[str, torch.Tensor]], loss: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:  # fmt: skip
        """`given` returns a stage's inputs for a micro-batch; `loss` maps an output to the loss to differentiate."""
        self._stages = {stage.stage_index: stage for stage in stages}
        self._ranks = [rank_of_stage(config, stage) for stage in range(config.stages)]
        self._messages, self._watchers, self._given, self._loss = messages, watchers, given, loss

    def build_call(self, action: PipelineAction) -> Call:
        """Return the call that executes an action."""
        stage, micro_batch = self._stages[action.stage], action.micro_batch
        match action.kind:
            case Kind.FORWARD:
                return self._forward(stage, micro_batch)
            case Kind.BACKWARD:
                return self._backward(stage, micro_batch, Activity.BACKWARD, stage.backward)
            case Kind.INPUT_GRADIENT:
                return self._backward(stage, micro_batch, Activity.INPUT_GRADIENT, stage.input_gradient)
            case Kind.WEIGHT_GRADIENT:
                return self._build_watched_call(
                    action, Activity.WEIGHT_GRADIENT, partial(stage.weight_gradient, micro_batch)
                )
            case Kind.REDUCE:
                return self._build_watched_call(action, Activity.REDUCE, stage.reduce_gradients)
            case Kind.UNSHARD:
                return stage.gather
            case Kind.RESHARD:
                return stage.reshard
            case Kind.RECEIVE_ACTIVATION | Kind.RECEIVE_GRADIENT:
                return self._receive(stage, micro_batch, of_activation=action.kind is Kind.RECEIVE_ACTIVATION)
            case Kind.SEND_ACTIVATION | Kind.SEND_GRADIENT:
                return self._send(stage, micro_batch, of_activation=action.kind is Kind.SEND_ACTIVATION)

    def _build_watched_call(self, action: PipelineAction, activity: Activity, compute: Call) -> Call:
        watched = self._moment(activity, action.stage, action.micro_batch)

        def call() -> None:
            with watched:
                compute()

        return call

    def _forward(self, stage: LocalStage, micro_batch: int) -> Call:
        number, messages, given, loss = stage.stage_index, self._messages, self._given, self._loss
        wait = self._moment(Activity.WAIT_FOR_ACTIVATION, number, micro_batch)
        next_wait = self._local_wait(Activity.WAIT_FOR_ACTIVATION, number + 1, micro_batch)
        watched = self._moment(Activity.FORWARD, number, micro_batch)

        def call() -> None:
            inputs = given(stage, micro_batch)
            if not stage.is_first:
                inputs["x"] = messages.take(wait)
            with watched:
                output = stage.forward(micro_batch, **inputs)
            if stage.is_last:
                stage.outputs[micro_batch] = loss(output)
            elif next_wait is not None:
                messages.hand_over(next_wait, output.detach())

        return call

    def _backward(
        self, stage: LocalStage, micro_batch: int, activity: Activity,
        compute: Callable[[int, torch.Tensor | None], None],
    ) -> Call:  # fmt: skip
        number, messages = stage.stage_index, self._messages
        wait = self._moment(Activity.WAIT_FOR_GRADIENT, number, micro_batch)
        next_wait = self._local_wait(Activity.WAIT_FOR_GRADIENT, number - 1, micro_batch)
        watched = self._moment(activity, number, micro_batch)

        def call() -> None:
            gradient = None if stage.is_last else messages.take(wait)
            with watched:
                compute(micro_batch, gradient)
            if next_wait is not None:
                messages.hand_over(next_wait, stage.gradients.pop(micro_batch))

        return call

    def _receive(self, stage: LocalStage, micro_batch: int, *, of_activation: bool) -> Call:
        number, messages = stage.stage_index, self._messages
        if of_activation:
            wait, buffer, source = Activity.WAIT_FOR_ACTIVATION, stage.input_buffer, self._ranks[number - 1]
        else:
            wait, buffer, source = Activity.WAIT_FOR_GRADIENT, stage.gradient_buffer, self._ranks[number + 1]
        moment = StageActivity(wait, number, micro_batch)
        return lambda: messages.post(moment, buffer(), source)

    def _send(self, stage: LocalStage, micro_batch: int, *, of_activation: bool) -> Call:
        number, messages = stage.stage_index, self._messages
        if of_activation:
            send, target = self._moment(Activity.SEND_ACTIVATION, number, micro_batch), self._ranks[number + 1]
            wait = self._moment(Activity.WAIT_FOR_SENT_ACTIVATION, number, micro_batch)
            return lambda: messages.send(send, stage.outputs[micro_batch].detach(), target, wait)
        send, target = self._moment(Activity.SEND_GRADIENT, number, micro_batch), self._ranks[number - 1]
        wait = self._moment(Activity.WAIT_FOR_SENT_GRADIENT, number, micro_batch)
        return lambda: messages.send(send, stage.gradients.pop(micro_batch), target, wait)

    def _moment(self, activity: Activity, stage: int, micro_batch: int) -> Watched:
        return Watched(self._watchers, StageActivity(activity, stage, micro_batch))

    def _local_wait(self, activity: Activity, stage: int, micro_batch: int) -> StageActivity | None:
        """Return the moment at which `stage` waits for this input; None if the stage is on another rank."""
        return StageActivity(activity, stage, micro_batch) if stage in self._stages else None


_OF_FORWARD = (Kind.UNSHARD, Kind.RECEIVE_ACTIVATION, Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.RESHARD)


class Pipeline:
    """Stages of a rank; all ranks of the pipeline call the same methods with the same number of micro-batches.

    Like torch's runtime, but without its lookups for every action, which cost 4 % of a step with small stages.
    """

    def __init__(
        self, config: PipelineConfig, stages: Sequence[LocalStage], micro_batches: int, watchers: Sequence[Watcher] = ()
    ) -> None:
        self.stages, self.micro_batches = stages, micro_batches
        self._scale = self._factor = 1.0
        self._losses: list[torch.Tensor] = []
        self._batches: Sequence[torch.Tensor] = ()
        self._config, self._watchers = config, list(watchers)
        self._messages = Messages(stages[0].group)
        self._table = with_communication(config, micro_batches)[stages[0].group.rank()]
        self._make_calls()

    def watch(self, watcher: Watcher) -> None:
        """Call `watcher` in all later steps."""
        self._watchers.append(watcher)
        self._make_calls()

    def _make_calls(self) -> None:
        calls = ActionCalls(self._config, self.stages, self._messages, self._watchers, self._inputs, self._loss)
        self._all = [(f"PP:{action}", calls.build_call(action)) for action in self._table]
        forward = [action.kind in _OF_FORWARD for action in self._table]
        self._forward = [call for call, is_forward in zip(self._all, forward, strict=True) if is_forward]

    def ask_before_sends(self, may_send: Callable[[], bool]) -> None:
        """Call `may_send` before every send; a refused message is never sent."""
        self._messages.may_send = may_send

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that this rank has sent to other stages since the start."""
        return self._messages.sent_bytes

    @property
    def activations_held(self) -> int:
        """Return the number of activations from other stages that this rank is receiving or holds."""
        held = sum(stage.inputs_held for stage in self.stages if not stage.is_first)
        return held + self._messages.count_posted(Activity.WAIT_FOR_ACTIVATION)

    @property
    def has_last(self) -> bool:
        """Return whether this rank computes the loss."""
        return any(stage.is_last for stage in self.stages)

    def step(self, batches: Sequence[torch.Tensor], *, factor: float = 1.0, scale: float = 1.0) -> torch.Tensor:
        """Compute gradients of the mean loss of `batches`, times `factor` and `scale`.

        Each batch is [sequences, seq_len + 1]. Returns the mean loss times `factor`, or zero on a rank without the last
        stage.
        """
        self._factor, self._scale = factor, scale
        return self._run(self._all, batches)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the mean loss of `batches` as `step` does, without computing gradients."""
        self._factor = self._scale = 1.0
        return self._run(self._forward, batches)

    def _run(self, calls: Sequence[tuple[str, Callable[[], None]]], batches: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(batches) != self.micro_batches:
            raise ValueError(f"{len(batches)} micro-batches for a pipeline built for {self.micro_batches}")
        if len(shapes := {batch.shape for batch in batches}) > 1:
            raise ValueError(f"micro-batches of {len(shapes)} shapes: a pipeline needs a single shape")
        self._clear()
        self._batches = batches
        if torch._C._autograd._profiler_enabled():
            calls = [(name, partial(_profile_call, name, call)) for name, call in calls]
        for _, call in calls:
            call()
        self._messages.wait_for_sends()
        total = torch.zeros((), device=batches[0].device)
        for loss in self._losses:
            total += loss
        self._clear()
        return total

    def _clear(self) -> None:
        """Clear the data of a step or an evaluation; a failed step leaves gradients in FSDP, but ends the rank."""
        self._losses.clear()
        self._batches = ()
        self._messages.clear()
        for stage in self.stages:
            stage.clear()

    def _inputs(self, stage: LocalStage, micro_batch: int) -> dict[str, torch.Tensor]:
        batch, given = self._batches[micro_batch], {}
        if stage.is_first:
            given["x"] = batch[:, :-1]
        if stage.is_last:
            given["targets"] = batch[:, 1:]
        return given

    def _loss(self, output: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the last stage differentiates, rounded as in the loop without a pipeline."""
        loss = output / self.micro_batches
        if self._factor != 1.0:
            loss = loss * self._factor
        self._losses.append(loss.detach())
        return loss if self._scale == 1.0 else loss.float() * self._scale


def _profile_call(name: str, call: Callable[[], None]) -> None:
    with torch.profiler.record_function(name):
        call()


class PipelinedModel(nn.Module):
    """Base class of models that are split into stages; each rank has some of the stages."""

    pipeline: Pipeline
    """Runs the stages of this rank and exchanges activations with the other ranks."""
    layer_numbers: Sequence[int]
    """Layer numbers of this rank, in order."""
    depth: int
    """Number of layers in the whole model."""


def find_pipeline(model: nn.Module) -> Pipeline | None:
    """Return the pipeline that runs `model`, or None if `model` is not pipelined."""
    return model.pipeline if isinstance(model, PipelinedModel) else None
