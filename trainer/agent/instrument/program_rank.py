"""This process as a rank of its program: the writer of its progress cell, and the reader of the agent's requests.

A process has one `ProgramRank`, in the module `orch_program_rank`; the start-up module, the adapters and the package
`orch` share it. Forks, DataLoader workers and other children write nothing. Standard library, Python 3.9.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_TICK_SECONDS = 0.5

Method = TypeVar("Method", bound=Callable[..., Any])


def _cell_writer() -> Any:
    import importlib.util

    name = "orch_cell_writer"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, os.path.join(_FOLDER, "cell_writer.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def _safely(method: Method) -> Method:
    """Make a method do nothing in children and after an internal error, which it reports instead of raising it."""

    @functools.wraps(method)
    def safe(self: ProgramRank, *args: Any, **kwargs: Any) -> Any:
        if self.disabled or os.getpid() != self.pid:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # outermost edge: the program must not see it
            if _is_foreign(error):  # a signal handler of the program has raised it
                raise
            self.report_error(f"{type(error).__name__}: {error}")
            return None

    return cast(Method, safe)


def _is_foreign(error: BaseException) -> bool:
    """Return whether an error was raised in a file outside this folder."""
    trace = error.__traceback__
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith((_FOLDER, "<frozen")):
            return True
        trace = trace.tb_next
    return False


class ProgramRank:
    """Progress of one rank. Calls cost microseconds and never raise an error of their own."""

    def __init__(self, cell: Any, layout: Any) -> None:
        """`cell` is the `CellWriter`, `layout` its module. Use `current` instead."""
        self._cell, self._layout, self.pid = cell, layout, os.getpid()
        self.disabled, self._own_count = False, False
        self.steps = self._first = 0
        self._stepped_at = 0.0
        self._before: list[int] = []  # phases to return to
        self._ticker: threading.Thread | None = None
        cell.claim(self.pid, _world_rank())
        cell.update(phase=layout.PHASES["init"], generation=int(os.environ.get("ORCH_GENERATION", "0")))

    @_safely
    def step(self, number: int | None = None, loss: float | None = None, total: int | None = None) -> None:
        """Report a finished step. A number sets the count from now on; without one, the step is the next one."""
        self._own_count = self._own_count or number is not None
        self._record(self.steps + 1 if number is None else int(number), loss, total)

    @_safely
    def optimizer_step(self, number: int) -> None:
        """Report a step that an optimizer hook has counted. Programs that count their steps override it."""
        if self._own_count or number <= self.steps:
            self._cell.touch()
        else:
            self._record(number, None, None)

    def _record(self, number: int, loss: float | None, total: int | None) -> None:
        now = time.monotonic()
        changes: dict[str, float] = {"step": number}
        if not self._first:
            self._first = number
            changes["restored_step"] = max(0, number - 1)
            self._cell.add_flags(self._layout.JOINED)
            self._start_ticker()
        else:
            changes["step_seconds"] = now - self._stepped_at
            self._cell.warm = True
        if total:
            changes["total_steps"] = int(total)
        if loss is not None:
            changes["loss"] = float(loss)
        self.steps, self._stepped_at = number, now
        self._cell.enter(self._layout.PHASES["forward"], changes)

    @_safely
    def loss(self, value: float) -> None:
        """Report the loss of the newest step."""
        self._cell.update(loss=float(value))

    @_safely
    def enter(self, phase: str) -> None:
        """Enter a phase (`cell_writer.PHASES`)."""
        self._before = [*self._before[-8:], self._cell.phase]
        self._cell.enter(self._layout.PHASES[phase])

    @_safely
    def leave(self, phase: str) -> None:
        """Return to the phase before `phase`, unless the program has left it already."""
        before = self._before.pop() if self._before else self._layout.PHASES["forward"]
        if self._cell.phase == self._layout.PHASES[phase]:
            self._cell.enter(before)

    @_safely
    def saved(self, step: int, path: str) -> None:
        """Report a finished checkpoint."""
        self._cell.update(saved_step=max(int(step), self._cell.saved_step))
        self._append_save(step, path, "")

    @_safely
    def save_failed(self, step: int, path: str, reason: str) -> None:
        """Report a checkpoint that could not be written."""
        self._append_save(step, path, reason or "failed")

    def _append_save(self, step: int, path: str, failed: str) -> None:
        place = os.environ.get("ORCH_SAVED")
        if not place:
            return
        generation = int(os.environ.get("ORCH_GENERATION", "0"))
        row = {"rank": _world_rank(), "generation": generation, "step": int(step), "path": os.path.abspath(path),
               "failed": failed, "time": time.time()}  # fmt: skip
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, (json.dumps(row) + "\n").encode(errors="backslashreplace"))
        finally:
            os.close(descriptor)

    def stop_request(self) -> tuple[int, float]:
        """Return the agent's request: a `StopReason` (0: none) and its deadline on CLOCK_MONOTONIC (0: none)."""
        if self.disabled or os.getpid() != self.pid:
            return 0, 0.0
        found: tuple[int, float] = self._cell.read_stop_request()
        return found

    @_safely
    def answer_requests(self) -> None:
        """Declare that this program reads stop requests, saves, and ends itself, so that it gets no SIGTERM."""
        self._cell.add_flags(self._layout.ANSWERS)

    @_safely
    def found(self, framework: str) -> None:
        """Record a framework that the program uses."""
        self._cell.add_framework(framework)

    @_safely
    def act_as_rank(self, rank: int) -> None:
        """Record the rank that the process group has given to this process."""
        self._cell.claim(self.pid, rank)

    def report_error(self, text: str) -> None:
        """Record an internal error, and report nothing from now on."""
        self.disabled = True
        try:
            self._cell.disable(text)
        except Exception:  # noqa: BLE001  # outermost edge: there is no other place to report it
            return

    def _start_ticker(self) -> None:
        """Tick while Python's lock is available. Not before the first step, when programs fork DataLoader workers."""
        self._ticker = threading.Thread(target=self._tick, name="orch-progress", daemon=True)
        self._ticker.start()

    def _tick(self) -> None:
        while not self.disabled:
            self._cell.tick()
            time.sleep(_TICK_SECONDS)


