"""The one statement on whether a user's program is instrumented. Pure."""

from dataclasses import dataclass

from trainer.protocol.config_sections.watch_config import OFF
from trainer.protocol.rank_progress.program_record import ProgramFlags, ProgramRecord

PATIENCE_SECONDS = 300.0
"""Seconds after which a program that has not imported torch counts as watched from outside, until it does."""


@dataclass(frozen=True, kw_only=True)
class ProgramNotice:
    """Statement on a program; `reason` is empty if it is instrumented."""

    instrumented: bool
    frameworks: tuple[str, ...] = ()
    reason: str = ""


def describe_program(
    record: ProgramRecord | None, *, instrument: str, stepped: bool, seconds: float
) -> ProgramNotice | None:
    """Return how a rank is watched, `seconds` after its start, or None as long as that is open."""
    if instrument == OFF:
        return ProgramNotice(instrumented=False, reason="watch.instrument=off")
    if record is not None and ProgramFlags.DISABLED in record.flags:
        return ProgramNotice(instrumented=False, reason=f"the start-up module is disabled: {record.error}")
    if record is not None and stepped:  # by then the program has imported its frameworks
        return ProgramNotice(instrumented=True, frameworks=record.frameworks)
    if record is None and seconds > PATIENCE_SECONDS:
        reason = f"no Python with torch has been found within {seconds:.0f} s"
        return ProgramNotice(instrumented=False, reason=reason)
    return None
