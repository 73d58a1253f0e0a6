"""The single reduction of a step: gradient norm, loss, metrics, stop votes and rank 0's message."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer.parallel.apply.data_parallel import are_equal, residue
from trainer.parallel.apply.gradient_buckets import GradientFacts, StepSums, own_part
from trainer.parallel.apply.mesh import Layout, all_gather_json
from trainer.protocol.rank_progress.progress import StopReason
from trainer.worker.train_loop.save_schedule import SaveVote
from trainer.worker.workload import Mean, Metric, Rank0, Sum, WorkloadError


def scalar_loss(workload: object, loss: Any) -> torch.Tensor:
    """Return the result of a user's `loss()`. Raises WorkloadError if no backward pass can start from it."""
    if isinstance(loss, torch.Tensor) and not loss.dim() and loss.requires_grad:
        return loss
    if not isinstance(loss, torch.Tensor):
        found = "None" if loss is None else f"a {type(loss).__name__}"
    else:
        found = f"a tensor of shape {list(loss.shape)}" if loss.dim() else "a tensor without a gradient"
    raise WorkloadError(
        f"{type(workload).__name__}.loss() returned {found}: it must return the mean loss of the micro-batch as a "
        "scalar tensor with a gradient"
    )


_CELLS = 3
"""Cells per number: its sum, the sum of its weights, and the number of ranks that contribute to a plain sum."""


