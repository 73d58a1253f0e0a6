"""This process as a rank of its program: it writes its progress cell, and reads the agent's requests from it.

A process has one `ProgramRank`, in the module `orch_program_rank`; the start-up module, the adapters and the package
`orch` share it. Forks, DataLoader workers and other children write nothing. Standard library, Python 3.9.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar, cast

_PAUSE = threading.Event()
"""Never set. Waiting for it is a pause that also works where a program has replaced `time.sleep`."""
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_TICK_SECONDS = 0.5
_DEEPEST = 8
"""Maximum number of slow phases inside each other."""
_REPORTED_LOSSES = 3
"""Number of losses that rank 0 reports after each checkpoint."""

Method = TypeVar("Method", bound=Callable[..., Any])


def _load(name: str) -> Any:
    """Return a module of this folder. The package `orch` loads this file without the start-up module."""
    module = sys.modules.get(f"orch_{name}")
    if module is None:
        spec = importlib.util.spec_from_file_location(f"orch_{name}", os.path.join(_FOLDER, f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module = sys.modules.setdefault(f"orch_{name}", module)
    return module


_layout, _hook = _load("cell_writer"), _load("import_hook")


def _safely(method: Method) -> Method:
    """Make a method do nothing in children and after an internal error, which it reports instead of raising it."""

    @functools.wraps(method)
    def safe(self: ProgramRank, *args: Any, **kwargs: Any) -> Any:
        if self.disabled:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # outermost edge: the program goes on
            self._end_after(error)
            return None

    return cast(Method, safe)


class ProgramRank:
    """Progress of one rank. Calls cost microseconds and never raise an error of their own."""

    def __init__(self, cell: Any, local_rank: int) -> None:
        """`cell` is the `CellWriter`. Use `current` instead."""
        self._cell, self.local_rank = cell, local_rank
        self.disabled, self._own_count = False, False
        self.steps = self._stepped_at = 0
        self.thread = get_ident()
        """Thread that trains; others change no phase."""
        self._slow: list[int] = []
        self.count_collectives: Callable[[], int] = lambda: 0
        self.describe_state: Callable[[int], str] = lambda step: ""
        self.note_optimizer: Callable[[Any], None] = lambda optimizer: None
        self.compare_next: Callable[[bool], None] = lambda resumes: None
        self._mixed = False
        self._after, self._losses = os.environ.get("ORCH_RESUME_PATH", ""), 0
        """Newest checkpoint that was saved or restored, and how many losses after it are reported."""
        cell.claim(os.getpid(), _world_rank(), _generation())

    # -- calls of adapters and of the program

    @_safely
    def step(self, number: int | None = None, loss: float | None = None, total: int | None = None) -> None:
        """Report a finished step. A number sets the count from now on; without one, the step is the next one."""
        changes: dict[str, float] = {}
        if number is not None and not self._own_count:
            self._own_count, changes["restored_step"] = True, max(0, int(number) - 1)
        if total:
            changes["total_steps"] = int(total)
        if loss is not None:
            changes["loss"] = float(loss)
        self._record(self.steps + 1 if number is None else int(number), changes)
        if loss is not None:
            self._append_loss(float(loss))

    def _record(self, number: int, changes: dict[str, float]) -> None:
        if not self._cell.is_owner() and not self._regain():
            return
        now = time.monotonic_ns()
        changes["step"] = number
        if self._stepped_at:
            changes["step_seconds"] = (now - self._stepped_at) * 1e-9
        else:
            changes.setdefault("restored_step", max(0, number - 1))
            threading.Thread(target=self._tick, name="orch-progress", daemon=True).start()
        self.steps, self._stepped_at, self.thread = number, now, get_ident()
        self._slow.clear()
        self._cell.enter(_layout.FORWARD, changes)
        if "step_seconds" in changes:
            self._cell.begin_timing(number)

    def _regain(self) -> bool:
        """Take the cell back from a child that claimed it before this process trained. Otherwise write nothing more."""
        owner = self._cell.owner()
        if not _is_alive(owner) or os.getpid() in _ancestors(owner):
            self._cell.claim(os.getpid(), _world_rank(), _generation())
            return True
        self.disabled = True
        return False

    @_safely
    def begin_training(self, *, resumes: bool, mixed: bool) -> None:
        """Declare that the program trains a model from now on, and whether it continues from ORCH_RESUME_PATH.

        `mixed` means that its checkpoints are in one place with those of another model.
        """
        self._after, self._losses = os.environ.get("ORCH_RESUME_PATH", "") if resumes else "", 0
        self.compare_next(resumes)
        if mixed:
            self._mixed = True
            self._append({})

    @_safely
    def loss(self, value: float) -> None:
        """Report the loss of the newest step."""
        self._cell.update(loss=float(value))
        self._append_loss(float(value))

    def _append_loss(self, value: float) -> None:
        """Report the first losses after a checkpoint, with which a restore test compares its own."""
        if self._after and self._losses < _REPORTED_LOSSES and self._cell.rank() <= 0:
            self._losses += 1
            self._append({"after": self._after, "of_step": self.steps, "loss": value})

    @_safely
    def enter(self, phase: str) -> None:
        """Enter a phase (`cell_writer.PHASES`). It lasts until `leave`, another `enter`, or the next step."""
        self._slow = [*self._slow[1 - _DEEPEST :], _layout.PHASES[phase]]
        self._cell.enter(self._slow[-1])

    @_safely
    def leave(self, phase: str) -> None:
        """Return to the phase before `phase`, unless the program has left it already."""
        code = _layout.PHASES[phase]
        if code in self._slow:
            while self._slow.pop() != code:
                pass
            self._cell.enter(self._slow[-1] if self._slow else _layout.FORWARD)

    @_safely
    def saved(
        self, step: int, path: str, framework: str = "", *, late: bool = False, is_data: bool = False
    ) -> None:  # fmt: skip
        """Report a finished checkpoint. `framework` is the adapter that saw the save; others may just be imported.

        A `late` report comes after further steps, so the parameters are no longer those that were saved.
        """
        self._cell.update(saved_step=max(int(step), self._cell.read_saved_step()))
        self._append_save(step, path, "", framework, "" if late else self.describe_state(self.steps), is_data)

    @_safely
    def save_failed(self, step: int, path: str, reason: str) -> None:
        """Report a checkpoint that could not be written."""
        self._append_save(step, path, reason or "failed")

    def _append_save(
        self, step: int, path: str, failed: str, framework: str = "", state: str = "", is_data: bool = False
    ) -> None:  # fmt: skip
        if not failed:
            self._after, self._losses = os.path.abspath(path), 0
        self._append({"step": int(step), "path": os.path.abspath(path), "failed": failed, "state": state,
                      "frameworks": framework or self._cell.frameworks, "is_data": is_data})  # fmt: skip

    @_safely
    def report_restore(self, agrees: bool) -> None:
        """Report whether an optimizer's parameters before its first step are those of the save at ORCH_RESUME_PATH."""
        self._append({"restored": os.environ.get("ORCH_RESUME_PATH", ""), "agrees": agrees})

    def _append(self, row: dict[str, Any]) -> None:
        """Append a row to the file of this node's ranks that the agent reads."""
        place = os.environ.get("ORCH_SAVED")
        if not place:
            return
        row.update(rank=self._cell.rank(), generation=_generation(), time=time.time(), mixed=self._mixed)
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, (json.dumps(row) + "\n").encode(errors="backslashreplace"))
        finally:
            os.close(descriptor)

    def stop_request(self) -> tuple[int, float]:
        """Return the agent's request: a `StopReason` (0: none) and its deadline on CLOCK_MONOTONIC (0: none)."""
        if self.disabled:
            return 0, 0.0
        found: tuple[int, float] = self._cell.read_stop_request()
        return found

    @_safely
    def answer_requests(self) -> None:
        """Declare that this program reads stop requests, saves, and ends itself, so that it gets no SIGTERM."""
        self._cell.add_flags(_layout.ANSWERS)

    @_safely
    def found(self, framework: str) -> None:
        """Record a framework that the program uses."""
        self._cell.add_framework(framework)

    def report_error(self, text: str) -> None:
        """Record an internal error, and report nothing from now on. Never raises."""
        self.disabled = True
        try:
            self._cell.disable(text)
        except Exception:  # noqa: BLE001  # outermost edge: there is no other place to report it
            return

    def _end_after(self, error: Exception) -> None:
        """Report an internal error. Raises it again if a signal handler of the program has raised it."""
        if _hook.is_from_signal_handler(error):
            raise error
        self.report_error(f"{type(error).__name__}: {error}")

    # -- calls of torch's hooks

    def optimizer_step(self, number: int) -> None:
        """Report a step that an optimizer hook has counted. Programs that count their steps override it."""
        if self.disabled:
            return
        if self._own_count or number <= self.steps:
            self.move_to(_layout.OPTIMIZER)
        elif not self._stepped_at or not self._cell.is_owner():
            self._record(number, {})
        else:
            self._stepped_at = self._cell.record_step(number, self._stepped_at)
            self._cell.begin_timing(number)
            self.steps, self.thread = number, get_ident()
            if self._slow:
                self._slow.clear()

    def move_to(self, phase: int) -> None:
        """Enter a phase of a step, or only record movement during a slow phase and on other threads. Never raises.

        A backward pass ends an evaluation.
        """
        if self.disabled:
            return
        try:
            if self._slow and phase == _layout.BACKWARD and self._slow[-1] == _layout.EVAL:
                self._slow.pop()
            if self._slow or get_ident() != self.thread:
                self._cell.update()
            elif phase != self._cell.phase:
                self._cell.enter(phase)
        except Exception as error:  # noqa: BLE001  # outermost edge: the program goes on
            self._end_after(error)

    @_safely
    def use_counts(self, count: Callable[[], int], count_all: Callable[[], int | None]) -> None:
        """Use these functions, which return the number of collectives; `count_all` returns None if it is unknown."""
        self.count_collectives, self._cell.count_collectives = count, count_all

    @_safely
    def set_rank(self, rank: int) -> None:
        """Record the rank that the process group has given to this process."""
        self._cell.set_rank(rank)

    def phase(self) -> int:
        return cast(int, self._cell.phase)

    def _tick(self) -> None:
        while not self.disabled:
            self._tick_once()
            _PAUSE.wait(_TICK_SECONDS)

    @_safely
    def _tick_once(self) -> None:
        self._cell.tick(self.count_collectives())


