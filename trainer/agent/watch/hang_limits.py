"""Time limits for ranks, by phase, history and activity. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from operator import attrgetter
from typing import NamedTuple

from trainer.agent.watch.program_sample import ProgramSample
from trainer.protocol.config_sections.fault_detection_config import HangConfig
from trainer.protocol.messages.agents import SampleRow
from trainer.protocol.rank_progress.progress import (
    AWAITED_SENDS,
    RECEIVES,
    Activity,
    SentMessages,
    StageActivity,
    decode_activity,
)

_WAITS = (*RECEIVES, *AWAITED_SENDS, Activity.WAIT_IN_RING)


@dataclass(frozen=True, slots=True)
class RankSample:
    """State of one rank at the time its agent sampled it."""

    rank: int
    step: int = 0
    phase: str = "init"
    first: bool = True  # it has not finished a step in this generation
    collective: int = 0  # number of collectives begun when its cell was last written
    age: float = 0.0  # seconds since its cell was written
    alive: float = 0.0  # seconds since its last activity: cell writes, CPU time, bytes read or written
    state: str = "R"  # of its training thread in /proc: R S D T (stopped) t (traced) Z; X: gone
    lock: float = 0.0  # seconds without any thread running in its interpreter; 0: unknown
    ended: bool = False
    _: KW_ONLY
    node: str
    moment: StageActivity | None = None  # in a pipeline: its activity and micro-batch
    sent: SentMessages | None = None  # in a pipeline: the messages it has sent
    program: ProgramSample | None = None  # of a user's program

    @property
    def reports_steps(self) -> bool:
        """Return whether the rank writes its progress cell: orch's own ranks do, programs if instrumented."""
        return self.program is None or self.program.reports_steps

    @property
    def waits_for_message(self) -> bool:
        """Return whether it is waiting for another stage of its pipeline or another rank of its ring."""
        return self.moment is not None and self.moment.activity in _WAITS

    def to_row(self) -> SampleRow:
        """Return the row to send, without pipeline state or the node's name (the coordinator knows the node)."""
        row: SampleRow = _ROW(self)
        return row

    @classmethod
    def from_row(
        cls, row: SampleRow, node: str, stages: Sequence[int] = (), program: ProgramSample | None = None
    ) -> "RankSample":
        """Return a row's sample. Raises ValueError for an impossible time. `stages` is the rank's pipeline row."""
        moment = decode_activity(*stages[1:4]) if len(stages) >= 4 else None
        one = cls(*row, node=node, moment=moment, sent=SentMessages.from_row(stages[4:]), program=program)
        if min(one.age, one.alive, one.lock) < 0:
            raise ValueError(f"the sample of rank {one.rank} is in the future")
        return one


_ROW = attrgetter("rank", "step", "phase", "first", "collective", "age", "alive", "state", "lock", "ended")

FAST = frozenset({"data", "forward", "backward", "optimizer"})
"""Phases of a step; all others, and every phase of a first step, may be slow for good reasons."""

HALTED = frozenset("TZX")
"""States of a process that cannot be waiting for a peer: stopped by a signal, dead, gone."""

LIVELY = 4.0
"""Factor on limits while the rank shows activity, if that may be mere spinning.
This applies to phases of a step, and to waits for a GPU in any phase.
"""

LOCK_HELD_SECONDS = 3.0
"""A rank is suspect if its threads cannot take Python's lock for longer than this many seconds."""

PROGRAM_SLOW = 2.5
"""Factor on `slow`, which limits every phase of a user's program, since evaluations and saves may look like a step."""

LEARNED = 3.0
"""Factor on the longest time that a user's program has taken between two signs of progress."""

PROGRAM_FIRST = 2.0
"""Factor on `most` before the first step of a user's program, which may prepare its data first."""

PATIENCE = 4.0
"""Factor by which each hang in the attempt raises the limit, since an epoch may begin with a pause."""

_AT_ONCE = 1.0
"""Activity within this many seconds of a cell write is not worth mentioning."""

LOOK_LEAST = 2.0
"""Minimum seconds without movement by any rank before a closer check."""

LOOK_FACTOR = 3.0
"""The same as a multiple of the 99th percentile of the step's longest phase."""


def after_hangs(config: HangConfig, hangs: int) -> HangConfig:
    """Return the configuration for a generation that follows `hangs` hangs in this attempt."""
    return replace(config, least=min(max(config.least, config.most), config.least * PATIENCE ** min(hangs, 20)))


@dataclass(frozen=True, slots=True)
class Allowed:
    """Seconds a rank may go without writing its cell; `words` completes "longer than" or "within" in a sentence."""

    seconds: float
    words: str


