"""Calls for a training loop of your own, started by a `command:`.

    for step in range(first, steps):
        ...
        orch.step(step, loss=loss)
        if orch.should_save():
            save(path)
            orch.saved(path)
        if orch.should_stop():
            break

Without orch's agent nothing is reported or requested, so the same script runs as plain `python train.py`. This file
needs only the standard library and Python 3.9.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from trainer.worker.program.batches import Batches
    from trainer.worker.program.checkpoints import ProgramCheckpoints

SAVE_AND_GO_ON = 1
"""Stop reason of a requested save after which training goes on; higher ones end the program. See StopReason."""

_CELLS, _RESUME = "ORCH_CELLS", "ORCH_RESUME_PATH"
_WRITER = "orch_program_rank"
"""Module that owns this rank's progress cell. The start-up module and the adapters share it."""
_VOTE_SECONDS, _MOST_CALLS = 0.25, 10
_WARN_SECONDS = 60.0


def step(number: int | None = None, loss: Any = None) -> None:
    """Report a finished optimizer step: its number, and its loss as a number or a tensor.

    A loss on a GPU is read at the next call, so that this one does not wait for the device.
    """
    _program().step(number, loss)


def should_save() -> bool:
    """Return whether to save now: a stop is near, `orch save` was typed, or a save of `orch.checkpointer` is due.

    Every rank must call it equally often, and all get the same answer in the same call. A call starts an all-reduce of
    three numbers on a gloo group of its own, and the next call reads it. So a request is served one call late, and
    training does not wait for it. With steps of milliseconds, only every tenth call votes. Without `torch.distributed`,
    each rank decides for itself.
    """
    return _program().should_save()


def should_stop() -> bool:
    """Return whether to end the program now, with exit code 0. The ranks agree as in `should_save`.

    It is false until `should_save` has asked for the last save, if the program calls that too.
    """
    return _program().should_stop()


def saved(path: str | os.PathLike[str], number: int | None = None) -> None:
    """Report a finished checkpoint and its step, by default that of the last `step` call."""
    _program().saved(os.fspath(path), number)


def resume_path() -> str | None:
    """Return the newest complete checkpoint as orch found it, or None to start from scratch."""
    found = os.environ.get(_RESUME, "")
    return found if found and os.path.lexists(found) else None


def checkpointer(
    model: Any,
    optimizer: Any,
    extra: Mapping[str, Any] | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    every: int | str = "auto",
    keep: int = 3,
    data_parallel: tuple[int, int] | None = None,
) -> ProgramCheckpoints:
    """Return a checkpointer for the program: asynchronous, sharded, verified, and restorable into any layout.

    `extra` names further objects with `state_dict` and `load_state_dict`, such as a scheduler or `orch.batches`.
    Checkpoints go into the run's folder; without orch's agent, into `folder`. `every` is the number of steps between
    saves; `auto` lets orch choose. `data_parallel` is this rank's index and the number of ranks with different data; it
    is needed only with tensor parallelism. Collective: every rank must call it after `init_process_group`.
    """
    from trainer.worker.program.checkpoints import open_checkpoints

    return open_checkpoints(
        _program(), model, optimizer, dict(extra or {}), folder=folder, every=every, keep=keep,
        data_parallel=data_parallel,
    )  # fmt: skip


def batches(
    loader: Iterable[Any], *, seed: int = 0, shuffle: bool | None = None, data_parallel: tuple[int, int] | None = None
) -> Batches:
    """Return the loader's batches with an exact position, which `orch.checkpointer(extra={"data": ...})` saves.

    Each sample is read once per epoch, in an order that depends only on `seed` and the epoch. A restart continues after
    the last sample, also with another number of ranks or workers.
    """
    from trainer.worker.program.batches import wrap_loader

    return wrap_loader(loader, seed=seed, shuffle=shuffle, data_parallel=data_parallel)


@functools.cache
def _program() -> Program:
    return Program()


