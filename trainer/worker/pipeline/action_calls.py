"""Makes a call of each action of a table: what a rank looks up for it is looked up once, and not in every step."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from trainer.contract.config_sections.pipeline_config import PipelineConfig
from trainer.contract.pipeline.schedule_table import Action, Kind
from trainer.contract.pipeline.stage_ranks import rank_of_stage
from trainer.worker.pipeline.activities import Activity, Call, Moment, Watched, Watcher
from trainer.worker.pipeline.messages import Messages
from trainer.worker.pipeline.stage import Stage


class ActionCalls:
    """For the stages of one rank."""

    def __init__(
        self, config: PipelineConfig, stages: Sequence[Stage], messages: Messages, watchers: Sequence[Watcher],
        given: Callable[[Stage, int], dict[str, torch.Tensor]], loss: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:  # fmt: skip
        """`given`: of a stage and micro-batch, what no other stage sends; `loss`: to differentiate, of an output."""
        self._stages = {stage.stage_index: stage for stage in stages}
        self._ranks = [rank_of_stage(config, stage) for stage in range(config.stages)]
        self._messages, self._watchers, self._given, self._loss = messages, watchers, given, loss

    def of(self, action: Action) -> Call:
        """What does it."""
        stage, micro_batch = self._stages[action.stage], action.micro_batch
        match action.kind:
            case Kind.FORWARD:
                return self._forward(stage, micro_batch)
            case Kind.BACKWARD:
                return self._backward(stage, micro_batch, Activity.BACKWARD, stage.backward)
            case Kind.INPUT_GRADIENT:
                return self._backward(stage, micro_batch, Activity.INPUT_GRADIENT, stage.input_gradient)
            case Kind.WEIGHT_GRADIENT:
                return self._watched(action, Activity.WEIGHT_GRADIENT, partial(stage.weight_gradient, micro_batch))
            case Kind.REDUCE:
                return self._watched(action, Activity.REDUCE, stage.reduce_gradients)
            case Kind.UNSHARD:
                return stage.gather
            case Kind.RESHARD:
                return stage.reshard
            case Kind.RECEIVE_ACTIVATION | Kind.RECEIVE_GRADIENT:
                return self._receive(stage, micro_batch, of_activation=action.kind is Kind.RECEIVE_ACTIVATION)
            case Kind.SEND_ACTIVATION | Kind.SEND_GRADIENT:
                return self._send(stage, micro_batch, of_activation=action.kind is Kind.SEND_ACTIVATION)

    def _watched(self, action: Action, activity: Activity, compute: Call) -> Call:
        watched = self._moment(activity, action.stage, action.micro_batch)

        def call() -> None:
            with watched:
                compute()

        return call

    def _forward(self, stage: Stage, micro_batch: int) -> Call:
        number, messages, given, loss = stage.stage_index, self._messages, self._given, self._loss
        wait = self._moment(Activity.WAIT_FOR_ACTIVATION, number, micro_batch)
        next_wait = Moment(Activity.WAIT_FOR_ACTIVATION, number + 1, micro_batch) if self._has(number + 1) else None
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
        self, stage: Stage, micro_batch: int, activity: Activity, compute: Callable[[int, torch.Tensor | None], None]
    ) -> Call:
        number, messages = stage.stage_index, self._messages
        wait = self._moment(Activity.WAIT_FOR_GRADIENT, number, micro_batch)
        next_wait = Moment(Activity.WAIT_FOR_GRADIENT, number - 1, micro_batch) if self._has(number - 1) else None
        watched = self._moment(activity, number, micro_batch)

        def call() -> None:
            gradient = None if stage.is_last else messages.take(wait)
            with watched:
                compute(micro_batch, gradient)
            if next_wait is not None:
                messages.hand_over(next_wait, stage.gradients.pop(micro_batch))

        return call

    def _receive(self, stage: Stage, micro_batch: int, *, of_activation: bool) -> Call:
        number, messages = stage.stage_index, self._messages
        if of_activation:
            wait, buffer, source = Activity.WAIT_FOR_ACTIVATION, stage.input_buffer, self._ranks[number - 1]
        else:
            wait, buffer, source = Activity.WAIT_FOR_GRADIENT, stage.gradient_buffer, self._ranks[number + 1]
        moment = Moment(wait, number, micro_batch)
        return lambda: messages.post(moment, buffer(), source)

    def _send(self, stage: Stage, micro_batch: int, *, of_activation: bool) -> Call:
        number, messages = stage.stage_index, self._messages
        if of_activation:
            send, target = self._moment(Activity.SEND_ACTIVATION, number, micro_batch), self._ranks[number + 1]
            wait = self._moment(Activity.WAIT_FOR_SENT_ACTIVATION, number, micro_batch)
            return lambda: messages.send(send, stage.outputs[micro_batch].detach(), target, wait)
        send, target = self._moment(Activity.SEND_GRADIENT, number, micro_batch), self._ranks[number - 1]
        wait = self._moment(Activity.WAIT_FOR_SENT_GRADIENT, number, micro_batch)
        return lambda: messages.send(send, stage.gradients.pop(micro_batch), target, wait)

    def _moment(self, activity: Activity, stage: int, micro_batch: int) -> Watched:
        return Watched(self._watchers, Moment(activity, stage, micro_batch))

    def _has(self, number: int) -> bool:
        """Whether a stage is on this rank, so that nothing is sent to it."""
        return number in self._stages
