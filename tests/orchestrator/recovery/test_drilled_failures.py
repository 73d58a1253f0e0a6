"""Failures that a drill brought about, by what the registry knows of the attempt."""

import pytest

from orchestrator.recovery.retry_policy import attribute_drill, drill_words
from orchestrator.registry.records import Notice
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import Failure, FailureKind

LOST = Failure(kind=FailureKind.NODE_LOST, reason="NODE_FAIL", node="n2")


def drilled(kind: str, attempt: int = 1, generation: int = 2) -> Notice:
    return Notice(
        run="r", attempt=attempt, source="agent-0001", seq=1, kind=EventKind.DRILL, generation=generation, time=1.0,
        node="n2", data={"kind": kind, "rank": None},
    )  # fmt: skip


@pytest.mark.parametrize(("notices", "drill"), [
    ([drilled("kill-node")], "kill-node"),
    ([drilled("slow-rank")], ""),
    ([drilled("kill-node", generation=1)], ""),
    ([drilled("kill-node", attempt=2)], ""),
    ([], ""),
])  # fmt: skip
def test_what_ended_the_generation_that_was_hit(notices: list[Notice], drill: str) -> None:
    found = attribute_drill(LOST, notices, 1, 2)
    assert found is not None
    assert found.drill == drill
    assert drill_words(found.to_json()) == (f" (drill {drill})" if drill else "")


def test_what_no_drill_brings_about_is_left_alone() -> None:
    limit = Failure(kind=FailureKind.TIME_LIMIT, reason="the time limit")
    assert attribute_drill(limit, [drilled("kill-node")], 1, 2) is limit
    assert attribute_drill(None, [drilled("kill-node")], 1, 2) is None
