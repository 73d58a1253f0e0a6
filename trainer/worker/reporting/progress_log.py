"""Progress in rank 0's log: loss, learning rate, speed and validation, in lines that people read."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from trainer.contract.time_spans import parse_span, span
from trainer.worker.reporting.stderr_best_effort import write_stderr


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