class _Limit(NamedTuple):
    """Seconds allowed without activity, the phase this applies to, and a description of the limit."""

    seconds: float
    where: str
    words: str


class Limits:
    """Limits of one run, from its configuration and measured phase durations.
    `p99` holds the 99th percentile, in seconds, of each measured phase. No limit exceeds `config.most`, except before
    the first step of a user's program.
    """

    def __init__(self, config: HangConfig, p99: Mapping[str, float], *, program: bool = False) -> None:
        self.config, self._program = config, program
        self._p99 = dict(p99)
        self._phase_limit = cache(self._measure_phase_limit)

    @property
    def look_after(self) -> float:
        """Return the seconds without movement by any rank after which a closer check is due."""
        longest = max((self._p99.get(phase, 0.0) for phase in FAST), default=0.0)
        return max(LOOK_LEAST, self.config.least / 2, LOOK_FACTOR * longest)

    def for_rank(self, one: RankSample, *, waited_for: bool = True, spins: bool = False) -> Allowed:
        """Return this rank's limit. `waited_for` means that it has peers, which being stopped would hold up.
        `spins` means that it is waiting for a GPU, which uses CPU time without doing any work.
        """
        began = max(0.0, one.age - one.alive)  # seconds of activity after its last cell write
        most = self.config.most
        if one.state == "t":
            return Allowed(most, f"the {format_seconds(most)} that a debugger may hold it")
        if one.state in HALTED and waited_for:
            stopped = self.config.stopped
            words = f"the {format_seconds(stopped)} that a halted process may take"
            return Allowed(min(most, began + stopped), words)
        if self._program:
            return self._for_program(one, began)
        silent = self._phase_limit(one.phase, one.first)
        waits_for_disk = one.state == "D"
        if not spins and (one.first or one.phase not in FAST):
            if waits_for_disk:
                return Allowed(most, f"the {format_seconds(most)} that {silent.where} may wait for a disk")
            return _extend_limit(silent, most, began, one.alive)
        if waits_for_disk and silent.seconds < self.config.slow:
            slow = self.config.slow
            silent = _Limit(slow, silent.where, f"the {format_seconds(slow)} that {silent.where} may wait for a disk")
        return _extend_limit(silent, min(LIVELY * silent.seconds, most), began, one.alive)

    def _for_program(self, one: RankSample, began: float) -> Allowed:
        """Return the limit of a user's program. Between two of its steps, it may evaluate or save."""
        config, usual = self.config, max(self._p99.values(), default=0.0)
        if one.first:
            seconds = PROGRAM_FIRST * config.most
            return Allowed(seconds, f"the {format_seconds(seconds)} that a program may take before its first step")
        longest = 0.0 if one.program is None else one.program.longest
        seconds = max(PROGRAM_SLOW * config.slow, min(config.most, config.factor * usual), LEARNED * longest)
        words = f"the {format_seconds(seconds)} that a program may take between two steps"
        if one.state == "D":
            seconds = max(seconds, config.most)
            return Allowed(seconds, f"the {format_seconds(seconds)} that a program may wait for a disk")
        if one.program is not None and one.program.loop:
            return Allowed(seconds, f"{words}, all in {one.program.loop}")
        if one.lock > LOCK_HELD_SECONDS:
            return Allowed(seconds, f"{words}, while Python's lock is held")
        return _extend_limit(_Limit(seconds, "a program", words), max(seconds, config.most), began, one.alive)

    def _measure_phase_limit(self, phase: str, first: bool) -> _Limit:
        config, p99 = self.config, self._p99.get(phase, 0.0)
        slow = first or phase not in FAST
        least = config.slow if slow else config.least
        seconds = min(config.most, max(least, config.factor * p99))
        where = "any part of a first step" if first else phase
        usual = f" ({config.factor:g} times its usual {format_seconds(p99)})" if seconds > least else ""
        return _Limit(seconds, where, f"the {format_seconds(seconds)}{usual} that {where} may take")


def _extend_limit(silent: _Limit, longest: float, began: float, alive: float) -> Allowed:
    """Return the limit counted from the last activity, `alive` seconds ago, but at most `longest` in total."""
    seconds = min(silent.seconds + began, longest)
    if began < _AT_ONCE:
        return Allowed(seconds, silent.words)
    if seconds < longest:
        return Allowed(seconds, f"{silent.words} without a sign of life (the last was {format_seconds(alive)} ago)")
    return Allowed(seconds, f"the {format_seconds(longest)} that {silent.where} may take with signs of life")


