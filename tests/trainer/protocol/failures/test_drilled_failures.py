"""Which failures a drill has brought about."""

import pytest

from trainer.protocol.config_sections.fault_detection_config import DrillEvent
from trainer.protocol.failures.outcome import Culprit, Failure, FailureKind
from trainer.protocol.failures.suspect_checkpoints import drill_behind


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
