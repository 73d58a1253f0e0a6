"""How many nodes the next attempt asks for, and when a job no longer waits for all: every rule with its reason."""

import pytest

from orchestrator.recovery.elastic_policy import (
    LastAttempt,
    WorldSize,
    asked_nodes,
    choose_smaller_world,
    give_up_waiting,
    needs_choice,
    next_size,
    on_nodes,
    size_words,
)
from trainer.protocol.failures.outcome import FailureKind

SIZES = [WorldSize(nodes=4, spare_nodes=1), WorldSize(nodes=4), WorldSize(nodes=3), WorldSize(nodes=2)]
HOUR = 3600.0
GIVEN_UP = LastAttempt(asked=5, kind=FailureKind.NODES_MISSING, reason="2 nodes were missing for 1h01m")


@pytest.mark.parametrize(
    ("waited", "asked", "usable", "why"),
    [
        (HOUR - 1, 5, 3, ""),
        (HOUR + 60, 5, 3, "2 nodes were missing for 1h01m (recovery.patience=3600)"),
        (HOUR, 5, 4, "1 node was missing for 1h00m (recovery.patience=3600)"),
        (HOUR, 5, 9, "5 nodes were not free for 1h00m (recovery.patience=3600)"),  # other people's jobs
        (HOUR, 5, None, "5 nodes were not free for 1h00m (recovery.patience=3600)"),
        (HOUR, 3, 2, "1 node was missing for 1h00m (recovery.patience=3600)"),
        (99 * HOUR, 5, 1, ""),  # two nodes are the fewest: a smaller job would wait just as long
        (99 * HOUR, 2, 2, ""),  # there is nothing smaller
        (99 * HOUR, 2, None, ""),
    ],
)
def test_a_job_waits_for_its_nodes_until_patience_is_over(
    waited: float, asked: int, usable: int | None, why: str
) -> None:  # fmt: skip
    assert give_up_waiting(SIZES, asked, waited, HOUR, usable) == why


@pytest.mark.parametrize(
    ("usable", "nodes"),
    [(3, 3), (2, 2), (4, 4), (9, 4), (None, 4), (1, 2)],  # of 9 that are busy, one less than before is asked for
)
def test_after_a_wait_that_was_given_up_the_next_attempt_asks_for_less(usable: int | None, nodes: int) -> None:
    size, why = next_size(SIZES, GIVEN_UP, usable, HOUR)
    assert (size.nodes, size.spare_nodes) == (nodes, 0)
    assert why == "2 nodes were missing for 1h01m"


def test_a_full_attempt_that_ended_is_followed_by_a_full_one_whatever_is_in_service() -> None:
    lost = LastAttempt(asked=5, kind=FailureKind.NODE_LOST, reason="n2 is down")
    assert next_size(SIZES, lost, 3, HOUR)[0] is SIZES[0], "the node may be back before patience is over"
    assert next_size(SIZES, lost, 3, HOUR)[1] == ""


@pytest.mark.parametrize(
    ("usable", "all_nodes", "reason"),
    [
        (5, 5, "all 5 nodes again: Slurm has 5 nodes in service"),
        (8, 5, "all 5 nodes again: Slurm has 8 nodes in service"),
        (None, 5, "all 5 nodes again"),
        (4, 4, "1 node is still missing"),
        (3, 3, "2 nodes are still missing"),
        (2, 2, "3 nodes are still missing"),
        (0, 2, "5 nodes are still missing"),
    ],
)
def test_a_smaller_attempt_that_ended_is_followed_by_what_fits_now(
    usable: int | None, all_nodes: int, reason: str
) -> None:  # fmt: skip
    size, why = next_size(
        SIZES, LastAttempt(asked=3, kind=FailureKind.TIME_LIMIT, reason="its time was over"), usable, HOUR
    )
    assert (size.all_nodes, why) == (all_nodes, reason)


def test_a_run_that_is_never_smaller_asks_for_its_own_size() -> None:
    for kind in (FailureKind.NODE_LOST, FailureKind.NODES_MISSING, FailureKind.SUBMIT_DEFERRED):
        last = LastAttempt(asked=5, kind=kind, reason="lost", refused_for=2 * HOUR)
        assert not needs_choice(SIZES[:1], last)
        assert next_size(SIZES[:1], last, 1, HOUR)[0] is SIZES[0]


@pytest.mark.parametrize(
    ("usable", "refused_for", "all_nodes", "reason"),
    [
        (3, HOUR - 1, 5, ""),
        (3, HOUR + 60, 3,
         "2 nodes were missing for 1h01m, and such a job is refused (recovery.patience=3600)"),
        (5, 9 * HOUR, 5, ""),  # it is refused for another reason
        (1, 9 * HOUR, 5, ""),  # fewer than the fewest: no job could start
        (None, 9 * HOUR, 5, ""),
    ],
)  # fmt: skip
def test_a_size_that_slurm_refuses_for_longer_than_patience_is_given_up_too(
    usable: int | None, refused_for: float, all_nodes: int, reason: str
) -> None:
    last = LastAttempt(
        asked=5, kind=FailureKind.SUBMIT_DEFERRED, reason="Requested node configuration is not available",
        refused_for=refused_for,
    )  # fmt: skip
    size, why = next_size(SIZES, last, usable, HOUR)
    assert needs_choice(SIZES, last)
    assert (size.all_nodes, why) == (all_nodes, reason)


def test_cluster_sections_without_sizes_mean_one_node_and_no_spare() -> None:
    facts = choose_smaller_world({}, {}, "f00d", "a reason")
    assert list(facts.values()) == [1, 0, 1, 0, "a reason", "f00d"]


def test_a_smaller_world_in_words() -> None:
    full = {"nodes": 4, "spare_nodes": 2}
    world = choose_smaller_world({"nodes": 3, "spare_nodes": 0}, full, "f00d", "1 node was missing for 1h01m")
    assert size_words(3, world) == "attempt 3 runs on 3 of 4 nodes: 1 node was missing for 1h01m"
    assert size_words(3, None) == ""
    spares = choose_smaller_world({"nodes": 4, "spare_nodes": 1}, full, "f00d", "1 node was missing")
    assert on_nodes(spares) == "with 1 of 2 spare nodes: 1 node was missing"
    assert asked_nodes(spares) == 5
