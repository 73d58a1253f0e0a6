"""PURE: the decision about changed code before it trains."""

from collections.abc import Sequence
from enum import StrEnum

from trainer.contract.user_code.code_record import CodeRecord, changed_files

SHOWN = 5
"""Maximum number of files that a reason names."""


class CodeDecision(StrEnum):
    """Action on the code of an attempt. The code of every attempt is recorded in any case."""

    RECORD = "record"  # the code is as expected, as far as is known
    WARN = "warn"  # the code trains, with an event and a line in `show` and `status`
    REFUSE = "refuse"  # the user must accept the code first


class Occasion(StrEnum):
    """Time of a comparison."""

    START = "start"  # the first attempt of a submission starts
    NEXT = "next"  # orch starts the next attempt or generation unattended
    RESUME = "resume"  # the user continues the run


def judge_code(
    before: CodeRecord | None,
    now: CodeRecord | None,
    occasion: Occasion,
    since: str,
    *,
    accepted: bool = False,
    packages: Sequence[str] = (),
) -> tuple[CodeDecision, str]:
    """Decide about the code, with the reason. `since`: description of `before` ("attempt 1").

    `packages`: descriptions of changed packages, which train as changed code does.

    An unattended run trains on and its change is recorded: a stopped run wastes time until its user notices. A user who
    types `resume` can answer, so the change is refused until it is accepted.
    """
    if before is None or now is None:
        return CodeDecision.RECORD, "nothing to compare with"
    changed = [*changed_files(before, now), *packages]
    if not changed:
        return CodeDecision.RECORD, f"the code is that of {since}"
    reason = f"{shorten(changed)} since {since}"
    # Only a user who is present can decide to continue with other code.
    if occasion is Occasion.RESUME and not accepted:
        return CodeDecision.REFUSE, reason
    return CodeDecision.WARN, reason


def shorten(words: list[str]) -> str:
    """Return the first words, and the number of the others."""
    more = f", and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more
