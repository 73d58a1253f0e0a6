"""The row of numbers of a step, added up over all ranks: the same bits on each."""

import torch
import torch.distributed as dist

_MOST_GATHERED = 1 << 16
"""Numbers of all rows together; longer ones are cheaper to reduce than to gather."""


class OtherCollective(RuntimeError):
    """What a peer sent is no row of this step: it is in another collective."""


class StepSums:
    """A row that is under way to all ranks.

    gloo reduces a short row in four small messages for each rank, one after the other: to gather the rows and to add
    them up here takes one, and on two ranks a quarter of the time. A row ends with a mark of its step, because gloo
    takes a message that is too short for a row.
    """

    def __init__(self, own: torch.Tensor, step: int) -> None:
        """`own`: float64 [numbers], as long on every rank."""
        world = dist.get_world_size()
        self._step = step
        self._rows: list[torch.Tensor] | None = None
        self._own, self._work = own, None
        if own.device.type == "cpu" and world * len(own) <= _MOST_GATHERED:
            marked = torch.cat([own, own.new_tensor([_mark(step)])])
            self._rows = list(own.new_zeros(world, len(marked)))
            self._work = dist.all_gather(self._rows, marked, async_op=True)
        else:
            self._work = dist.all_reduce(own, async_op=True)

    def wait(self) -> torch.Tensor:
        """The sums [numbers]; on a GPU the device's stream waits. Raises OtherCollective."""
        if self._work is not None:
            self._work.wait()
        if self._rows is None:
            return self._own
        strange = [rank for rank, row in enumerate(self._rows) if row[-1].item() != _mark(self._step)]
        if strange:
            raise OtherCollective(
                f"step {self._step}: what came from rank {', '.join(map(str, strange))} is not the numbers of this "
                "step: Is there a distributed collective mismatch in your code?"
            )
        # In one order everywhere: torch's sum over rows depends on how wide a host's vectors are.
        sums = self._rows[0][:-1].clone()
        for row in self._rows[1:]:
            sums += row[:-1]
        return sums


def _mark(step: int) -> float:
    """Neither a count nor a loss is likely to be it; exact for every step below 2**50."""
    return -(step + 0.375)