_current: ProgramRank | None = None
_opened_by = 0


def current() -> ProgramRank | None:
    """Return this process's rank; None without an agent, or if another process is the rank."""
    global _current, _opened_by
    if _opened_by != os.getpid():
        if _opened_by:  # a fork; it may still become a rank by joining a process group
            return None
        _opened_by = os.getpid()
        _current = _open(_local_rank(), is_rank=False)
    return _current


def join(rank: int) -> ProgramRank | None:
    """Return this process's rank after it has joined a process group as `rank`, also in a child of the program."""
    global _current, _opened_by
    known = current()
    if known is None or (rank >= 0 and not _is_named_by_launcher()):
        _opened_by = os.getpid()
        _current = known = _open(rank % max(1, len(_cells())) if rank >= 0 else _local_rank(), is_rank=True) or known
    if known is not None:
        known.act_as_rank(rank)
    return known


def _open(local_rank: int, *, is_rank: bool) -> ProgramRank | None:
    """Return the rank with this local number, unless another living process has its cell."""
    cells = _cells()
    if not 0 <= local_rank < len(cells) or not cells[local_rank]:
        return None
    layout = _cell_writer()
    cell = layout.CellWriter(cells[local_rank])
    owner, owner_rank = cell.owner()
    if owner and owner != os.getpid() and _is_alive(owner) and not (is_rank and not owner_rank):
        cell.close()
        return None
    return ProgramRank(cell, layout)


def _cells() -> list[str]:
    return os.environ.get("ORCH_CELLS", "").split(",")


def _is_named_by_launcher() -> bool:
    return "LOCAL_RANK" in os.environ


def _local_rank() -> int:
    number = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    return int(number) if number.isdigit() else 0


def _world_rank() -> int:
    number = os.environ.get("RANK", "")
    return int(number) if number.isdigit() else -1


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
