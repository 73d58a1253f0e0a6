"""Runs the stages of this rank, in torch's runtime, in the order of a table."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from trainer.contract.pipeline.pipeline_config import PipelineConfig
from trainer.worker.pipeline.activities import Activity, Moment, Watched, Watcher
from trainer.worker.pipeline.stage import Stage
from trainer.worker.pipeline.torch_costs import leave_out_what_nobody_reads
from trainer.worker.pipeline.torch_tables import computations

_OF_FORWARD = (
    _ComputationType.UNSHARD,
    _ComputationType.RECV_F,
    _ComputationType.FORWARD,
    _ComputationType.SEND_F,
    _ComputationType.RESHARD,
)


class Pipeline:
    """One rank's stages; every rank of the pipeline calls the same methods with as many micro-batches.

    All schedules run in the runtime that torch has for tables: it posts receives before they are needed and waits for
    no send, and with FSDP2 it gathers a stage's parameters once a step and reduces its gradients once.
    """

    def __init__(
        self, config: PipelineConfig, stages: Sequence[Stage], micro_batches: int, watchers: Sequence[Watcher] = ()
    ) -> None:
        leave_out_what_nobody_reads()
        self.stages, self.micro_batches = stages, micro_batches
        self._scale = self._factor = 1.0
        self._losses: list[torch.Tensor] = []
        # Scaled here, as the loop without a pipeline does it: dividing sums later would round other bits.
        self._runtime = _PipelineScheduleRuntime(list(stages), micro_batches, loss_fn=self._loss, scale_grads=False)
        self._watchers = list(watchers)
        for stage in stages:
            stage.watchers = self._watchers
        self._runtime.fwd_recv_ops = _WatchedReceives(Activity.WAIT_FOR_ACTIVATION, self._watchers)
        self._runtime.bwd_recv_ops = _WatchedReceives(Activity.WAIT_FOR_GRADIENT, self._watchers)
        self._runtime.pipeline_order = computations(config, micro_batches)
        self._runtime._prepare_schedule_with_comms(self._runtime.pipeline_order)
        self._all = self._runtime.pipeline_order_with_comms
        self._forward = {rank: [one for one in order if _is_forward(one)] for rank, order in self._all.items()}

    def watch(self, watcher: Watcher) -> None:
        """Have `watcher` told, too, from now on."""
        self._watchers.append(watcher)

    def ask_before_sends(self, may_send: Callable[[], bool]) -> None:
        """Have `may_send` asked before everything that is sent; what it refuses is never sent."""
        for stage in self.stages:
            stage.may_send = may_send

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to other stages since the beginning."""
        return sum(stage.sent_bytes for stage in self.stages)

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
        self._runtime.pipeline_order_with_comms = self._all
        return self._run(self._runtime.step, batches)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean loss of `batches`, as `step` returns it, without gradients."""
        self._factor = self._scale = 1.0
        # torch's own `eval` takes all actions, and of a V fails at the first backward pass.
        self._runtime.pipeline_order_with_comms = self._forward
        total = self._run(self._runtime.eval, batches)
        for stage in self.stages:
            stage.clear_runtime_states()  # activations that were sent
        return total

    def _run(self, run: Any, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(batches) != self.micro_batches:
            raise ValueError(f"{len(batches)} micro-batches for a pipeline that was made for {self.micro_batches}")
        if len(shapes := {batch.shape for batch in batches}) > 1:
            raise ValueError(f"micro-batches of {len(shapes)} shapes: all of a pipeline must have the same")
        self._losses.clear()
        for stage in self.stages:
            stage.sends.clear()
        tokens = torch.cat(list(batches))
        args = (tokens[:, :-1],) if any(stage.is_first for stage in self.stages) else ()
        if self.has_last:
            # The last stage computes the loss itself; torch asks for a target all the same.
            run(*args, target=tokens[:, 1:], targets=tokens[:, 1:], return_outputs=False)
        else:
            run(*args, return_outputs=False)
        for stage in self.stages:
            stage.wait_for_sends()
        total = torch.zeros((), device=tokens.device)
        for loss in self._losses:
            total += loss
        return total

    def _loss(self, output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        loss = output / self.micro_batches
        if self._factor != 1.0:
            loss = loss * self._factor
        self._losses.append(loss.detach().clone())
        return loss if self._scale == 1.0 else loss.float() * self._scale


def _is_forward(action: _Action) -> bool:
    return action.computation_type in _OF_FORWARD


class _WatchedReceives(dict[tuple[int, int], list[Any]]):
    """Receives that were posted, by stage and micro-batch; the runtime takes one out and waits for it."""

    def __init__(self, activity: Activity, watchers: Sequence[Watcher]) -> None:
        super().__init__()
        self._activity, self._watchers = activity, watchers

    def __setitem__(self, key: tuple[int, int], works: list[dist.Work]) -> None:
        super().__setitem__(key, [_WatchedReceive(works, Moment(self._activity, *key), self._watchers)])


class _WatchedReceive:
    """Stands for the receives that one computation waits for."""

    def __init__(self, works: Sequence[dist.Work], moment: Moment, watchers: Sequence[Watcher]) -> None:
        self._works, self._moment, self._watchers = works, moment, watchers

    def wait(self) -> None:
        with Watched(self._watchers, self._moment):
            for work in self._works:
                work.wait()
