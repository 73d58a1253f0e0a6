"""Time limits of a rank by phase, history and signs of life. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from trainer.contract.config_sections.fault_detection_config import HangConfig
from trainer.contract.messages.agents import SampleRow
from trainer.contract.ranks.stage_activity import AWAITED_SENDS, RECEIVES, Activity, Moment, SentMessages, moment_of

_WAITS = (*RECEIVES, *AWAITED_SENDS, Activity.WAIT_IN_RING)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSample:
    """What is known of one rank at the moment its agent looked."""

    rank: int
    node: str
    step: int = 0
    phase: str = "init"
    first: bool = True  # it has not finished a step in this generation
    collective: int = 0  # collectives it had begun when its cell was written last
    age: float = 0.0  # seconds since its cell was written
    alive: float = 0.0  # seconds since its last sign of life: the cell, CPU time, bytes read or written
    state: str = "R"  # of its training thread as /proc says: R S D T (stopped) t (traced) Z; X: gone
    lock: float = 0.0  # seconds for which nothing could run in its interpreter; 0: not known
    ended: bool = False
    moment: Moment | None = None  # of a pipeline: what it does with which micro-batch
    sent: SentMessages | None = None  # and how far it has come with sending

    @property
    def waits_for_message(self) -> bool:
        """Whether another stage of its pipeline, or another rank of its ring, holds it up."""
        return self.moment is not None and self.moment.activity in _WAITS

    def to_row(self) -> SampleRow:
        """For the wire, without the node's name, which the coordinator knows, and without what is of pipelines."""
        return (
            self.rank, self.step, self.phase, self.first, self.collective, self.age, self.alive, self.state, self.lock,
            self.ended,
        )  # fmt: skip

    @classmethod
    def from_row(cls, row: SampleRow, node: str, stages: Sequence[int] = ()) -> "RankSample":
        """`stages`: of a rank of a pipeline, its row in a report. Raises ValueError for a time that cannot be."""
        rank, step, phase, first, collective, age, alive, state, lock, ended = row
        if age < 0 or alive < 0 or lock < 0:
            raise ValueError(f"a sample of rank {rank} in the future")
        return cls(
            rank=rank, node=node, step=step, phase=phase, first=first, collective=collective, age=age, alive=alive,
            state=state, lock=lock, ended=ended,
            moment=moment_of(*stages[1:4]) if len(stages) >= 4 else None, sent=SentMessages.from_row(stages[4:]),
        )  # fmt: skip


FAST = frozenset({"data", "forward", "backward", "optimizer"})
"""Phases of a step; all others, and every phase of a first step, may be slow for good reasons."""

HALTED = frozenset("TZX")
"""States of a process that nobody may be waiting for: stopped by a signal, dead, gone."""

LIVELY = 4.0
"""What may also spin may take so many times its limit while its rank shows signs of life: a phase of a step, and a wait
for a GPU in any phase."""

PATIENCE = 4.0
"""After a hang the next generation may stand still for so many times as long: an epoch may begin with a pause."""

_AT_ONCE = 1.0
"""Seconds after the cell was written in which a last sign of life is not worth a word."""

LOOK_LEAST = 2.0
"""Nobody looks closer before everybody has been still for so many seconds."""

LOOK_FACTOR = 3.0
"""Nor before so many times the 99th percentile of the step's longest phase."""


def after_hangs(config: HangConfig, hangs: int) -> HangConfig:
    """Return the configuration of a generation after so many hangs in this attempt."""
    return replace(config, least=min(max(config.least, config.most), config.least * PATIENCE ** min(hangs, 20)))


@dataclass(frozen=True, slots=True)
class Allowed:
    """Seconds that a rank may go without writing its cell; `words` ends a sentence: "longer than" them, or "within"."""

    seconds: float
    words: str


class _Limit(NamedTuple):
    """Seconds without a sign of life, where, and both in words."""

    seconds: float
    where: str
    words: str


class Limits:
    """The limits of one run: its configuration and what its phases have taken so far.

    `p99` holds the 99th percentile in seconds of each phase that has been measured. No limit is above `most`.
    """

    def __init__(self, config: HangConfig, p99: Mapping[str, float]) -> None:
        self.config = config
        self._p99 = dict(p99)
        self._silent: dict[tuple[str, bool], _Limit] = {}

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
        most = self.config.most
        if one.state == "t":
            return Allowed(most, f"the {format_seconds(most)} for which a debugger may hold it")
        if one.state in HALTED and waited_for:
            return self._halted(began)
        silent = self._of_phase(one.phase, one.first)
        waits_for_disk = one.state == "D"
        if not spins and (one.first or one.phase not in FAST):
            if waits_for_disk:
                return Allowed(most, f"the {format_seconds(most)} that {silent.where} may wait for a disk")
            return _extended(silent, most, began, one.alive)
        if waits_for_disk and silent.seconds < self.config.slow:
            slow = self.config.slow
            silent = _Limit(slow, silent.where, f"the {format_seconds(slow)} that {silent.where} may wait for a disk")
        return _extended(silent, min(LIVELY * silent.seconds, most), began, one.alive)

    def _halted(self, began: float) -> Allowed:
        stopped, most = self.config.stopped, self.config.most
        return Allowed(min(most, began + stopped), f"the {format_seconds(stopped)} that a halted process may take")

    def _of_phase(self, phase: str, first: bool) -> _Limit:
        """The limit of a rank that shows no sign of life."""
        known = self._silent.get((phase, first))
        if known is None:
            known = self._silent[phase, first] = self._measured(phase, first)
        return known

    def _measured(self, phase: str, first: bool) -> _Limit:
        config, p99 = self.config, self._p99.get(phase, 0.0)
        slow = first or phase not in FAST
        least = config.slow if slow else config.least
        seconds = min(config.most, max(least, config.factor * p99))
        where = "any part of a first step" if first else phase
        usual = f" ({config.factor:g} times its usual {format_seconds(p99)})" if seconds > least else ""
        return _Limit(seconds, where, f"the {format_seconds(seconds)}{usual} that {where} may take")


def _extended(silent: _Limit, longest: float, began: float, alive: float) -> Allowed:
    """The limit counted from the last sign of life, `alive` seconds ago; never more than `longest` in all."""
    seconds = min(silent.seconds + began, longest)
    if began < _AT_ONCE:
        return Allowed(seconds, silent.words)
    if seconds < longest:
        return Allowed(seconds, f"{silent.words} without a sign of life (the last was {format_seconds(alive)} ago)")
    return Allowed(seconds, f"the {format_seconds(longest)} that {silent.where} may take with signs of life")


def format_seconds(seconds: float) -> str:
    """A duration in words, three digits at most where they matter."""
    return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
