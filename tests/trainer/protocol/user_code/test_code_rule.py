"""One rule decides what other code means."""

import pytest

from trainer.protocol.user_code.code_record import CodeDecision, CodeFile, CodeRecord, Occasion, judge_code


def record(*absent: str, **files: str) -> CodeRecord:
    return CodeRecord(files={name: CodeFile(path=name, sha256=text) for name, text in files.items()}, absent=absent)


@pytest.mark.parametrize("occasion", Occasion)
def test_the_same_code_is_only_recorded(occasion: Occasion) -> None:
    before, now = record(mine="1", other="1"), record(mine="1", new="2")
    assert judge_code(before, now, occasion, "attempt 1") == (CodeDecision.RECORD, "the code matches attempt 1")
    assert judge_code(None, now, occasion, "attempt 1")[0] is CodeDecision.RECORD
    assert judge_code(before, None, occasion, "attempt 1")[0] is CodeDecision.RECORD


@pytest.mark.parametrize(
    ("occasion", "accepted", "decision"),
    [
        (Occasion.START, False, CodeDecision.WARN),
        (Occasion.NEXT, False, CodeDecision.WARN),
        (Occasion.RESUME, False, CodeDecision.REFUSE),
        (Occasion.RESUME, True, CodeDecision.WARN),
    ],
)
def test_other_code_is_named_and_only_a_person_is_asked(occasion, accepted, decision):
    before, now = record("fancy", mine="1", gone="1"), record("gone", mine="2", fancy="1")
    reason = "mine changed, gone is gone, fancy is new since attempt 1"
    assert judge_code(before, now, occasion, "attempt 1", accepted=accepted) == (decision, reason)


def test_a_long_list_is_shortened() -> None:
    names = [f"m{number}" for number in range(9)]
    before, now = (record(**dict.fromkeys(names, text)) for text in "12")
    _, reason = judge_code(before, now, Occasion.NEXT, "attempt 1")
    assert reason.endswith("m4 changed, and 4 more since attempt 1")
