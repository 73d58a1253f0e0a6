"""When dead ranks' flight records are looked at, and what they are taken for."""

import pytest

from trainer.agent.coordination.job_monitor import desync_judgement, is_needed
from trainer.agent.flight.wait_graph import Finding
from trainer.agent.watch.waiting_ranks import HangKind
from trainer.protocol.failures.rank_end import RankEnd


def end(rank: int, **fields) -> RankEnd:
    return RankEnd(rank=rank, node=f"n{rank // 2}", at=1.0, step=7, **fields)


ECHO = {"exit_code": 75, "exception": "DistNetworkError", "message": "Connection closed by peer", "secondary": True}


@pytest.mark.parametrize(
    ("ends", "due"),
    [
        ([end(0, **ECHO), end(1, signal=6)], True),
        ([end(0, **ECHO), end(1, signal=9)], False),
        ([end(0, **ECHO), end(1, exit_code=1, exception="KeyError", message="x")], False),
        ([end(0, exit_code=0)], False),
        ([], False),
    ],
)
def test_only_when_nobody_explains_himself(ends, due) -> None:
    assert is_needed(ends) is due


def test_different_collectives_are_told_with_the_rank_and_its_node() -> None:
    finding = Finding(kind="desync_shape", ranks=(3,), group="0", sequence=4, reason="rank 3 did something else")
    judgement = desync_judgement(finding, [end(rank, **ECHO) for rank in range(4)])
    assert judgement is not None
    assert (judgement.kind, judgement.culprit, judgement.node, judgement.step) == (HangKind.DESYNC, 3, "n1", 7)
    assert judgement.waiting == (0, 1, 2)


def test_a_rank_that_is_only_missing_had_been_killed() -> None:
    finding = Finding(kind="missing", ranks=(3,), reason="rank 3 never came")
    assert desync_judgement(finding, [end(0, **ECHO)]) is None
