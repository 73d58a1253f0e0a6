"""The traits of each kind of failure fit each other."""

import pytest

from trainer.protocol.config_sections.fault_detection_config import DrillEvent
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import TRAITS, Budget, Culprit, Failure, FailureKind, Losses, NodeBlame
from trainer.protocol.failures.save_trouble import SaveTrouble, short_reason
from trainer.protocol.failures.suspect_checkpoints import drill_behind


def test_every_kind_has_its_row() -> None:
    assert set(TRAITS) == set(FailureKind)


@pytest.mark.parametrize("kind", FailureKind)
def test_traits_fit_each_other(kind: FailureKind) -> None:
    traits = TRAITS[kind]
    assert not (traits.restarts_in_place and traits.comes_back), "a restart mends it, or it comes back"
    assert not traits.comes_back or traits.budget is Budget.PERSON
    assert not traits.free or traits.asked_to_stop, "only an end that somebody asked for is free"
    assert traits.blame is NodeBlame.NOTHING or traits.budget is not Budget.PERSON
    assert not traits.asked_to_stop or traits.losses in (Losses.NOBODY, Losses.CLUSTER)


def failure(kind: FailureKind = FailureKind.RANK_KILLED, rank: int | None = 1, step: int | None = 25) -> Failure:
    return Failure(kind=kind, reason="its reason", rank=rank, node="n1", step=step)


CONFIGURED = (DrillEvent(kind="kill-rank", rank=1, step=25), DrillEvent(kind="slow-rank", rank=2, step=3))


@pytest.mark.parametrize(("found", "place", "drill"), [
    (failure(), (1, 1), "kill-rank"),
    (failure(step=24), (1, 1), "kill-rank"),  # it was in step 25, and had finished 24
    (failure(rank=None), (1, 1), "kill-rank"),
    (failure(step=23), (1, 1), ""),
    (failure(step=26), (1, 1), ""),
    (failure(rank=3), (1, 1), ""),
    (failure(rank=2, step=3), (1, 1), ""),  # being slow ends nothing
    (failure(), (1, 2), ""),
    (failure(), (2, 1), ""),
    (failure(FailureKind.PREEMPTED), (1, 1), ""),
])  # fmt: skip
def test_a_configured_fault_explains_what_fits_it(found: Failure, place: tuple[int, int], drill: str) -> None:
    assert drill_behind(found, "", CONFIGURED, *place) == drill


def test_a_fault_in_every_generation_explains_all() -> None:
    event = DrillEvent(kind="kill-rank", rank=1, step=25, generation=0, attempt=0)
    assert drill_behind(failure(), "", [event], 7, 9) == "kill-rank"


def test_of_several_roots_one_is_enough() -> None:
    roots = tuple(Culprit(rank=rank, node="n1", kind="stuck_in_data", reason="r") for rank in (0, 1))
    both = Failure(kind=FailureKind.HANG, reason="r", rank=0, node="n1", step=25, culprits=roots)
    event = DrillEvent(kind="hang-in-data", rank=1, step=26)
    assert drill_behind(both, "", [event], 1, 1) == "hang-in-data"


@pytest.mark.parametrize(("kind", "drill"), [(FailureKind.AGENT_LOST, "kill-node"), (FailureKind.TIME_LIMIT, "")])
def test_a_requested_one_explains_whatever_ends_its_generation(kind: FailureKind, drill: str) -> None:
    assert drill_behind(failure(kind, rank=None, step=None), "kill-node", (), 1, 1) == drill


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