class MetricReducer:
    """Reduces a workload's numbers over all ranks. Every call must use the names of the first call."""

    def __init__(self, method: str, layout: Layout) -> None:
        """Create a reducer. `method` is the name of the workload's method, for messages."""
        self._method, self._layout = method, layout
        self._names: list[str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the first call."""
        return tuple(self._names or ())

    def pack(self, values: Mapping[str, Metric]) -> torch.Tensor:
        """Return the float64 row to sum over the ranks. The first call is collective. Raises WorkloadError."""
        given = self._check_metrics(values)
        if self._names is None:
            self._names = list(
                dict.fromkeys(name for names in all_gather_json(list(given), torch.device("cpu")) for name in names)
            )
        new = [name for name in given if name not in self._names]
        if new:
            raise WorkloadError(
                f"{self._method}() returns {new[0]}, which it did not return the first time: return all names every "
                "time, with None for a missing number"
            )
        return self._tensor([cell for name in self._names for cell in self._row(given.get(name))])

    def unpack(self, numbers: list[float]) -> dict[str, float]:
        """Return the numbers, keyed by name, from the sum of all ranks' rows. Names without a value are omitted."""
        rows = zip(self.names, numbers[::_CELLS], numbers[1::_CELLS], numbers[2::_CELLS], strict=True)
        return {name: total if summed else total / weight for name, total, weight, summed in rows if summed or weight}

    def reduce(self, values: Mapping[str, Metric]) -> dict[str, float]:
        """Pack, sum and unpack. Collective, and waits for the device."""
        row = self.pack(values)
        if len(row):
            dist.all_reduce(row)
        return self.unpack(row.tolist())

    def _check_metrics(self, values: Any) -> dict[str, Mean | Sum | Rank0 | None]:
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise WorkloadError(f"{self._method}() must return a dict of numbers by name")
        return {name: self._as_metric(name, value) for name, value in values.items()}

    def _as_metric(self, name: str, value: Any) -> Mean | Sum | Rank0 | None:
        made = value if isinstance(value, (Mean, Sum, Rank0)) or value is None else Mean(value)
        for number in () if made is None else vars(made).values():
            sound = number.numel() == 1 if isinstance(number, torch.Tensor) else isinstance(number, Real)
            if not sound:
                raise WorkloadError(
                    f"{self._method}() returns {name}, which is neither a number nor a tensor with one element"
                )
        return made

    def _row(self, value: Mean | Sum | Rank0 | None) -> tuple[Any, Any, float]:
        if value is None or (isinstance(value, Rank0) and self._layout.rank != 0):
            return 0.0, 0.0, 0.0
        if isinstance(value, Rank0):
            return _whole(value.value), 1.0, 0.0
        if isinstance(value, Sum):  # ranks that read the same data count it once
            return _whole(value.value) / self._layout.ranks_per_share, 0.0, 1.0
        weight = _whole(value.weight)
        # A mean over no samples is NaN on this rank and must not enter the sum.
        empty = isinstance(weight, float) and not weight
        return 0.0 if empty else _whole(value.value) * weight, weight, 0.0

    def _tensor(self, cells: list[Any]) -> torch.Tensor:
        """Return the cells as a row, without waiting for cells on the device."""
        plain = [0.0 if isinstance(cell, torch.Tensor) else float(cell) for cell in cells]
        row = torch.tensor(plain, dtype=torch.float64, device="cpu").to(self._layout.device, non_blocking=True)
        for at, cell in enumerate(cells):
            if isinstance(cell, torch.Tensor):
                row[at] = cell.reshape(())
        return row


def _whole(number: Any) -> Any:
    """Return a float, or an unsharded tensor without gradients."""
    if not isinstance(number, torch.Tensor):
        return float(number)
    number = number.full_tensor() if isinstance(number, DTensor) else number
    return number.detach().double()


@dataclass(frozen=True, kw_only=True)
class RankZeroMessage:
    """Rank 0's message to all ranks in a step. Every other rank sends zeros."""

    save_vote: SaveVote = SaveVote.NONE
    committed: int = 0  # step of the newest committed checkpoint


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a finished step, bitwise equal on all ranks."""

    step: int
    loss: float
    grad_norm: float
    stop: StopReason
    message: RankZeroMessage
    used_alike: bool = True  # whether all ranks have gradients of the same parameters
    gradients_alike: bool = True  # whether ranks that hold all gradients hold equal ones
    own: list[float] = field(default_factory=list)  # sums of the workload's own numbers
    loads: list[float] = field(default_factory=list)  # tokens of each expert, layer by layer


class OwnNumbers(NamedTuple):
    """This rank's optional float64 numbers to sum."""

    metrics: torch.Tensor | None = None
    """Row of the workload's own numbers."""

    loads: torch.Tensor | None = None
    """Tokens of each expert, layer by layer."""


NO_NUMBERS = OwnNumbers()


class Reduced:
    """Sums of one step, available on the device immediately and on the host through `result`."""

    def __init__(self, step: int, row: StepSums, norm: torch.Tensor | None = None, *, experts: int = 0) -> None:
        """Wrap a row of sums, with `experts` loads at its end. `norm` is set if it is known before the sums."""
        self.step = step
        self._row, self._norm, self._experts = row, norm, experts
        self._world = dist.get_world_size()
        self._host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until all ranks have taken part. On a GPU, the stream waits, and copying the sums starts."""
        if self._host is not None:
            return
        self._sums = self._row.wait()
        # The copy runs behind the step's other work, so it is complete by the time it is read one step later.
        self._host = self._sums.to("cpu", non_blocking=True)
        if self._sums.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def norm(self) -> torch.Tensor:
        """Norm of all gradients. Valid after `wait`, or earlier if it was known before the sums."""
        return self._sums[0].sqrt() if self._norm is None else self._norm

    @property
    def loads(self) -> torch.Tensor | None:
        """Tokens of each expert on all ranks. Valid after `wait`."""
        return self._sums[len(self._sums) - self._experts :] if self._experts else None

    def result(self) -> StepResult:
        self.wait()
        assert self._host is not None
        if self._copied is not None:
            self._copied.synchronize()
        squares, loss, residues, residue_squares, save_vote, committed, marks, mark_squares, *sums = self._host.tolist()
        message = RankZeroMessage(save_vote=SaveVote(int(save_vote)), committed=int(committed))
        rest = len(sums) - self._experts
        votes, own, loads = sums[: len(StopReason)], sums[len(StopReason) : rest], sums[rest:]
        stop = agreed_stop(votes)
        return StepResult(
            step=self.step, loss=loss, grad_norm=squares**0.5, stop=stop, message=message, own=own,
            loads=loads,
            used_alike=are_equal(self._world, marks, mark_squares),
            # Non-finite values are reported as a spike.
            gradients_alike=not math.isfinite(squares) or are_equal(self._world, residues, residue_squares),
        )  # fmt: skip


def reduce(
    step: int, gradients: Sequence[torch.Tensor], loss: torch.Tensor, asked: StopReason, message: RankZeroMessage,
    own: OwnNumbers = NO_NUMBERS, about: GradientFacts | None = None,
) -> Reduced:  # fmt: skip
    """Start the sum over all ranks. `loss` is this rank's mean, and `about` has the gradients to compare.

    If all ranks have equal gradients, the norm is known without waiting for the sum.
    """
    world = dist.get_world_size()
    about = about or GradientFacts()
    squares = squared_norm(gradients, world // about.stages).to(loss.device)
    marks = [float(about.used), float(about.used) ** 2]  # exact, because it stays below 2**53 even for a million ranks
    numbers = [float(message.save_vote), float(message.committed), *marks, *stop_votes(asked)]
    rest = torch.tensor(numbers, dtype=torch.float64, device="cpu").to(loss.device, non_blocking=True)
    more = [row for row in own if row is not None]
    mark = _mark(squares, about)
    sums = torch.cat([torch.stack([squares, loss.detach().double() / world, mark, mark * mark]), rest, *more])
    norm = (squares * world).sqrt() if about.alike else None
    reduced = Reduced(step, StepSums(sums, step), norm, experts=0 if own.loads is None else len(own.loads))
    if not about.alike:
        reduced.wait()
    return reduced


def _mark(squares: torch.Tensor, about: GradientFacts) -> torch.Tensor:
    """Return the value that ranks compare, or zero if nothing is compared."""
    if about.alike:
        return residue(squares)
    if about.compared:
        return residue(squared_norm(about.compared, 1).to(squares.device))
    return torch.zeros_like(squares)


def stop_votes(reason: StopReason) -> list[float]:
    """Return one number per reason, to sum over the ranks."""
    return [1.0 if reason == candidate else 0.0 for candidate in StopReason]


def agreed_stop(sums: list[float]) -> StopReason:
    """Return the highest reason that any rank voted for. It is the same on all ranks because the sums are."""
    return max((reason for reason, count in zip(StopReason, sums, strict=True) if count > 0), default=StopReason.NONE)


def squared_norm(gradients: Sequence[torch.Tensor], world: int) -> torch.Tensor:
    """Return this rank's share of the squared gradient norm in float64.

    An element held by n ranks counts 1/n on each. `world` is the number of ranks with these parameters or shards.
    """
    shares = [(own_part(gradient), 1.0 / copies(gradient, world)) for gradient in gradients]
    if not shares:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    norms = torch.stack(torch._foreach_norm([tensor for tensor, _ in shares])).double()
    weights = torch.tensor([weight for _, weight in shares], dtype=torch.float64, device="cpu").to(
        norms.device, non_blocking=True
    )
    return (norms.square() * weights).sum()


def copies(tensor: torch.Tensor, world: int) -> int:
    """Return the number of ranks that hold each element of `tensor`."""
    if not isinstance(tensor, DTensor):
        return world
    sharded = 1
    for dim, placement in enumerate(tensor.placements):
        assert not placement.is_partial(), "gradients are reduced before they are measured"
        if not placement.is_replicate():  # FSDP on top of TP makes a strided shard, for which `is_shard` is False
            sharded *= tensor.device_mesh.size(dim)
    return world // sharded


def unscale(gradients: Sequence[torch.Tensor], scale: float) -> None:
    """Divide by the loss scale. As the scale is a power of two, this is exact unless the result is too small."""
    if scale != 1.0 and gradients:
        torch._foreach_mul_([own_part(gradient) for gradient in gradients], 1.0 / scale)


def clip(gradients: Sequence[torch.Tensor], norm: torch.Tensor, limit: float) -> None:
    """Scale gradients down to the norm `limit`, on the device, without waiting for the norm on the host."""
    if limit <= 0 or not gradients:
        return
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    shards = [own_part(gradient) for gradient in gradients]
    torch._foreach_mul_(shards, factor.float().to(shards[0].device))  # the CPU for offloaded gradients
