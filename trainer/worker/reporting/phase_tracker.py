"""Phases of a rank's steps in the progress cell, its ticker, and progress lines in rank 0's log."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch import nn

from trainer.contract.ranks.progress import SECTIONS, Phase, ProgressCell
from trainer.contract.ranks.stage_activity import Activity, Moment
from trainer.contract.time_spans import parse_span, span
from trainer.worker.parallel.layer_wrappers import is_compiled
from trainer.worker.reporting.stderr_best_effort import write_stderr
from trainer.worker.reporting.work_timer import (
    HostClock,
    Stopwatch,
    WaitMeter,
    exclude_fsdp_waits,
    stopwatch,
    wait_meter,
)

SECONDS = 0.5


class Ticker:
    """Ticks from `start` to `stop`; a daemon, so that it never holds up the end of a rank."""

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
    """Writes a line now and then; every restart says where it goes on, because its log goes on too."""

    def __init__(
        self, every: int | str, total: int, tokens_per_step: float | None = None, *,
        write: Callable[[str], None] = write_stderr, clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """`every`: steps, or seconds with a unit, between two lines; 0: no lines. `total`: steps of the run."""
        self._tokens_per_step = tokens_per_step
        self._steps = every if isinstance(every, int) else 0
        self._seconds = parse_span(every) if isinstance(every, str) else None
        self._total, self._write, self._clock, self._wall = total, write, clock, wall
        self._step, self._at = 0, clock()
        self._first = True

    @property
    def _on(self) -> bool:
        return bool(self._steps or self._seconds)

    def begin(self, step: int) -> None:
        """Training goes on after this step."""
        self._step = step
        if step:
            self._say(f"resumed from step {step}: later steps that stand above are trained again")

    def step(self, step: int, *, loss: float, lr: float, own: Mapping[str, float]) -> None:
        """A step is done; one line stands for those since the last one."""
        if not self._is_due(step):
            return
        now, trained = self._clock(), step - self._step
        seconds = (now - self._at) / max(1, trained)
        words = [f"step {step}/{self._total}", f"loss {loss:.4f}", f"lr {lr:.3g}"]
        words += _numbers(own)
        if not self._first:  # the first step compiles and allocates, and is no measure of the others
            words.append(f"{seconds:.3g} s/step")
            words += [f"{self._tokens_per_step / seconds:.0f} tokens/s"] if self._tokens_per_step and seconds else []
            words += [f"ETA {span((self._total - step) * seconds)}"] if step < self._total else []
        self._say("  ".join(words))
        self._step, self._at, self._first = step, now, False

    def validated(self, step: int, seconds: float, numbers: Mapping[str, float]) -> None:
        """The results of a validation after this step; its time is none of the steps'."""
        self._at += seconds
        self._say("  ".join([f"validation after step {step}:", *_numbers(numbers), f"({seconds:.1f} s)"]))

    def _is_due(self, step: int) -> bool:
        if not self._on:
            return False
        if self._first or step == self._total:
            return True
        if self._seconds is None:
            return step % self._steps == 0
        return self._clock() - self._at >= self._seconds

    def _say(self, text: str) -> None:
        if self._on:
            self._write(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self._wall()))}  {text}")


def _numbers(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} {value:.6g}" for name, value in values.items()]


_SECTION = {phase: index for index, phase in enumerate(SECTIONS)} | {Phase.COMPILE: SECTIONS.index(Phase.FORWARD)}


