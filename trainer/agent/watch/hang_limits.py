"""PURE: how long a rank may stay where it is, by its phase, by what this run has shown, and by its signs of life."""

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.agent.watch.rank_sample import RankSample
from trainer.contract.fault_detection_config import HangConfig

FAST = frozenset({"data", "forward", "backward", "optimizer"})
"""Phases of a step; all others, and every phase of a first step, may be slow for good reasons."""

HALTED = frozenset("TZX")
"""States of a process that nobody may be waiting for: stopped by a signal, dead, gone."""

LIVELY = 4.0
"""What may also spin may take so many times its limit while its rank shows signs of life: a phase of a step, and a wait
for a GPU in any phase."""

LOOK_LEAST = 2.0
"""Nobody looks closer before everybody has been still for so many seconds."""

LOOK_FACTOR = 3.0
"""Nor before so many times the 99th percentile of the step's longest phase."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Seconds that a rank may go without writing its cell, and why so many."""

    seconds: float
    why: str


class Limits:
    """The limits of one run: its configuration and what its phases have taken so far.

    `p99` holds the 99th percentile in seconds of each phase that has been measured. No limit is above `most`.
    """

    def __init__(self, config: HangConfig, p99: Mapping[str, float]) -> None:
        self.config = config
        self._p99 = dict(p99)
        self._plain: dict[tuple[str, bool], Allowed] = {}

    @property
    def look_after(self) -> float:
        """Seconds without a move of anybody after which a closer look is due."""
        longest = max((self._p99.get(phase, 0.0) for phase in FAST), default=0.0)
        return max(LOOK_LEAST, self.config.least / 2, LOOK_FACTOR * longest)

    def of(self, one: RankSample, *, waited_for: bool = True, spins: bool = False) -> Allowed:
        """What this rank is allowed; `waited_for`: peers stand still, so that being stopped does harm.

        `spins`: it is known to wait for a GPU, which takes CPU time without doing anything.
        """
        began = max(0.0, one.age - one.alive)  # how long it went on after it wrote its cell
        if one.state == "t":
            return Allowed(
                self.config.most, f"a debugger holds it, which is excused for {format_seconds(self.config.most)}"
            )
        if one.state in HALTED and waited_for:
            return self._halted(began)
        plain = self._of_phase(one.phase, one.first)
        waits_for_disk = one.state == "D"
        if not spins and (one.first or one.phase not in FAST):
            return self._slow(plain, began, waits_for_disk=waits_for_disk)
        if waits_for_disk and plain.seconds < self.config.slow:
            slow = self.config.slow
            plain = Allowed(slow, f"{format_seconds(slow)} for {one.phase} that waits for a disk (state D)")
        return self._lively(plain, began)

    def _halted(self, began: float) -> Allowed:
        stopped, most = self.config.stopped, self.config.most
        return Allowed(min(most, began + stopped), f"{format_seconds(stopped)} for a halted process")

    def _lively(self, plain: Allowed, began: float) -> Allowed:
        longest = min(LIVELY * plain.seconds, self.config.most)
        seconds = min(plain.seconds + began, longest)
        if began < 1.0:
            return Allowed(seconds, plain.why)
        return Allowed(seconds, f"{plain.why}, counted from its last sign of life, at most {format_seconds(longest)}")

    def _slow(self, plain: Allowed, began: float, *, waits_for_disk: bool) -> Allowed:
        most = self.config.most
        if waits_for_disk:
            return Allowed(most, f"it waits for a disk (state D), which is excused for {format_seconds(most)}")
        seconds = min(plain.seconds + began, most)
        return Allowed(seconds, f"{plain.why}, counted from its last sign of life, at most {format_seconds(most)}")

    def _of_phase(self, phase: str, first: bool) -> Allowed:
        """The limit of a rank that shows no sign of life."""
        known = self._plain.get((phase, first))
        if known is None:
            known = self._plain[phase, first] = self._measured(phase, first)
        return known

    def _measured(self, phase: str, first: bool) -> Allowed:
        config, p99 = self.config, self._p99.get(phase, 0.0)
        slow = first or phase not in FAST
        least = config.slow if slow else config.least
        seconds = min(config.most, max(least, config.factor * p99))
        if seconds > least:
            return Allowed(seconds, f"{config.factor:g} x the 99th percentile of {phase}, {format_seconds(p99)}")
        where = "any part of a first step" if first else phase
        return Allowed(seconds, f"{format_seconds(least)} for {where}")


def format_seconds(seconds: float) -> str:
    """A duration in words, three digits at most where they matter."""
    return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
