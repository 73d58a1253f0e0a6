"""Faults on purpose in a live job: which are ordered, and of whom."""

import pytest

from trainer.agent.rank_processes import local_ranks
from trainer.agent.rank_processes.local_ranks import LocalRanks
from trainer.protocol.config_sections.fault_detection_config import KINDS
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.protocol.messages.agents import InjectFault
from trainer.protocol.requests import REFUSED, Request, RequestKind

SHAPE = ClusterShape(nodes=2, ranks_per_node=2)


def asked(kind: str, at: float | None = None) -> Request:
    return Request(kind=RequestKind.DRILL, attempt=1, reason="test", detail=kind, value=at)


@pytest.mark.parametrize(("kind", "at", "words"), [
    ("stop-rank", 3, "stop-rank strikes rank 3"),
    ("nan", None, "nan strikes rank 0"),
    ("kill-node", 1, "kill-node strikes node 1"),
])  # fmt: skip
def test_what_there_is_to_hit_is_hit(kind, at, words) -> None:
    order, answer = local_ranks.drill_order(asked(kind, at), SHAPE)
    assert order is not None
    assert (order.kind, order.at) == (kind, at or 0)
    assert answer == words


@pytest.mark.parametrize(("kind", "at", "words"), [
    ("stop-rank", 4, "there is no rank 4, only 0 to 3"),
    ("kill-agent", 2, "there is no node 2, only 0 to 1"),
    ("meteor", None, "no such drill: meteor; there are kill-rank"),
])  # fmt: skip
def test_what_there_is_not_is_refused(kind, at, words) -> None:
    order, answer = local_ranks.drill_order(asked(kind, at), SHAPE)
    assert order is None
    assert answer.startswith(REFUSED)
    assert words in answer


def test_only_the_node_that_is_meant_obeys() -> None:
    ranks = LocalRanks(1, range(2, 4))
    assert local_ranks.is_here(InjectFault(kind="nan", at=3), ranks, 1)
    assert not local_ranks.is_here(InjectFault(kind="nan", at=1), ranks, 1)
    assert local_ranks.is_here(InjectFault(kind="kill-agent", at=1), ranks, 1)
    assert not local_ranks.is_here(InjectFault(kind="kill-agent", at=0), ranks, 1)
    local_ranks.inject(InjectFault(kind="nan", at=3, serial=5), ranks)
    serial, kind, _ = ranks.by_rank[3].cell.read_drill_order()
    assert (serial, list(KINDS)[kind]) == (5, "nan")
    for local in ranks.by_rank.values():
        assert local.theirs is not None
        local.theirs.close()
    ranks.close()
