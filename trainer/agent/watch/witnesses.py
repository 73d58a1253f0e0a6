"""Independent witnesses of a hang in a user's program, and whether enough of them agree to kill its ranks. Pure.

The steps of a program are guessed from its optimizers, so its progress cells prove less than those of orch's own ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from trainer.agent.flight.wait_graph import Finding
from trainer.agent.watch.hang_limits import HALTED, LOCK_HELD_SECONDS, RankSample, format_seconds
from trainer.agent.watch.program_sample import DUMPS
from trainer.protocol.messages.agents import RasRow

_NO_RAS: Mapping[int, RasRow] = {}

LEAST_WITNESSES = 2
"""Number of witnesses that must agree before ranks of a program are killed."""

_SILENT, _RHYTHM = 60.0, 3.0
"""A log is silent for longer than usual after this many seconds, and this many times its usual longest pause."""

_IDLE = 1.0
"""A process counts as idle if this many seconds or fewer of its time without a step had any activity."""


class Witness(StrEnum):
    CELL = "progress cell"
    PROCESS = "/proc"
    FLIGHT = "flight records"
    RAS = "NCCL RAS"
    LOCK = "Python's lock"
    STACKS = "stacks"
    LOG = "log"


@dataclass(frozen=True, kw_only=True)
class Testimony:
    """Evidence of one witness. `agrees` is None if it shows nothing about the suspected rank."""

    witness: Witness
    agrees: bool | None
    words: str


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """Whether the witnesses suffice, and why."""

    enough: bool
    reason: str
    testimonies: tuple[Testimony, ...]


def weigh(
    culprit: int | None, seen: Sequence[RankSample], finding: Finding | None, ras: Mapping[int, RasRow] = _NO_RAS,
    *, most: float = 3600.0,
) -> Weighed:  # fmt: skip
    """Return which witnesses agree that `culprit` stopped first or, if it is None, that all ranks wait together.
    `most` is `detection.hang.most`, after which ranks that wait for nothing count as hung too.
    """
    live = [one for one in seen if not one.ended]
    found = tuple(_testify(culprit, live, finding, ras, most))
    agree = [one for one in found if one.agrees]
    against = [one for one in found if one.agrees is False]
    if against:
        return Weighed(enough=False, reason=f"{against[0].witness} disagrees: {against[0].words}", testimonies=found)
    words = "; ".join(f"{one.witness}: {one.words}" for one in agree) or "no witness agrees"
    if len(agree) < LEAST_WITNESSES:
        reason = f"{len(agree)} of the {LEAST_WITNESSES} witnesses that a kill needs: {words}"
        return Weighed(enough=False, reason=reason, testimonies=found)
    return Weighed(enough=True, reason=words, testimonies=found)


def _testify(
    culprit: int | None, live: Sequence[RankSample], finding: Finding | None, ras: Mapping[int, RasRow], most: float
) -> Iterator[Testimony]:
    suspects = [one for one in live if culprit is None or one.rank == culprit]
    if not suspects:
        return
    yield _cell(suspects)
    yield _process(suspects)
    if finding is not None and finding.idle and len(live) > 1:
        yield from _nobody_waits(suspects, finding, most)
    elif finding is not None:
        yield _flight(culprit, finding, {one.rank for one in live})
    if culprit is not None:
        yield from _stacks(suspects[0])
        yield from _lock(suspects[0])
        yield from _log(suspects[0])
        yield from _ras(ras.get(culprit))


def _cell(suspects: Sequence[RankSample]) -> Testimony:
    if not all(one.reports_steps for one in suspects):
        return Testimony(witness=Witness.CELL, agrees=None, words="the rank reports no steps")
    still = format_seconds(min(one.age for one in suspects))
    return Testimony(witness=Witness.CELL, agrees=True, words=f"no progress for {still}")


def _process(suspects: Sequence[RankSample]) -> Testimony:
    halted = [one for one in suspects if one.state in HALTED]
    if halted and len(halted) == len(suspects):
        return Testimony(witness=Witness.PROCESS, agrees=True, words=f"process state {halted[0].state}")
    idle = min(one.alive for one in suspects)
    # Without a cell, the process may do something that its own CPU time and I/O do not show.
    if all(one.reports_steps for one in suspects) and all(one.age - one.alive <= _IDLE for one in suspects):
        words = f"no CPU time and no I/O for {format_seconds(idle)}"
        return Testimony(witness=Witness.PROCESS, agrees=True, words=words)
    words = f"the last activity was {format_seconds(idle)} ago"
    return Testimony(witness=Witness.PROCESS, agrees=None, words=words)


def _ras(row: RasRow | None) -> Iterator[Testimony]:
    """Yield what NCCL knows, if it answered. Equal counts prove nothing: a launched collective may not have begun."""
    if row is None:
        return
    _, launched, most, missing = row
    words = "it does not answer its peers" if missing else f"{launched} collectives launched, a peer {most}"
    yield Testimony(witness=Witness.RAS, agrees=True if missing or launched < most else None, words=words)


def _stacks(suspect: RankSample) -> Iterator[Testimony]:
    """Yield what the rank's stacks show, if they are known."""
    if suspect.program is not None and suspect.program.loop:
        words = f"{DUMPS} dumps in a row are in {suspect.program.loop}"
        yield Testimony(witness=Witness.STACKS, agrees=True, words=words)


def _lock(suspect: RankSample) -> Iterator[Testimony]:
    """Yield that no thread of the rank can take Python's lock. A halted process could take nothing."""
    if suspect.lock > LOCK_HELD_SECONDS and suspect.state not in HALTED:
        words = f"held for {format_seconds(suspect.lock)}"
        yield Testimony(witness=Witness.LOCK, agrees=True, words=words)


def _log(suspect: RankSample) -> Iterator[Testimony]:
    """Yield what the rhythm of the rank's log shows, if it prints regularly."""
    program = suspect.program
    if program is None or not program.log_gap:
        return
    silence, usual = format_seconds(program.log_age), format_seconds(program.log_gap)
    if program.log_age > max(_SILENT, _RHYTHM * program.log_gap):
        words = f"no print for {silence}, at most {usual} apart before"
        yield Testimony(witness=Witness.LOG, agrees=True, words=words)
    # A stopped process does not print; its output may still have been in the pipe.
    elif program.log_age < suspect.age - _RHYTHM and suspect.state not in HALTED:
        yield Testimony(witness=Witness.LOG, agrees=False, words=f"it printed {silence} ago")


def _nobody_waits(suspects: Sequence[RankSample], finding: Finding, most: float) -> Iterator[Testimony]:
    """Yield that no rank waits for another: all of them wait for something else, such as a server of an RL program."""
    if not any(one.state in HALTED for one in suspects) and min(one.age for one in suspects) < most:
        yield Testimony(witness=Witness.FLIGHT, agrees=False, words=finding.reason)


def _flight(culprit: int | None, finding: Finding, live: set[int]) -> Testimony:
    if culprit is None:
        agrees = True if finding.kind == "stuck_together" else None
        return Testimony(witness=Witness.FLIGHT, agrees=agrees, words=finding.reason)
    # A rank without a record may only lack a server for it.
    silent = {one.rank for one in finding.culprits if one.kind == "no_answer"}
    named = (live & {*finding.ranks, *(one.rank for one in finding.culprits)}) - silent
    agrees = culprit in named if named and finding.kind not in ("none", "stuck_together") else None
    return Testimony(witness=Witness.FLIGHT, agrees=agrees, words=finding.reason)