class PhaseTracker:
    """Phases of one generation, from its first step on; costs a few microseconds a step."""

    def __init__(
        self, cell: ProgressCell, stopwatch: Stopwatch, *, compiles: bool = False,
        waits: "WaitMeter[Any] | None" = None,
    ) -> None:  # fmt: skip
        """`compiles`: the first forward pass compiles the model. `waits`: None measures by the host's clock."""
        self._cell, self._stopwatch, self._compiles = cell, stopwatch, compiles
        self._messages = 0
        self._moment: Moment | None = None
        self._counters: list[Callable[[], int]] = [*_counters(), lambda: self._messages]
        self._section: int | None = None
        self._phase, self._slow_depth, self._thread = Phase.INIT, 0, threading.get_ident()
        self._before = [0] * len(SECTIONS)
        self._last_total = [0] * len(SECTIONS)
        self.last_step = [0] * len(SECTIONS)
        """Nanoseconds of own work in each of SECTIONS in the newest step; on a GPU, what was known by then."""
        self.reductions = 0.0
        """Seconds for which this rank waited in the collectives of a step, that before the newest one."""
        self._waits: WaitMeter[Any] = waits or WaitMeter(HostClock())
        self._first = True

    def enter(self, phase: Phase, moment: Moment | None = None) -> None:
        """Go on to another phase; `moment`: of a pipeline, what this rank does in it."""
        if phase is Phase.FORWARD and self._compiles:
            phase, self._compiles = Phase.COMPILE, False
        self._phase, self._moment = phase, moment
        self._waits.end()
        self._cell.enter(phase, sum([count() for count in self._counters]), moment)
        self._section = _SECTION.get(phase)
        self._stopwatch.switch_to(self._section)

    def pass_of(self, phase: Phase, moment: Moment) -> Callable[[], None]:
        """Goes on to this phase in a pass of a pipeline; in an evaluation all passes belong to that."""
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

    def wait_of(self, moment: Moment) -> Callable[[], None]:
        """Goes on to something else within the phase, which is no work of the step: to wait for another stage."""
        begin_moment = partial(self._cell.begin_moment, moment)
        if not self._stopwatch.counts_waits:
            return begin_moment

        def begin() -> None:
            begin_moment()
            self.pause()

        return begin

    def end_of_wait(self) -> Callable[[], None] | None:
        """The message or the wait is over; what comes next begins with a moment of its own."""
        if not self._stopwatch.counts_waits:
            return None
        return lambda: self._stopwatch.switch_to(self._section)

    def begin_passes(self, stages: int) -> None:
        """The passes of a step begin, on a rank with so many stages of a pipeline."""
        self._cell.begin_passes(stages)

    def sent_of(self, place: int, is_gradient: bool, micro_batch: int) -> Callable[[], None]:
        """Records what has been sent, as `ProgressCell.record_sent`; nothing in an evaluation."""
        record = partial(self._cell.record_sent, place, is_gradient, micro_batch)

        def sent() -> None:
            if self._phase is not Phase.EVAL:
                record()

        return sent

    def message_begun(self) -> None:
        """This rank has begun to send and to receive within a phase: shown at once, as gloo keeps no record of it."""
        self._messages += 1
        self._cell.update(collective=sum([count() for count in self._counters]))

    @contextmanager
    def waits_in_ring(self, source: int) -> Iterator[None]:
        """Inside, this rank waits for a message of rank `source` of the world; then it goes on with what it did."""
        self._cell.begin_moment(Moment(Activity.WAIT_IN_RING, source, -1))
        yield
        self._cell.begin_moment(self._moment)

    def pause(self) -> None:
        """What follows is no work of the step: a wait for peers, or a message to them."""
        self._stopwatch.switch_to(None)

    def begin_wait(self) -> None:
        """Pause for collectives with peers, which nothing hides; ends as a pause does, or with the next phase."""
        self.pause()
        self._waits.begin()

    def resume(self) -> None:
        """Back to the section that was paused."""
        self._waits.end()
        self._stopwatch.switch_to(self._section)

    def begin_slow_phase(self, phase: Phase) -> None:
        """Leave the step for something slow that belongs to no section of it, from within a phase; also while aside."""
        self._slow_depth += 1
        if self._slow_depth == 1:
            self._cell.enter(phase, sum([count() for count in self._counters]))
            if threading.get_ident() == self._thread:  # a thread of autograd has a clock of its own
                self.pause()

    def end_slow_phase(self) -> None:
        """Go on where the step was left."""
        self._slow_depth -= 1
        if self._slow_depth == 0:
            self._cell.enter(self._phase, sum([count() for count in self._counters]))
            if threading.get_ident() == self._thread:
                self.resume()

    def step_ended(self, step: int) -> None:
        """`step` is over: record the own work so far, without the first step, which allocates and compiles."""
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
    """How many collectives each group of this rank has begun: a tenth of a microsecond each."""
    found = []
    world = c10d._world.default_pg
    groups: list[Any] = [group for group in c10d._world.pg_map if group is world or group.size() > 1]
    for group in groups:
        try:
            group._get_sequence_number_for_group()
        except RuntimeError:  # a backend that does not count
            continue
        found.append(group._get_sequence_number_for_group)
    return found


_current: list[PhaseTracker] = []


def current_tracker() -> PhaseTracker | None:
    """The tracker of this rank; None outside a rank, and before it trains."""
    return _current[0] if _current else None


def _report_compilations(tracker: PhaseTracker) -> None:
    """A shape that is new may be compiled in any step, in the forward pass and in the backward pass."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(lambda _: tracker.begin_slow_phase(Phase.COMPILE))
    callback_handler.register_end_callback(lambda _: tracker.end_slow_phase())


def phase_tracker(cell: ProgressCell, model: nn.Module, device: torch.device) -> PhaseTracker:
    """The phase tracker of a rank that trains `model` on `device`."""
    tracker = PhaseTracker(cell, stopwatch(device), compiles=is_compiled(model), waits=wait_meter(device))
    _current[:] = [tracker]
    if is_compiled(model):
        _report_compilations(tracker)
    if device.type != "cpu":  # on the CPU a thread that waits does not run, and is not measured
        exclude_fsdp_waits(model, tracker.pause, tracker.resume)
    return tracker
