"""Runs the stages of this rank in the order of one of torch's tables."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from trainer.contract.config_sections.pipeline_config import PipelineConfig
from trainer.contract.pipeline.schedule_table import Kind
from trainer.worker.pipeline.action_calls import ActionCalls
from trainer.worker.pipeline.activities import Activity, Watcher
from trainer.worker.pipeline.messages import Messages
from trainer.worker.pipeline.stage import Stage
from trainer.worker.pipeline.torch_tables import with_communication

_OF_FORWARD = (Kind.UNSHARD, Kind.RECEIVE_ACTIVATION, Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.RESHARD)


class Pipeline:
    """One rank's stages; every rank of the pipeline calls the same methods with as many micro-batches.

    All schedules run from tables: receives are posted before they are needed, sends are waited for at the end, and
    with FSDP2 a stage's parameters are gathered once a step and its gradients reduced once. torch's own runtime does
    the same, and looks up for every action what is known when the pipeline is made: 4 % of a step of small stages.
    """

    def __init__(
        self, config: PipelineConfig, stages: Sequence[Stage], micro_batches: int, watchers: Sequence[Watcher] = ()
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
        """Have `watcher` told, too, from now on."""
        self._watchers.append(watcher)
        self._make_calls()

    def _make_calls(self) -> None:
        calls = ActionCalls(self._config, self.stages, self._messages, self._watchers, self._inputs, self._loss)
        self._all = [(f"PP:{action}", calls.of(action)) for action in self._table]
        forward = [action.kind in _OF_FORWARD for action in self._table]
        self._forward = [call for call, is_forward in zip(self._all, forward, strict=True) if is_forward]

    def ask_before_sends(self, may_send: Callable[[], bool]) -> None:
        """Have `may_send` asked before everything that is sent; what it refuses is never sent."""
        self._messages.may_send = may_send

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to other stages since the beginning."""
        return self._messages.sent_bytes

    @property
    def activations_held(self) -> int:
        """Activations of other stages that this rank receives, or has and not yet let go of."""
        held = sum(stage.inputs_held for stage in self.stages if not stage.is_first)
        return held + self._messages.posted(Activity.WAIT_FOR_ACTIVATION)

    @property
    def has_last(self) -> bool:
        """Whether this rank computes the loss."""
        return any(stage.is_last for stage in self.stages)

    def step(self, batches: Sequence[torch.Tensor], *, factor: float = 1.0, scale: float = 1.0) -> torch.Tensor:
        """Gradients of the mean loss of `batches`, times `factor` and `scale`, in the parameters of all stages.

        Each of `batches` [sequences, seq_len + 1] is one micro-batch. Returns the mean loss times `factor`, a scalar
        on the rank of the last stage, and zero on the others.
        """
        self._factor, self._scale = factor, scale
        return self._run(self._all, batches)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean loss of `batches`, as `step` returns it, without gradients."""
        self._factor = self._scale = 1.0
        return self._run(self._forward, batches)

    def _run(self, calls: Sequence[tuple[str, Callable[[], None]]], batches: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(batches) != self.micro_batches:
            raise ValueError(f"{len(batches)} micro-batches for a pipeline that was made for {self.micro_batches}")
        if len(shapes := {batch.shape for batch in batches}) > 1:
            raise ValueError(f"micro-batches of {len(shapes)} shapes: all of a pipeline must have the same")
        self._clear()
        self._batches = batches
        if torch._C._autograd._profiler_enabled():
            calls = [(name, partial(_recorded, name, call)) for name, call in calls]
        for _, call in calls:
            call()
        self._messages.wait_for_sends()
        total = torch.zeros((), device=batches[0].device)
        for loss in self._losses:
            total += loss
        self._clear()
        return total

    def _clear(self) -> None:
        """Forget what an evaluation has left; a step that failed ends the rank, and leaves gradients in FSDP."""
        self._losses.clear()
        self._batches = ()
        self._messages.clear()
        for stage in self.stages:
            stage.clear()

    def _inputs(self, stage: Stage, micro_batch: int) -> dict[str, torch.Tensor]:
        """What the stage is given of the batch, beside what the stage before sends."""
        batch, given = self._batches[micro_batch], {}
        if stage.is_first:
            given["x"] = batch[:, :-1]
        if stage.is_last:
            given["targets"] = batch[:, 1:]
        return given

    def _loss(self, output: torch.Tensor) -> torch.Tensor:
        """What the last stage differentiates; scaled here, as the loop without a pipeline does it.

        Dividing sums later would round other bits.
        """
        loss = output / self.micro_batches
        if self._factor != 1.0:
            loss = loss * self._factor
        self._losses.append(loss.detach())
        return loss if self._scale == 1.0 else loss.float() * self._scale


def _recorded(name: str, call: Callable[[], None]) -> None:
    with torch.profiler.record_function(name):
        call()
