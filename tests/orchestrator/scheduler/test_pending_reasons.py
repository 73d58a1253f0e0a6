"""Why a job waits: what Slurm's reasons mean, whether they end by themselves, and what to type where they do not."""

import re

import pytest

from orchestrator.config.compose import compose
from orchestrator.config.layers import from_overrides
from orchestrator.scheduler.interface import Resources
from orchestrator.scheduler.slurm.refusals import (
    LONG_WAIT,
    MAY_STAY,
    STAYS,
    Lasts,
    find_wait,
    waiting_words,
    waits_for_nodes,
)

ASKED = Resources(nodes=2, cpus_per_task=8, mem="8G", gpus_per_node=4, constraint="h100")

REASONS = [
    ("Priority", Lasts.CLEARS),
    ("Resources", Lasts.CLEARS),
    ("BeginTime", Lasts.CLEARS),
    ("Licenses", Lasts.CLEARS),
    ("Reservation", Lasts.CLEARS),
    ("QOSMaxJobsPerUserLimit", Lasts.CLEARS),
    ("QOSMaxCpuPerUserLimit", Lasts.CLEARS),
    ("QOSGrpNodeLimit", Lasts.CLEARS),
    ("AssocGrpCpuLimit", Lasts.CLEARS),
    ("AssocMaxJobsLimit", Lasts.CLEARS),
    ("ReqNodeNotAvail, Reserved for maintenance", Lasts.CLEARS),
    ("ReqNodeNotAvail,_Reserved_for_maintenance", Lasts.CLEARS),
    ("ReqNodeNotAvail, UnavailableNodes:n[1-3]", Lasts.MAY_STAY),
    ("ReqNodeNotAvail", Lasts.MAY_STAY),
    (
        "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
        Lasts.MAY_STAY,
    ),
    ("PartitionNodeLimit", Lasts.MAY_STAY),
    ("PartitionDown", Lasts.MAY_STAY),
    ("PartitionInactive", Lasts.MAY_STAY),
    ("AssocGrpCPUMinutesLimit", Lasts.MAY_STAY),
    ("AssocGrpGRESRunMinutes", Lasts.MAY_STAY),
    ("QOSUsageThreshold", Lasts.MAY_STAY),
    ("JobHeldAdmin", Lasts.MAY_STAY),
    ("BadConstraints", Lasts.STAYS),
    ("PartitionTimeLimit", Lasts.STAYS),
    ("QOSMaxWallDurationPerJobLimit", Lasts.STAYS),
    ("AssocMaxWallDurationPerJobLimit", Lasts.STAYS),
    ("QOSMaxNodePerJobLimit", Lasts.STAYS),
    ("AssocMaxCpuPerJobLimit", Lasts.STAYS),
    ("QOSMaxGRESPerNode", Lasts.STAYS),
    ("QOSMinGRES", Lasts.STAYS),
    ("InvalidAccount", Lasts.STAYS),
    ("Job's account not permitted to use this partition (gpu allows phys not chem)", Lasts.STAYS),
    ("InvalidQOS", Lasts.STAYS),
    ("DependencyNeverSatisfied", Lasts.STAYS),
    ("ReservationDeleted", Lasts.STAYS),
]


@pytest.mark.parametrize(("reason", "lasts"), REASONS)
def test_a_reason_is_told_with_whether_it_ends_and_what_to_type(reason: str, lasts: Lasts) -> None:
    wait = find_wait(reason)
    assert wait is not None
    assert wait.lasts is lasts
    said = waiting_words(reason, ASKED, "a-1", LONG_WAIT)
    assert said.startswith(f" ({reason}): {wait.words}")
    assert (STAYS in said, MAY_STAY in said) == (lasts is Lasts.STAYS, lasts is Lasts.MAY_STAY)
    assert ("orch cancel a-1" in said) == (lasts is not Lasts.CLEARS)
    if wait.change:
        assert said.endswith(f"; `orch cancel a-1`, then `orch resume a-1 {wait.change}`")
        from_overrides(wait.change.split())  # keys that there are


@pytest.mark.parametrize(("reason", "lasts"), [row for row in REASONS if row[1] is Lasts.MAY_STAY])
def test_a_wait_that_has_just_begun_is_not_called_endless(reason: str, lasts: Lasts) -> None:
    """While a node dies and comes back, Slurm gives such a reason for seconds."""
    said = waiting_words(reason, ASKED, "a-1", LONG_WAIT - 1)
    assert said.startswith(f" ({reason}): ")
    assert MAY_STAY not in said
    assert "orch cancel" not in said


def test_what_no_node_has_is_told_in_full() -> None:
    assert "no nodes have all that it asks for (2 nodes with 8 cores, 4 GPUs, 8G, h100)" in waiting_words(
        "BadConstraints", ASKED, "a-1", 0.0
    )


@pytest.mark.parametrize(("reason", "said"), [("", ""), ("None", ""), ("SomethingNew", " (SomethingNew)")])
def test_what_is_not_known_is_passed_on(reason: str, said: str) -> None:
    assert waiting_words(reason, ASKED, "a-1", LONG_WAIT) == said


def test_the_first_run_fits_nodes_of_4_gb_and_two_cores() -> None:
    asked = compose("slurm-first-run", environ={"HOME": "/nowhere"}).config.cluster
    assert re.fullmatch(r"[1-3]G", asked.mem)
    assert asked.cpus_per_task <= 2


@pytest.mark.parametrize(
    ("reason", "for_nodes"),
    [
        ("Resources", True), ("Priority", True), ("ReqNodeNotAvail, UnavailableNodes:n[1-3]", True),
        ("ReqNodeNotAvail,_Reserved_for_maintenance", True), ("PartitionNodeLimit", True),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", True),
        ("BeginTime", False), ("Licenses", False), ("Reservation", False), ("QOSMaxJobsPerUserLimit", False),
        ("AssocGrpCPUMinutesLimit", False), ("BadConstraints", True), ("PartitionDown", False),
        ("something that nobody knows", False), ("None", None), ("", None),
    ],
)  # fmt: skip
def test_which_waits_a_job_of_fewer_nodes_may_end_sooner(reason: str, for_nodes: bool | None) -> None:
    assert waits_for_nodes(reason) is for_nodes
