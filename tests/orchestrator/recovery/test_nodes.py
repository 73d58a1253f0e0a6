"""Which node is blamed, and when."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.recovery.nodes import Pool, Standing, blame, excluded, limit
from trainer.contract.config import RecoveryConfig
from trainer.contract.outcome import Failure, FailureKind

CONFIG = RecoveryConfig()
NOW = 1000.0
FOUR = Pool(size=4, needed=2)


def failure(kind: FailureKind, node: str | None = "n2") -> Failure:
    return Failure(kind=kind, reason="its reason", node=node)


def test_evidence_of_the_node_itself_excludes_it_for_a_while() -> None:
    found = blame(failure(FailureKind.NODE_SUSPECT), FOUR, CONFIG, NOW)
    assert (found.node, found.until, found.reason) == ("n2", NOW + 24 * 3600, "node_suspect on n2")
    assert excluded([Standing(name="n2", excluded_until=found.until)], found.until - 1) == ("n2",)
    assert excluded([Standing(name="n2", excluded_until=found.until)], found.until) == ()


def test_one_death_is_no_evidence_and_two_are() -> None:
    once = blame(failure(FailureKind.RANK_KILLED), FOUR, CONFIG, NOW)
    assert (once.node, once.reason) == (None, "rank_killed once on n2 is no evidence against it")
    pool = Pool(size=4, needed=2, known=(Standing(name="n2", failures=1),))
    twice = blame(failure(FailureKind.RANK_KILLED), pool, CONFIG, NOW)
    assert (twice.node, twice.reason) == ("n2", "2 attempts failed on n2")


def test_what_is_no_node_s_fault_never_blames_one() -> None:
    pool = Pool(size=4, needed=2, known=(Standing(name="n2", failures=9),))
    for kind in (FailureKind.USER_ERROR, FailureKind.PREEMPTED, FailureKind.STORAGE, FailureKind.UNKNOWN):
        assert blame(failure(kind), pool, CONFIG, NOW).node is None
    assert blame(failure(FailureKind.NODE_LOST, None), pool, CONFIG, NOW).reason == "the failure names no node"


def test_a_partition_without_a_spare_node_is_left_alone() -> None:
    found = blame(failure(FailureKind.NODE_LOST), Pool(size=2, needed=2), CONFIG, NOW)
    assert found.node is None
    assert "no more nodes of the partition may be excluded" in found.reason


def test_an_unknown_partition_counts_the_nodes_that_were_seen() -> None:
    seen = tuple(Standing(name=f"n{index}") for index in range(1, 4))
    assert limit(Pool(size=None, needed=2, known=seen), CONFIG) == 1
    assert limit(Pool(size=None, needed=2), CONFIG) == 0


@given(st.integers(0, 500), st.integers(1, 500), st.integers(0, 60))
def test_never_more_than_the_share_and_never_an_impossible_job(size: int, needed: int, listed: int) -> None:
    known = tuple(Standing(name=f"x{index}", excluded_until=NOW + 1) for index in range(listed))
    pool = Pool(size=size, needed=needed, known=known)
    if blame(failure(FailureKind.NODE_LOST), pool, CONFIG, NOW).node is not None:
        assert listed + 1 <= max(1, size * CONFIG.exclude_share)
        assert size - (listed + 1) >= needed
