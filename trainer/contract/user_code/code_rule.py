"""PURE: what it means that other code is about to train than before."""

from enum import StrEnum

from trainer.contract.user_code.code_record import CodeRecord, changed_files

SHOWN = 5
"""Files that a reason names."""


class CodeDecision(StrEnum):
    """What is done about the code of an attempt; each attempt's code is recorded in any case."""

    RECORD = "record"  # it is the code that was expected, as far as it is known
    WARN = "warn"  # it trains, with an event and a line in `show` and `status`
    REFUSE = "refuse"  # a person has to accept it first


class Occasion(StrEnum):
    """When code is compared."""

    START = "start"  # the first attempt of a submission starts
    NEXT = "next"  # orch has started another attempt, or another generation, by itself
    RESUME = "resume"  # a person continues the run


def judge_code(
    before: CodeRecord | None, now: CodeRecord | None, occasion: Occasion, since: str, *, accepted: bool = False
) -> tuple[CodeDecision, str]:
    """Decide what other code means, with the reason. `since`: what `before` is, in words ("attempt 1").

    An unattended run goes on, since stopping it costs the more the later somebody looks, and its change is recorded.
    A person who types `resume` is there to answer, so the change is refused until it is accepted.
    """
    if before is None or now is None:
        return CodeDecision.RECORD, "nothing to compare with"
    changed = changed_files(before, now)
    if not changed:
        return CodeDecision.RECORD, f"the code is that of {since}"
    reason = f"{shorten(changed)} since {since}"
    # Training goes on with other code from here on: a person who is there decides.
    if occasion is Occasion.RESUME and not accepted:
        return CodeDecision.REFUSE, reason
    return CodeDecision.WARN, reason


def shorten(words: list[str]) -> str:
    """The first few, and how many more there are."""
    more = f", and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more
