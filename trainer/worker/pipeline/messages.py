"""Messages between the stages of a pipeline: activations to the next one, gradients to the one before."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from trainer.worker.pipeline.activities import Activity, Moment, Watched


class Messages:
    """Those of one rank; shapes are known beforehand, so that no rank sends another one pickled metadata.

    A message is named by the moment in which it is waited for: `WAIT_FOR_...`, stage and micro-batch.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._posted: dict[Moment, tuple[torch.Tensor, dist.Work | None]] = {}
        self._sent: list[tuple[Watched, dist.Work]] = []
        self.sent_bytes = 0  # since the beginning
        self.may_send: Callable[[], bool] = lambda: True
        """Asked before everything that is sent."""

    def post(self, wait: Moment, buffer: torch.Tensor, source: int) -> None:
        """Begin to receive into `buffer` from this rank of the group, before it is needed."""
        self._posted[wait] = buffer, dist.irecv(buffer, group=self._group, group_src=source)

    def hand_over(self, wait: Moment, tensor: torch.Tensor) -> None:
        """What two stages of this rank have for each other is not sent."""
        self._posted[wait] = tensor, None

    def take(self, wait: Watched) -> torch.Tensor:
        """What was posted or handed over; waits for it where that has to be."""
        tensor, work = self._posted.pop(wait.moment)
        if work is not None:
            with wait:
                work.wait()
        return tensor

    def posted(self, activity: Activity) -> int:
        """How many receives are waited for in this activity."""
        return sum(wait.activity is activity for wait in self._posted)

    def send(self, send: Watched, tensor: torch.Tensor, target: int, wait: Watched) -> None:
        """Begin to send to this rank of the group; `wait`: for that rank to take it, at the end of the step."""
        with send:
            if self.may_send():
                self.sent_bytes += tensor.nbytes
                work = dist.isend(tensor, group=self._group, group_dst=target)
                assert work is not None
                self._sent.append((wait, work))

    def wait_for_sends(self) -> None:
        """Until all that was sent has been taken, oldest first."""
        for wait, work in self._sent:
            with wait:
                work.wait()
        self._sent.clear()

    def clear(self) -> None:
        """Forget what is under way."""
        self._posted.clear()
        self._sent.clear()
