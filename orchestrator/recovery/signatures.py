"""Known sentences in the logs of an attempt that left no outcome, and which failures they stand for."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.recovery.evidence import LogTail
from trainer.contract.cut_text import cut
from trainer.contract.failures.failure_patterns import Meaning, log_line_says
from trainer.contract.failures.outcome import FailureKind


class Role(StrEnum):
    """What a sentence contributes to the cause."""

    ROOT = "root"  # it is one by itself
    CASCADE = "cascade"  # somebody else's end seen from here: it names no cause, and never replaces a root
    TEARDOWN = "teardown"  # printed while everything is taken down: ignored


STANDS_FOR: dict[Meaning, tuple[FailureKind, Role]] = {
    Meaning.NO_SECRETS: (FailureKind.SUBMIT_REJECTED, Role.ROOT),
    Meaning.TIME_LIMIT: (FailureKind.TIME_LIMIT, Role.ROOT),
    Meaning.PREEMPTED: (FailureKind.PREEMPTED, Role.ROOT),
    Meaning.NODE_LOST: (FailureKind.NODE_LOST, Role.ROOT),
    Meaning.STORAGE: (FailureKind.STORAGE, Role.ROOT),
    Meaning.NOT_LAUNCHED: (FailureKind.LAUNCH_FAILED, Role.ROOT),
    Meaning.MEMORY: (FailureKind.OUT_OF_MEMORY, Role.ROOT),
    Meaning.TASK_KILLED: (FailureKind.AGENT_LOST, Role.ROOT),
    Meaning.PEER_GONE: (FailureKind.AGENT_LOST, Role.CASCADE),
    Meaning.NO_RENDEZVOUS: (FailureKind.LAUNCH_FAILED, Role.CASCADE),
    Meaning.REQUEUED: (FailureKind.NODE_LOST, Role.CASCADE),
    Meaning.CANCELLED: (FailureKind.CANCELLED, Role.TEARDOWN),
    Meaning.TEARDOWN: (FailureKind.UNKNOWN, Role.TEARDOWN),
}
"""Of every meaning that a line of a job's log can have."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """One line of a log that the table of failure patterns knows."""

    kind: FailureKind
    role: Role
    line: str
    source: str


def scan(tails: Iterable[LogTail]) -> list[Match]:
    """Every known line, in the order of the logs."""
    known = (
        (tail.source, line, meaning) for tail in tails for line in tail.text.splitlines()
        if (meaning := log_line_says(line)) is not None
    )  # fmt: skip
    return [
        Match(kind=STANDS_FOR[meaning][0], role=STANDS_FOR[meaning][1], line=cut(line.strip(), 300), source=source)
        for source, line, meaning in known
    ]


def before_cancel(matches: list[Match]) -> list[Match]:
    """What each log says before Slurm writes there that it cancels the job."""
    cancelled: set[str] = set()
    found = []
    for match in matches:
        if match.kind is FailureKind.CANCELLED:
            cancelled.add(match.source)
        elif match.source not in cancelled:
            found.append(match)
    return found


def earliest(matches: list[Match]) -> Match | None:
    """The first root cause; a cascade only when nothing better was said."""
    for role in (Role.ROOT, Role.CASCADE):
        for match in matches:
            if match.role is role:
                return match
    return None
