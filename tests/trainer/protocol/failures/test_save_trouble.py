"""Saves that fail, in one line: since when, why, and that they work again."""

import pytest

from trainer.protocol.events import EventKind
from trainer.protocol.failures.save_trouble import SaveTrouble, short_reason

FULL = (
    "rank 0: disk full ([Errno 28] No space left on device: "
    "'/runs/gpt-1/checkpoints/step-00000030.001-0badcafe/__0_0.distcp'); rank 1: disk full ([Errno 28] No space "
    "left on device: '/runs/gpt-1/checkpoints/step-00000030.001-0badcafe/__1_0.distcp')"
)


def test_the_first_step_that_was_not_saved_stays_until_a_save_works() -> None:
    trouble = SaveTrouble()
    assert trouble.text == ""
    for step, kind in ((30, EventKind.CHECKPOINT_RETRIED), (30, EventKind.CHECKPOINT_FAILED)):
        assert trouble.note(kind, {"step": step, "reason": FULL, "bytes": 2048})
    assert trouble.note(EventKind.CHECKPOINT_FAILED, {"step": 40, "reason": FULL})
    assert trouble.text == "saves failing since step 30: disk full (/runs/gpt-1/checkpoints)"
    assert trouble.size == 2048
    assert not trouble.note(EventKind.CHECKPOINT_SAVING, {"step": 50, "name": "step-00000050.001-0badcafe"})
    assert trouble.note(EventKind.CHECKPOINT_COMMITTED, {"step": 50, "name": "step-00000050.001-0badcafe"})
    assert trouble.text == ""


def test_copies_to_a_further_tier_fail_apart_from_saves() -> None:
    trouble = SaveTrouble()
    trouble.note(EventKind.CHECKPOINT_FAILED, {"step": 30, "reason": "it is away", "tier": "/far"})
    trouble.note(EventKind.CHECKPOINT_COMMITTED, {"step": 40})
    assert trouble.text == "copies to /far failing since step 30: it is away"
    trouble.note(EventKind.CHECKPOINT_STUCK, {"step": 50, "reason": "8 bytes are still not written"})
    assert trouble.text == (
        "saves failing since step 50: 8 bytes are still not written; copies to /far failing since step 30: it is away"
    )
    trouble.note(EventKind.CHECKPOINT_FLUSHED, {"step": 50, "tier": "/far"})
    trouble.note(EventKind.CHECKPOINT_COMMITTED, {"step": 60})
    assert trouble.text == ""


@pytest.mark.parametrize(
    ("reason", "short"),
    [
        (FULL, "disk full (/runs/gpt-1/checkpoints)"),
        ("[Errno 122] Disk quota exceeded: '/runs/a/.probe'", "disk quota exceeded (/runs/a)"),
        ("rank 3: [Errno 5] Input/output error: '/x/y'", "I/O error (/x)"),
        ("implausible: 3 tensors\nhave NaN", "implausible: 3 tensors have NaN"),
        ("[Errno 13] Permission denied: '/x/y'", "[Errno 13] Permission denied: '/x/y'"),
        ("x" * 400, "x" * 297 + "..."),
    ],
)  # fmt: skip
def test_a_reason_is_what_the_disk_said_and_where(reason: str, short: str) -> None:
    assert short_reason(reason) == short
