"""Known sentences in logs and what they stand for; a match is an observation, not a verdict."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files

from orchestrator.recovery.evidence import LogTail
from trainer.contract.outcome import FailureKind


class Role(StrEnum):
    ROOT = "root"
    CASCADE = "cascade"
    TEARDOWN = "teardown"


@dataclass(frozen=True, kw_only=True)
class Signature:
    """One pattern of `signatures.yaml`."""

    pattern: re.Pattern[str]
    kind: FailureKind
    role: Role


@dataclass(frozen=True, kw_only=True)
class Match:
    """One line of a log that a signature knows."""

    kind: FailureKind
    role: Role
    line: str
    source: str


@cache
def signatures() -> tuple[Signature, ...]:
    """The packaged table."""
    import yaml  # only needed once an attempt has died without an outcome

    rows = yaml.safe_load((files("orchestrator.recovery") / "signatures.yaml").read_text())
    return tuple(
        Signature(pattern=re.compile(row["pattern"]), kind=FailureKind(row["kind"]), role=Role(row["role"]))
        for row in rows
    )


def scan(tails: Iterable[LogTail]) -> list[Match]:
    """Every known line, in the order of the logs; the first signature of a line counts."""
    return [found for tail in tails for line in tail.text.splitlines() if (found := _match(line, tail.source))]


def _match(line: str, source: str) -> Match | None:
    for signature in signatures():
        if signature.pattern.search(line):
            return Match(kind=signature.kind, role=signature.role, line=line.strip()[:300], source=source)
    return None


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