class Program:
    """This process's side of the calls: progress for the agent, and requests on which all ranks agree."""

    def __init__(self) -> None:
        self._pid, self._under_agent = os.getpid(), _CELLS in os.environ
        self._votes = RankVotes()
        self._number: int | None = None
        self._polled = False  # whether the ranks have voted since the last `step`
        self._calls_save = False
        self._waiting_loss: Any = None
        self._unusable = False  # whether the progress cell cannot be opened
        self._served: tuple[int, float] | None = None
        self._save_asked = False  # the save before a stop
        self.cadence: SaveCadence | None = None
        """When saves are due. Set by `orch.checkpointer`."""
        self.loss = float("nan")
        self.stop_reason = 0
        """Highest stop reason on which the ranks have agreed."""

    def writer(self) -> Any:
        """Return the owner of this rank's progress cell, or None without orch's agent or in a child process."""
        if os.getpid() != self._pid or not self._under_agent or self._unusable:
            return None
        try:
            return _writer_module().current()
        except (ImportError, OSError, ValueError) as error:
            self._unusable = True
            sys.stderr.write(f"orch: this program's progress cannot be reported: {error}\n")
            return None

    def step(self, number: int | None, loss: Any) -> None:
        self._number = (self._number or 0) + 1 if number is None else number
        self._polled = False
        known = None if loss is None else self._read_loss(loss)
        self.loss = self.loss if known is None else known
        writer = self.writer()
        if writer is not None:
            writer.step(self._number, known)

    def should_save(self) -> bool:
        self._calls_save = True
        reason = self._poll()
        due = self.cadence is not None and self.cadence.is_due(self._number or 0)
        if self.stop_reason > SAVE_AND_GO_ON:
            first, self._save_asked = not self._save_asked, True
            return first
        return due or reason == SAVE_AND_GO_ON

    def should_stop(self) -> bool:
        if not self._calls_save or not self._polled:
            self._poll()
        return self.stop_reason > SAVE_AND_GO_ON and (self._save_asked or not self._calls_save)

    def saved(self, path: str, number: int | None, *, late: bool = False) -> None:
        writer = self.writer()
        if writer is not None:
            writer.saved((self._number or 0) if number is None else number, path, late=late)

    def _poll(self) -> int:
        """Vote, and return the reason on which all ranks have agreed since the last call."""
        self._polled = True
        if not self._under_agent and self.cadence is None:
            return 0
        writer = self.writer()
        if writer is not None:
            _outlive_sigterm()
            writer.answer_requests()
        agreed = self._votes.exchange(self._own_reason(writer), self._save_vote)
        if agreed is None:
            return 0
        reason, vote = agreed
        if self.cadence is not None:
            self.cadence.record_vote(vote)
        if reason == SAVE_AND_GO_ON and writer is not None:
            self._served = writer.stop_request()
        self.stop_reason = max(self.stop_reason, reason if reason > SAVE_AND_GO_ON else 0)
        return reason

    def _save_vote(self) -> int:
        return 0 if self.cadence is None else self.cadence.vote(self._number or 0)

    def _own_reason(self, writer: Any) -> int:
        request = (0, 0.0) if writer is None else writer.stop_request()
        if request != self._served:
            self._served = None
        return 0 if self._served else int(request[0])

    def _read_loss(self, loss: Any) -> float | None:
        """Return the loss as a number, or None if it is unknown. A loss on a device is returned one call later."""
        before, self._waiting_loss = self._waiting_loss, None
        if hasattr(loss, "detach"):
            loss = loss.detach()
        if getattr(getattr(loss, "device", None), "type", "cpu") != "cpu":
            self._waiting_loss, loss = loss, before
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # several numbers, or no number
            return None if loss is None else float(loss)
        return None


class SaveCadence(Protocol):
    """When saves are due. `vote` is called on rank 0, the others on every rank."""

    def is_due(self, number: int) -> bool: ...

    def vote(self, number: int) -> int: ...

    def record_vote(self, vote: int) -> None: ...


class RankVotes:
    """Votes of all ranks, of which the highest counts. A vote is started in one call and read in the next."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._group: Any = None
        self._world: Any = None  # the default group for which `_group` was made
        self._pending: tuple[Any, Any] | None = None
        self._calls = self._next = 0
        self._every = 1
        self._since: tuple[float, int] | None = None

    def exchange(self, reason: int, vote: Callable[[], int]) -> tuple[int, int] | None:
        """Vote, and return the highest reason and vote of the last exchange, or None if none has ended since."""
        dist = _process_groups()
        if dist is None or dist.get_world_size() == 1:
            return reason, vote()
        self._join(dist)
        self._calls += 1
        agreed = self._read()
        if self._calls >= self._next:
            torch = sys.modules["torch"]
            leads = dist.get_rank(self._group) == 0
            own = [reason, vote() if leads else 0, self._wanted_interval() if leads else 0]
            numbers = torch.tensor(own, dtype=torch.int64, device="cpu")
            work = dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            self._pending, self._next = (work, numbers), self._calls + self._every
        return agreed

    def _join(self, dist: Any) -> None:
        """Create the group, again if the program has created its default group again."""
        if self._world is not dist.group.WORLD:
            self._world, self._group = dist.group.WORLD, dist.new_group(backend="gloo")
            self._pending, self._calls, self._next, self._every = None, 0, 0, 1

    def _read(self) -> tuple[int, int] | None:
        if self._pending is None:
            return None
        (work, numbers), self._pending = self._pending, None
        _wait(work)
        reason, vote, self._every = (int(number) for number in numbers.tolist())
        return reason, vote

    def _wanted_interval(self) -> int:
        """Return how many calls pass between two votes, as measured here."""
        now = self._clock()
        before, self._since = self._since, (now, self._calls)
        if before is None or self._calls == before[1]:
            return 1
        seconds = (now - before[0]) / (self._calls - before[1])
        return max(1, min(_MOST_CALLS, int(_VOTE_SECONDS / max(seconds, 1e-9))))


def _wait(work: Any) -> None:
    """Wait for a vote, and report once if it takes long."""
    warn_at = time.monotonic() + _WARN_SECONDS
    pause = 0.0
    while not work.is_completed():
        if time.monotonic() >= warn_at:
            sys.stderr.write(
                f"orch: should_save() or should_stop() has waited {_WARN_SECONDS:.0f} s for other ranks: every rank "
                "must call them equally often\n"
            )
            break
        time.sleep(pause)
        pause = min(0.01, pause + 0.0005)
    work.wait()


def _process_groups() -> Any:
    """Return torch.distributed if the program has initialized it, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _writer_module() -> Any:
    """Return the module that owns the progress cell. A copy of orch in a container has it in the same place."""
    found = sys.modules.get(_WRITER)
    return found if found is not None else _load_writer()


def _load_writer() -> ModuleType:
    place = Path(__file__).resolve().parent.parent / "trainer" / "agent" / "instrument" / "program_rank.py"
    spec = importlib.util.spec_from_file_location(_WRITER, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} cannot be loaded")
    module = sys.modules[_WRITER] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def _outlive_sigterm() -> None:
    """Ignore SIGTERM in this process, because the request to save comes through the cell. Children get the default.

    A handler of the program stays.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _do_nothing)
        signal.siginterrupt(signal.SIGTERM, False)
        os.register_at_fork(after_in_child=_reset_sigterm)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle the signal by doing nothing."""


def _reset_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _do_nothing:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
