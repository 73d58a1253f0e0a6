"""A rank's progress: phases in its progress cell, ticks, and lines in rank 0's log."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import nn

from trainer.parallel.apply.layer_wrappers import is_compiled
from trainer.protocol.rank_progress.progress import SECTIONS, Activity, Phase, ProgressCell, StageActivity
from trainer.protocol.time_spans import parse_span, span
from trainer.worker.reporting.stderr_best_effort import write_stderr
from trainer.worker.reporting.work_timer import (
    HostClock,
    Stopwatch,
    WaitMeter,
    device_clock,
    exclude_fsdp_waits,
    stopwatch,
)

SECONDS = 0.5


class ProgressTicker:
    """Thread that ticks from `start` to `stop`. It is a daemon, so that it never delays a rank's exit."""

    def __init__(self, cell: ProgressCell, seconds: float = SECONDS) -> None:
        self._cell, self._seconds = cell, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="orch-ticker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _tick(self) -> None:
        while True:
            self._cell.tick()
            if self._ended.wait(self._seconds):
                return


class ProgressLog:
    """Periodic progress lines. Every restart logs its step, because it continues the same log file."""

    def __init__(
        self, every: int | str, total: int, tokens_per_step: float | None = None, *,
        write: Callable[[str], None] = write_stderr, clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """`every` is the steps or the duration between lines, or 0 for none. `total` is the run's number of steps."""
        self._tokens_per_step = tokens_per_step
        self._steps = every if isinstance(every, int) else 0
        self._seconds = parse_span(every) if isinstance(every, str) else None
        self._total, self._write, self._clock, self._wall = total, write, clock, wall
        self._step, self._at = 0, clock()
        self._first = True

    @property
    def _is_enabled(self) -> bool:
        return bool(self._steps or self._seconds)

    def begin(self, step: int) -> None:
        """Note that training starts or resumes after this step."""
        self._step = step
        if step:
            self._write_line(f"resumed from step {step}: later steps logged above are trained again")

    def step(self, step: int, *, loss: float, lr: float, own: Mapping[str, float]) -> None:
        """Record a finished step. A line covers all steps since the previous line."""
        if not self._is_due(step):
            return
        now, trained = self._clock(), step - self._step
        seconds = (now - self._at) / max(1, trained)
        words = [f"step {step}/{self._total}", f"loss {loss:.4f}", f"lr {lr:.3g}"]
        words += _numbers(own)
        if not self._first:  # the first step compiles and allocates, so it is not representative
            words.append(f"{seconds:.3g} s/step")
            words += [f"{self._tokens_per_step / seconds:.0f} tokens/s"] if self._tokens_per_step and seconds else []
            words += [f"ETA {span((self._total - step) * seconds)}"] if step < self._total else []
        self._write_line("  ".join(words))
        self._step, self._at, self._first = step, now, False

    def record_validation(self, step: int, seconds: float, numbers: Mapping[str, float]) -> None:
        """Write the results of a validation after this step. Its duration does not count as step time."""
        self._at += seconds
        self._write_line("  ".join([f"validation after step {step}:", *_numbers(numbers), f"({seconds:.1f} s)"]))

    def _is_due(self, step: int) -> bool:
        if not self._is_enabled:
            return False
        if self._first or step == self._total:
            return True
        if self._seconds is None:
            return step % self._steps == 0
        return self._clock() - self._at >= self._seconds

    def _write_line(self, text: str) -> None:
        if self._is_enabled:
            self._write(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self._wall()))}  {text}")


def _numbers(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} {value:.6g}" for name, value in values.items()]


_SECTION = {phase: index for index, phase in enumerate(SECTIONS)} | {Phase.COMPILE: SECTIONS.index(Phase.FORWARD)}