_current: ProgramRank | None = None
_asked = False
_claimed: list[Callable[[ProgramRank], None]] = []


def known() -> ProgramRank | None:
    """Return this process's rank, or None while it has none."""
    return _current


def current() -> ProgramRank | None:
    """Return this process's rank; None without an agent, or if another process is the rank.

    A process that its launcher has given a LOCAL_RANK is a rank from now on, others once they join a process group or
    step an optimizer.
    """
    global _asked
    if not _asked:
        _asked = True
        if _named_rank() is not None:
            _claim(_named_rank())
    return _current


def join(rank: int) -> ProgramRank | None:
    """Return this process's rank now that it trains, as `rank` of its process group (-1: unknown).

    A child takes the place of a parent that does not train itself.
    """
    global _asked
    _asked = True
    if _current is None:
        named = _named_rank()
        _claim(rank % max(1, len(_cells())) if named is None and rank >= 0 else named or 0)
    if _current is not None and rank >= 0:
        _current.set_rank(rank)
    return _current


def when_claimed(act: Callable[[ProgramRank], None]) -> None:
    """Call `act` with this process's rank, now or once it has one."""
    _claimed.append(_hook.guard(act))
    if _current is not None:
        _claimed[-1](_current)


def _claim(local_rank: int | None) -> None:
    """Become the rank with this local number, unless another living process is that rank."""
    global _current
    cells = _cells()
    if local_rank is None or local_rank >= len(cells) or not cells[local_rank]:
        return
    cell = _layout.CellWriter(cells[local_rank])
    owner = cell.owner()
    if owner and owner != os.getpid() and _is_alive(owner) and not _is_idle_parent(owner, cell):
        return
    _current = ProgramRank(cell, local_rank)
    for act in _claimed:
        act(_current)


def _forget() -> None:
    """Write nothing in a fork, unless it joins a process group or steps its own optimizer later."""
    global _current
    if _current is not None:
        _current.disabled, _current = True, None


os.register_at_fork(after_in_child=_forget)


def _is_idle_parent(owner: int, cell: Any) -> bool:
    """Return whether a cell's owner has started this process and has not trained a step itself."""
    return not cell.read_step() and owner in _ancestors(os.getpid())


def _ancestors(pid: int) -> list[int]:
    """Return a process and those that have started it, nearest first, as far as they are visible."""
    found: list[int] = []
    while pid > 1 and pid not in found:
        found.append(pid)
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
                pid = int(stream.read().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found


def _cells() -> list[str]:
    return os.environ.get("ORCH_CELLS", "").split(",")


def _named_rank() -> int | None:
    """Return the local rank that a launcher has given to this process."""
    number = os.environ.get("LOCAL_RANK", "")
    return int(number) if number.isdigit() else None


def _world_rank() -> int:
    number = os.environ.get("RANK", "")
    return int(number) if number.isdigit() else -1


def _generation() -> int:
    number = os.environ.get("ORCH_GENERATION", "")
    return int(number) if number.isdigit() else 0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
