"""Blame of nodes, their exclusion, and the replay of a record of faults."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.node_exclusion import NodeOutage, always, faults, ours, replay, second_fault_policy
from checkpointing.config import AutoConfig
from orchestrator.recovery.failure_rate import NodeHistory
from orchestrator.recovery.node_exclusion import (
    DRILLED,
    NodeRecord,
    Pool,
    avoided_nodes,
    blame,
    count_replacements,
    excluded_nodes,
    exclusion_limit,
    faulty,
    hangs,
    nodes_to_exclude,
    of_every_node,
    slowness,
)
from orchestrator.registry.records import Notice
from trainer.protocol.config import RecoveryConfig
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import Culprit, Failure, FailureKind

CONFIG = RecoveryConfig()
NOW = 1000.0
FOUR = Pool(size=4, needed=2)
HOUR, DAY = 3600.0, 86400.0


def failed(*ages: float) -> NodeHistory:
    """A node that was in jobs since its first failure, and failed so many seconds ago."""
    seconds = max(ages)
    return NodeHistory(failed=ages, seconds=seconds, recent_seconds=seconds)


def failure(kind: FailureKind, node: str | None = "n2") -> Failure:
    return Failure(kind=kind, reason="its reason", node=node)


def test_evidence_of_the_node_itself_excludes_it_for_a_while() -> None:
    found = blame(failure(FailureKind.NODE_SUSPECT), "n2", FOUR, CONFIG, NOW)
    assert (found.node, found.until, found.reason) == ("n2", NOW + 24 * 3600, "node_suspect on n2")
    assert excluded_nodes([NodeRecord(name="n2", excluded_until=found.until)], found.until - 1) == ("n2",)
    assert excluded_nodes([NodeRecord(name="n2", excluded_until=found.until)], found.until) == ()


def test_a_pool_begins_with_the_failure_rate_of_the_configuration() -> None:
    assert (FOUR.node_days, FOUR.by_persons) == (AutoConfig().node_days, frozenset())


def test_one_death_is_no_evidence_and_two_are() -> None:
    once = blame(failure(FailureKind.RANK_KILLED), "n2", FOUR, CONFIG, NOW)
    assert (once.node, once.until, once.reason) == (None, 0.0, "a single rank_killed on n2 is not evidence against it")
    pool = Pool(size=4, needed=2, known=(NodeRecord(name="n2", history=failed(3 * HOUR)),))
    twice = blame(failure(FailureKind.RANK_KILLED), "n2", pool, CONFIG, NOW)
    assert (twice.node, twice.reason) == ("n2", "2 attempts failed on n2 within 3h00m")


def test_two_deaths_within_a_month_are_no_pattern() -> None:
    pool = Pool(size=4, needed=2, known=(NodeRecord(name="n2", history=failed(30 * DAY)),))
    found = blame(failure(FailureKind.RANK_KILLED), "n2", pool, CONFIG, NOW)
    assert (found.node, found.reason) == (None, "2 attempts failed on n2 within 30d00h: that may be chance")


def test_what_is_no_node_s_fault_never_blames_one() -> None:
    pool = Pool(size=4, needed=2, known=(NodeRecord(name="n2", history=failed(*[HOUR] * 9)),))
    for kind in (FailureKind.USER_ERROR, FailureKind.PREEMPTED, FailureKind.STORAGE, FailureKind.UNKNOWN):
        assert blame(failure(kind), "n2", pool, CONFIG, NOW).node is None
    assert nodes_to_exclude(failure(FailureKind.NODE_LOST, None), pool, CONFIG, NOW) == []


def test_a_partition_without_a_spare_node_is_left_alone() -> None:
    found = blame(failure(FailureKind.NODE_LOST), "n2", Pool(size=2, needed=2), CONFIG, NOW)
    assert found.node is None
    assert "no more nodes in the partition may be excluded" in found.reason


def test_an_unknown_partition_counts_the_nodes_that_were_seen() -> None:
    seen = tuple(NodeRecord(name=f"n{index}") for index in range(1, 4))
    assert exclusion_limit(Pool(size=None, needed=2, known=seen), CONFIG) == 1
    assert exclusion_limit(Pool(size=None, needed=2), CONFIG) == 0


def test_for_a_job_that_waits_for_nodes_those_in_service_count() -> None:
    assert [Pool(size=40, needed=2, in_service=nodes).excludable for nodes in (5, 2, 1)] == [3, 0, 0]


@given(st.integers(0, 500), st.integers(1, 500), st.integers(0, 60))
def test_never_more_than_the_share_and_never_an_impossible_job(size: int, needed: int, listed: int) -> None:
    known = tuple(NodeRecord(name=f"x{index}", excluded_until=NOW + 1) for index in range(listed))
    pool = Pool(size=size, needed=needed, known=known)
    if blame(failure(FailureKind.NODE_LOST), "n2", pool, CONFIG, NOW).node is not None:
        assert listed + 1 <= max(1, size * CONFIG.exclude_share)
        assert size - (listed + 1) >= needed


def noticed(
    event: EventKind, node: str, run: str = "r-1", attempt: int = 1, generation: int = 1, **data: object
) -> Notice:
    return Notice(
        run=run, attempt=attempt, source="coordinator", seq=1, kind=event, generation=generation, time=1.0, node=node,
        data=data,
    )  # fmt: skip


def test_a_hang_blames_its_node_when_it_is_the_second_one() -> None:
    once = blame(failure(FailureKind.HANG), "n2", FOUR, CONFIG, NOW)
    assert (once.node, once.reason) == (None, "a single hang on n2 is not evidence against it")
    pool = Pool(size=4, needed=2, known=(NodeRecord(name="n2", history=failed(HOUR)),))
    assert blame(failure(FailureKind.HANG), "n2", pool, CONFIG, NOW).node == "n2"


def test_hangs_mended_in_place_add_up_to_evidence() -> None:
    told = [
        noticed(EventKind.INCIDENT, "n2", kind="stopped", rank=3),
        noticed(EventKind.INCIDENT, "n2", kind="stopped", rank=3),
        noticed(EventKind.INCIDENT, "n2", generation=2, kind="stopped", rank=3),  # the same attempt: no second one
        noticed(EventKind.INCIDENT, "n3", kind="desync", rank=1),
        noticed(EventKind.INCIDENT, "n3", generation=2, kind="network"),
        noticed(EventKind.INCIDENT, "n4", kind="stopped", withdrawn=True),
    ]
    assert hangs(told) == {"n2": 1}
    assert hangs([*told, noticed(EventKind.INCIDENT, "n2", attempt=2, kind="stopped")]) == {"n2": 2}
    assert hangs([*told, noticed(EventKind.INCIDENT, "n2", run="r-2", kind="stopped")]) == {"n2": 2}
    pool = Pool(size=4, needed=2, known=(NodeRecord(name="n1", hangs=1), NodeRecord(name="n2", hangs=2)))
    (found,) = nodes_to_exclude(None, pool, CONFIG, NOW)
    assert (found.node, found.reason, found.until) == ("n2", "ranks on n2 hung in 2 attempts", NOW + 24 * 3600)
    fresh = NodeRecord(name="n2")
    once = Pool(size=4, needed=2, known=(replace(fresh, hangs=fresh.hangs + 1),))
    assert nodes_to_exclude(None, once, CONFIG, NOW) == []


def test_a_node_that_slows_down_attempt_after_attempt_is_replaced() -> None:
    told = [
        noticed(EventKind.STRAGGLER, "n2", attempt=1, rank=3),
        noticed(EventKind.STRAGGLER, "n2", attempt=1, rank=2),
        noticed(EventKind.STRAGGLER, "n1", attempt=1, rank=0),
        noticed(EventKind.STRAGGLER, "n1", attempt=1, rank=0, over=True),
        noticed(EventKind.STRAGGLER, "n2", run="r-2", rank=3),
    ]
    assert slowness(told, {}) == {"n2": 2}
    pool = Pool(size=4, needed=2, known=(NodeRecord(name="n2", slow=2),))
    (found,) = nodes_to_exclude(None, pool, CONFIG, NOW)
    assert found.reason == "n2 slowed down 2 attempts (recovery.exclude_slow_after)"
    never = RecoveryConfig(exclude_slow_after=0)
    assert nodes_to_exclude(None, pool, never, NOW) == []
    assert nodes_to_exclude(None, Pool(size=4, needed=2, known=(NodeRecord(name="n2", slow=1),)), CONFIG, NOW) == []


def test_who_was_slow_before_a_restart_did_not_slow_the_attempt_to_its_end() -> None:
    told = [
        noticed(EventKind.STRAGGLER, "n2", generation=1, rank=3),
        noticed(EventKind.STRAGGLER, "n3", generation=1, rank=5),
        noticed(EventKind.STRAGGLER, "n3", generation=2, rank=4),
    ]
    assert slowness(told, {("r-1", 1): 1}) == {"n2": 1, "n3": 1}
    assert slowness(told, {("r-1", 1): 2}) == {"n3": 1}
    assert slowness(told, {("r-1", 1): 3}) == {}


def test_what_somebody_brought_about_says_nothing_of_a_node() -> None:
    told = [
        noticed(EventKind.INCIDENT, "n2", kind="stopped"),
        noticed(EventKind.STRAGGLER, "n2", rank=3),
        noticed(EventKind.SPARE_USED, "n2", kind="agent_lost"),
    ]
    one = {("r-1", 1): 1}
    assert (hangs(told), slowness(told, one), count_replacements(told)) == ({"n2": 1},) * 3
    drill = noticed(EventKind.DRILL, "", kind="stop-rank", rank=3)
    assert (hangs([*told, drill]), slowness([*told, drill], one), count_replacements([*told, drill])) == ({}, {}, {})
    elsewhere = noticed(EventKind.DRILL, "", generation=2, kind="stop-rank", rank=3)
    assert hangs([*told, elsewhere]) == {"n2": 1}
    assert hangs([noticed(EventKind.INCIDENT, "n2", kind="stopped", **{DRILLED: True})]) == {}


def test_a_node_that_its_own_checks_condemn_is_avoided_though_a_spare_mended_it() -> None:
    told = [
        noticed(EventKind.PREFLIGHT, "n2", generation=0, ok=False, reason="/dev/shm is full"),
        noticed(EventKind.PREFLIGHT, "n9", run="r-2", generation=0, ok=False, reason="no room"),
        noticed(EventKind.SPARE_USED, "n3", reason="it says so", kind="node_suspect"),
        noticed(EventKind.SPARE_USED, "n4", reason="its agent is gone", kind="agent_lost"),
        noticed(EventKind.SPARE_USED, "n5", reason="its agent is gone", kind="agent_lost"),
        noticed(EventKind.SPARE_USED, "n6", reason="it says so", drill=True, kind="node_suspect"),
    ]
    trained = {("r-1", 1): 2, ("r-2", 1): 0}  # in r-2 nobody was fit: that may be everybody's trouble
    found = faulty(told, trained, {("r-1", 1, "n5"), ("r-2", 1, "n4")})
    assert found == {
        "n2": "it failed its checks: /dev/shm is full", "n3": "node_suspect: it says so",
        "n5": "node_lost: its agent is gone",
    }  # fmt: skip
    pool = Pool(size=40, needed=2, known=(NodeRecord(name="n1"), NodeRecord(name="n2", faulty=found["n2"])))
    (blamed,) = nodes_to_exclude(None, pool, CONFIG, NOW)
    assert (blamed.node, blamed.reason) == ("n2", "n2: it failed its checks: /dev/shm is full")


def test_a_second_loss_excludes_though_a_spare_mended_it() -> None:
    once = Pool(size=40, needed=2, known=(NodeRecord(name="n2", history=failed(0.0), replaced=1),))
    assert nodes_to_exclude(None, once, CONFIG, NOW) == []
    twice = Pool(size=40, needed=2, known=(NodeRecord(name="n2", history=failed(0.0, 3 * HOUR), replaced=1),))
    (blamed,) = nodes_to_exclude(None, twice, CONFIG, NOW)
    assert (blamed.node, blamed.reason) == ("n2", "2 attempts failed on n2 within 3h00m")
    alone = Pool(size=40, needed=2, known=(NodeRecord(name="n2", history=failed(HOUR), replaced=1),))
    assert nodes_to_exclude(None, alone, CONFIG, NOW) == [], "once is an accident, however short its time was"
    served = Pool(size=40, needed=2, known=(NodeRecord(name="n2", history=failed(0.0, 3 * HOUR)),))
    assert nodes_to_exclude(None, served, CONFIG, NOW) == [], "what it was kept away for"


def test_what_is_excluded_together_stays_within_the_share() -> None:
    known = (NodeRecord(name="n1", slow=9), NodeRecord(name="n2"), NodeRecord(name="n3", hangs=9))
    first, second, third = nodes_to_exclude(
        failure(FailureKind.NODE_LOST), Pool(size=4, needed=2, known=known), CONFIG, NOW
    )
    assert first.node == "n2"
    assert (second.node, third.node) == (None, None)
    assert "no more nodes in the partition may be excluded" in second.reason


def test_a_node_is_not_accused_of_what_it_is_kept_away_for() -> None:
    known = (NodeRecord(name="n2", slow=9, excluded_until=NOW + 1),)
    assert nodes_to_exclude(None, Pool(size=40, needed=2, known=known), CONFIG, NOW) == []


def test_all_nodes_of_an_incident_with_several_roots_are_judged() -> None:
    both = [{"rank": 3, "node": "n2"}, {"rank": 7, "node": "n5"}]
    told = [noticed(EventKind.INCIDENT, "n2", kind="stopped", culprits=both) for _ in range(2)]
    told[1] = replace(told[1], attempt=2)
    assert hangs(list(of_every_node(told))) == {"n2": 2, "n5": 2}
    assert next(of_every_node([noticed(EventKind.STRAGGLER, "n2", rank=1)])).node == "n2"


def test_a_failure_with_several_roots_counts_for_every_node_within_the_share_that_may_be_excluded() -> None:
    roots = tuple(Culprit(rank=rank, node=node, kind="stopped", reason="") for rank, node in ((3, "n2"), (7, "n5")))
    hang = Failure(kind=FailureKind.HANG, reason="2 ranks stopped", rank=3, node="n2", culprits=roots)
    known = tuple(NodeRecord(name=name, history=failed(HOUR)) for name in ("n2", "n5"))
    wide = nodes_to_exclude(hang, Pool(size=40, needed=4, known=known), RecoveryConfig(), 100.0)
    assert [one.node for one in wide] == ["n2", "n5"]
    narrow = nodes_to_exclude(hang, Pool(size=5, needed=4, known=known), RecoveryConfig(), 100.0)
    assert [one.node for one in narrow] == ["n2", None]


@given(st.integers(0, 50), st.integers(1, 50), st.integers(0, 9), st.integers(0, 9))
def test_people_are_obeyed_and_orch_stays_within_what_they_leave(size: int, needed: int, people: int, own: int) -> None:
    persons = [NodeRecord(name=f"p{index}", excluded_until=NOW + 9, by_person=True) for index in range(people)]
    others = [NodeRecord(name=f"x{index}", excluded_until=NOW + index) for index in range(own)]
    pool = Pool(size=size, needed=needed, known=(*persons, *others))
    found = avoided_nodes(pool, CONFIG, NOW)
    assert {node.name for node in persons} <= set(found)
    of_orch = len(found) - people
    assert of_orch <= max(1, int(size * CONFIG.exclude_share))
    assert not of_orch or size - len(found) >= needed
    assert "x0" not in found, "it has expired"


def test_a_node_that_a_person_excluded_is_not_blamed_once_more() -> None:
    pool = Pool(size=9, needed=2, known=(NodeRecord(name="n2", excluded_until=NOW + 9, by_person=True),))
    found = blame(failure(FailureKind.NODE_LOST), "n2", pool, CONFIG, NOW)
    assert (found.node, found.reason) == (None, "node_lost on n2; a person has already excluded it")


def test_of_too_many_the_latest_are_avoided() -> None:
    known = tuple(
        NodeRecord(name=name, excluded_until=NOW + hours * HOUR) for name, hours in (("a", 1), ("b", 3), ("c", 2))
    )
    found = [
        avoided_nodes(Pool(size=size, needed=2, known=known), RecoveryConfig(exclude_share=0.25), NOW)
        for size in (4, 8)
    ]
    assert found == [("b",), ("b", "c")]


def event(node: str, at: float, kind: str, what: str = "GPU") -> dict[str, object]:
    return {"node_id": node, "event_time": at, "event_type": f"fault_{kind}", "fault_type": {"Class": what}}


def test_a_fault_within_the_time_after_a_repair_is_prevented() -> None:
    trace = [NodeOutage("a", 1.0, 2.0), NodeOutage("a", 2.5, 3.0), NodeOutage("b", 4.0, 5.0), NodeOutage("a", 9.0, 9.5)]
    prevented, given_up = replay(trace, 10, 10.0, always(1.0))
    assert prevented == 1 / 4
    assert given_up == (1.0 + 1.0 + 1.0 + 0.5) / 100  # after 2.0 (repaired anew in between), 3.0, 5.0 and 9.5
    assert replay(trace, 10, 10.0, always(0.0)) == (0.0, 0.0)
    assert replay(trace, 10, 10.0, second_fault_policy(7.0))[0] == 1 / 4
    assert replay(trace, 10, 10.0, ours(7.0))[0] == 1 / 4


def test_what_operators_do_on_purpose_is_no_fault() -> None:
    events = [
        event("a", 1.0, "start"),
        event("a", 2.0, "end"),
        event("b", 1.0, "start", "Test"),
        event("b", 2.0, "end", "Test"),
    ]
    assert faults(events) == [NodeOutage("a", 1.0, 2.0)]