class PhaseTracker:
    """Tracks one generation's phases from its first step on. This takes a few microseconds per step."""

    def __init__(
        self, cell: ProgressCell, stopwatch: Stopwatch, *, compiles: bool = False,
        waits: WaitMeter | None = None,
    ) -> None:  # fmt: skip
        """If `compiles`, the first forward pass compiles the model. By default, `waits` uses the host's clock."""
        self._cell, self._stopwatch, self._compiles = cell, stopwatch, compiles
        self._messages = 0
        self._moment: StageActivity | None = None
        self._counters: list[Callable[[], int]] = [*_counters(), lambda: self._messages]
        self._section: int | None = None
        self._phase, self._slow_depth, self._thread = Phase.INIT, 0, threading.get_ident()
        self._before = [0] * len(SECTIONS)
        self._last_total = [0] * len(SECTIONS)
        self.last_step = [0] * len(SECTIONS)
        """Nanoseconds of own work per section in the newest step. On a GPU, only what has been measured so far."""
        self.reductions = 0.0
        """Seconds that this rank waited in collectives during the step before the newest."""
        self._waits = waits or WaitMeter(HostClock())
        self._first = True

    def enter(self, phase: Phase, moment: StageActivity | None = None) -> None:
        """Enter a phase. `moment` is this rank's activity in a pipeline phase."""
        if phase is Phase.FORWARD and self._compiles:
            phase, self._compiles = Phase.COMPILE, False
        self._phase, self._moment = phase, moment
        self._waits.end()
        self._cell.enter(phase, self._begun(), moment)
        self._section = _SECTION.get(phase)
        self._stopwatch.switch_to(self._section)

    def pass_callback(self, phase: Phase, moment: StageActivity) -> Callable[[], None]:
        """Return a callback that enters this phase in a pipeline pass. In an evaluation, it changes only the moment."""
        cell, stopwatch, counters, section = self._cell, self._stopwatch, self._counters, _SECTION[phase]

        def begin() -> None:
            if self._phase is Phase.EVAL:
                cell.begin_moment(moment)
                return
            if self._compiles:
                self.enter(phase, moment)
                return
            self._phase, self._moment, self._section = phase, moment, section
            begun = 0
            for count in counters:
                begun += count()
            cell.enter(phase, begun, moment)
            stopwatch.switch_to(section)

        return begin

    def wait_callback(self, moment: StageActivity) -> Callable[[], None]:
        """Return a callback for the start of a wait for another stage. The wait does not count as work."""
        begin_moment = partial(self._cell.begin_moment, moment)
        if not self._stopwatch.counts_waits:
            return begin_moment

        def begin() -> None:
            begin_moment()
            self.pause()

        return begin

    def wait_end_callback(self) -> Callable[[], None] | None:
        """Return a callback for the end of a message or wait, or None. The next activity sets its own moment."""
        if not self._stopwatch.counts_waits:
            return None
        return lambda: self._stopwatch.switch_to(self._section)

    def begin_passes(self, stages: int) -> None:
        """Start the passes of a step on a rank with this many pipeline stages."""
        self._cell.begin_passes(stages)

    def sent_callback(self, place: int, is_gradient: bool, micro_batch: int) -> Callable[[], None]:
        """Return a callback that calls `ProgressCell.record_sent`, except in an evaluation."""
        record = partial(self._cell.record_sent, place, is_gradient, micro_batch)

        def sent() -> None:
            if self._phase is not Phase.EVAL:
                record()

        return sent

    def count_message(self) -> None:
        """Record immediately that this rank has started to send and receive, because gloo does not record messages."""
        self._messages += 1
        self._cell.update(collective=self._begun())

    @contextmanager
    def show_ring_wait(self, source: int) -> Iterator[None]:
        """Show that this rank waits for a message from world rank `source`. Restore its previous moment on exit."""
        self._cell.begin_moment(StageActivity(Activity.WAIT_IN_RING, source, -1))
        yield
        self._cell.begin_moment(self._moment)

    def pause(self) -> None:
        """Stop counting work, because a wait for peers or a message to them follows."""
        self._stopwatch.switch_to(None)

    def begin_wait(self) -> None:
        """Pause for collectives that do not overlap with work. The pause ends with `resume` or the next phase."""
        self.pause()
        self._waits.begin()

    def resume(self) -> None:
        """Resume the paused section."""
        self._waits.end()
        self._stopwatch.switch_to(self._section)

    def _begun(self) -> int:
        return sum([count() for count in self._counters])

    def begin_slow_phase(self, phase: Phase) -> None:
        """Interrupt the current phase for a slow operation that is not part of the step. Calls may be nested."""
        self._slow_depth += 1
        if self._slow_depth == 1:
            self._cell.enter(phase, self._begun())
            if threading.get_ident() == self._thread:  # autograd threads have their own clocks
                self.pause()

    def end_slow_phase(self) -> None:
        """Return to the interrupted step."""
        self._slow_depth -= 1
        if self._slow_depth == 0:
            self._cell.enter(self._phase, self._begun())
            if threading.get_ident() == self._thread:
                self.resume()

    def step_ended(self, step: int) -> None:
        """Record this rank's work up to the end of `step`, except in the first step, which allocates and compiles."""
        self._section = None
        self._stopwatch.switch_to(None)
        self.reductions = self._waits.step_ended()
        total = self._stopwatch.total()
        self.last_step = [now - before for now, before in zip(total, self._last_total, strict=True)]
        self._last_total = list(total)
        if self._first:
            self._first, self._before = False, list(total)
            self._cell.start_timing()
        self._cell.record_work(step, [now - before for now, before in zip(total, self._before, strict=True)])


def _counters() -> list[Callable[[], int]]:
    """Return functions that count the collectives started in each group of this rank. A call takes 0.1 microseconds."""
    found = []
    world = c10d._world.default_pg
    groups: list[Any] = [group for group in c10d._world.pg_map if group is world or group.size() > 1]
    for group in groups:
        try:
            group._get_sequence_number_for_group()
        except RuntimeError:  # some backends have no counter
            continue
        found.append(group._get_sequence_number_for_group)
    return found


_current: list[PhaseTracker] = []


def current_tracker() -> PhaseTracker | None:
    """Return the tracker of this rank, or None outside a rank and before training."""
    return _current[0] if _current else None


def _report_compilations(tracker: PhaseTracker) -> None:
    """Report compilations. Any step may compile a new shape, in its forward or its backward pass."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(lambda _: tracker.begin_slow_phase(Phase.COMPILE))
    callback_handler.register_end_callback(lambda _: tracker.end_slow_phase())


def phase_tracker(cell: ProgressCell, model: nn.Module, device: torch.device) -> PhaseTracker:
    """Return the phase tracker of a rank that trains `model` on `device`."""
    waits = WaitMeter(device_clock(device))
    tracker = PhaseTracker(cell, stopwatch(device), compiles=is_compiled(model), waits=waits)
    _current[:] = [tracker]
    if is_compiled(model):
        _report_compilations(tracker)
    if device.type != "cpu":  # on the CPU, a waiting thread uses no CPU time, so it is not measured
        exclude_fsdp_waits(model, tracker.pause, tracker.resume)
    return tracker


@contextmanager
def waiting_for_peers(device: torch.device) -> Iterator[None]:
    """Mark a wait for peers, which a GPU's stream would measure as work. No-op on the CPU."""
    tracker = current_tracker()
    if tracker is None or device.type == "cpu":
        yield
        return
    tracker.pause()
    try:
        yield
    finally:
        tracker.resume()