def format_seconds(seconds: float) -> str:
    """Format a duration as "0.53 s", "5.3 s" or "53 s"."""
    return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


LONGEST = 2.0
"""Maximum seconds between two of an agent's reports that do not count as silence."""

_KEPT = 32
"""Maximum number of silences kept per node."""

Gaps = Mapping[str, Sequence[tuple[float, float]]]
"""Silences by node; each is (seconds since it began, seconds since it ended or 0 while it lasts)."""


class ReportGaps:
    """Gaps between the reports of each node, caused by its machine, its agent, the network or the listener.
    Only the time beyond `longest` counts, so that a node whose reports are always late can still be judged. While
    agents are asked to report more often, `close` replaces `longest`. A gap that has ended then counts from the
    request, since the report after it gave the age of all data; a gap that lasts counts from the last report.
    """

    def __init__(self, longest: float = LONGEST, close: float = LONGEST) -> None:
        self._longest, self._close = longest, close
        self._asked: float | None = None
        self._last_report: dict[str, float] = {}
        self._gaps: dict[str, deque[tuple[float, float]]] = {}
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def ask(self, now: float | None) -> None:
        """Note a request at `now` for more frequent reports or, if None, its expiry."""
        self._asked = now

    def add_pause(self, began: float, now: float) -> None:
        """Record that all ranks have been suspended since `began`, which counts like a gap of every node."""
        if self._pauses and self._pauses[-1][0] == began:
            self._pauses.pop()
        self._pauses.append((began, now))

    def add_report(self, node: str, now: float) -> None:
        """Record a report from this node."""
        last = self._last_report.get(node, now)
        since = last + self._longest
        if self._asked is not None:
            since = min(since, max(last, self._asked) + self._close)
        if now > since:
            self._gaps.setdefault(node, deque(maxlen=_KEPT)).append((since, now))
        self._last_report[node] = now

    def at(self, now: float) -> dict[str, list[tuple[float, float]]]:
        """Return the silences and pauses of all nodes that had any."""
        found = {node: [(now - began, now - ended) for began, ended in gaps] for node, gaps in self._gaps.items()}
        longest = self._longest if self._asked is None else self._close
        pauses = [(now - began, now - ended) for began, ended in self._pauses]
        for node, reported in self._last_report.items():
            if pauses:
                found.setdefault(node, []).extend(pauses)
            since = reported + longest
            if now > since:
                found.setdefault(node, []).append((now - since, 0.0))
        return found


def seconds_still(one: RankSample, report_gaps: Gaps) -> float:
    """Return for how many seconds this rank is known not to have moved, excluding the gaps in its node's reports."""
    gaps = report_gaps.get(one.node, ())
    return max(0.0, one.age - sum(max(0.0, min(one.age, began) - ended) for began, ended in gaps))


_REPORTS_A_SECOND, _CALM_REPORTS_A_SECOND = 1000.0, 250.0
"""Maximum reports per second from all nodes to the coordinator, during close monitoring and otherwise."""
_LEAST, _MOST_CALM = 0.5, 5.0

ATTENTION_SECONDS = 10.0
"""Seconds for which agents report more often after being asked to."""


def report_seconds(nodes: int) -> float:
    """Return the seconds between two of an agent's reports during close monitoring."""
    return max(_LEAST, nodes / _REPORTS_A_SECOND)


def calm_seconds(nodes: int) -> float:
    """Return the seconds between two of an agent's reports at other times; in a small job, `report_seconds`."""
    return max(report_seconds(nodes), min(_MOST_CALM, nodes / _CALM_REPORTS_A_SECOND))


class ReportSchedule:
    """Report times for one agent.
    Regular reports keep their time slots, even if others are sent in between. So in a large job some node is always
    about to report, and the coordinator soon learns that ranks are moving.
    """

    def __init__(self, node: int, nodes: int, now: float) -> None:
        self._close, self._calm = report_seconds(nodes), calm_seconds(nodes)
        self._regular = now + self._calm * (node + 1) / nodes
        self._last, self._attends_until = now, now

    def attend(self, seconds: float, now: float) -> None:
        """Report more often for `seconds`, since the coordinator may need to judge."""
        self._attends_until = max(self._attends_until, now + seconds)

    def due(self, now: float, *, closely: bool = False, at_once: bool = False) -> bool:
        """Return whether to report now. `closely` means that this node has something relevant to report."""
        regular = now >= self._regular
        if regular:
            self._regular += self._calm * ((now - self._regular) // self._calm + 1)
        close = (closely or now < self._attends_until) and now - self._last >= self._close
        if not (regular or close or at_once):
            return False
        self._last = now
        return True
