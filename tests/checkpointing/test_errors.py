"""The error raised when no checkpoint can be loaded."""

import pytest

from checkpointing.errors import CheckpointRefused, NothingFits, NothingIntact, NothingVerifies, nothing_verifies
from checkpointing.message_codec import decode, encode

DAMAGED = CheckpointRefused("step-2", "digest differs")
AWAY = CheckpointRefused("step-3", "not there", damaged=False)
UNREADABLE = CheckpointRefused("step-5", "COMMIT: unreadable: Input/output error", damaged=False, unreadable=True)
OTHER_MODEL = CheckpointRefused("step-4", "w has shape (3,) in it, (4,) here", damaged=False, fits=False)


@pytest.mark.parametrize(
    ("refusals", "kind"),
    [
        ([DAMAGED, DAMAGED], NothingIntact),
        ([OTHER_MODEL, OTHER_MODEL], NothingFits),
        ([OTHER_MODEL, DAMAGED], NothingFits),
        ([OTHER_MODEL, AWAY], NothingVerifies),
        ([DAMAGED, AWAY], NothingVerifies),
    ],
)
def test_only_unreadable_checkpoints_are_retried(
    refusals: list[CheckpointRefused], kind: type[NothingVerifies]
) -> None:
    assert type(nothing_verifies(refusals)) is kind


@pytest.mark.parametrize("refusal", [DAMAGED, AWAY, OTHER_MODEL, UNREADABLE])
def test_refusals_pass_between_ranks(refusal: CheckpointRefused) -> None:
    assert vars(decode(encode(refusal))) == vars(refusal)
