"""Meaning of sbatch's refusals and of pending reasons."""

import re
import stat
from pathlib import Path

import pytest

from orchestrator.config.compose import compose
from orchestrator.config.layers import from_overrides
from orchestrator.errors import Retryable, SubmitAmbiguous, SubmitRejected
from orchestrator.scheduler.interface import Resources
from orchestrator.scheduler.slurm import sbatch
from orchestrator.scheduler.slurm.refusals import (
    LONG_WAIT,
    MAY_STAY,
    REFUSALS,
    STAYS,
    Lasts,
    find_wait,
    submit_error,
    waiting_words,
    waits_for_nodes,
)

FAILED = "sbatch: error: Batch job submission failed: "
POLICY = f"{FAILED}Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(
    "said",
    [
        f"sbatch: error: invalid partition specified: x\n{FAILED}Invalid partition name specified",
        f"{FAILED}Invalid feature specification",
        f"{FAILED}Requested time limit is invalid (missing or exceeds some limit)",
        f"{FAILED}More processors requested than permitted",
        f"{FAILED}Node count specification invalid",
        f"{FAILED}CPU count per node can not be satisfied",
        f"sbatch: error: Memory specification can not be satisfied\n{FAILED}Memory required by task is not available",
        f"{FAILED}Invalid node name specified",
        f"sbatch: error: QOSMaxWallDurationPerJobLimit\n{POLICY}",
        f"sbatch: error: AssocMaxCpuPerJobLimit\n{POLICY}",
        f"sbatch: error: QOSMinGRES\n{POLICY}",
        "sbatch: error: Invalid --time specification",
        "sbatch: unrecognized option '--foo'\nTry \"sbatch --help\" for more information",
    ],
)
def test_user_errors_are_permanent_refusals(said: str) -> None:
    error = submit_error(said)
    assert isinstance(error, SubmitRejected)
    assert error.retryable is not Retryable.YES
    assert error.hint


@pytest.mark.parametrize(
    "said",
    [
        f"{FAILED}Invalid account or account/partition combination specified",
        f"{FAILED}Invalid qos specification",
        f"{FAILED}Requested node configuration is not available",
        f"{FAILED}User's group not permitted to use this partition",
        f"{FAILED}Invalid user id",
        f"{FAILED}Invalid generic resource (gres) specification",
    ],
)
def test_ambiguous_refusals_are_retryable_once_accepted(said: str) -> None:
    error = submit_error(said)
    assert isinstance(error, SubmitRejected)
    assert error.retryable is Retryable.ONCE_ACCEPTED


@pytest.mark.parametrize(
    "said",
    [
        f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{POLICY}",
        f"sbatch: error: QOSMaxJobsPerUserLimit\n{POLICY}",
        f"sbatch: error: AssocMaxSubmitJobLimit\n{POLICY}",
        f"sbatch: error: AssocGrpSubmitJobsLimit\n{POLICY}",
        f"sbatch: error: QOSMaxNodePerUserLimit\n{POLICY}",
        POLICY,
        f"sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying\n{FAILED}Resource temporarily "
        "unavailable",
        f"{FAILED}MaxJobCount limit reached",
        f"{FAILED}Requested partition configuration not available now",
        f"{FAILED}Required partition not available (inactive or drain)",
        f"{FAILED}Partition in DOWN state",
        f"{FAILED}System submissions disabled",
        f"{FAILED}Job can not start due to maintenance reservation.",
        f"{FAILED}Requested reservation not usable now",
        f"{FAILED}I/O error writing script/environment to file",
        f"{FAILED}Incompatible versions of client and server code",
        f"{FAILED}Unspecified error",
        f"sbatch: error: the site's filter says no\n{FAILED}something new",
    ],
)
def test_temporary_refusals_are_retryable(said: str) -> None:
    error = submit_error(said)
    assert isinstance(error, SubmitRejected)
    assert error.retryable is Retryable.YES
    assert error.hint


@pytest.mark.parametrize(
    "said",
    [
        "",
        f"{FAILED}Socket timed out on send/recv operation",
        f"{FAILED}Unable to contact slurm controller (connect failure)",
        f"{FAILED}Zero Bytes were transmitted or received",
        f"{FAILED}Protocol authentication error",
        f"{FAILED}Communication connection failure",
        "sbatch: error: invalid partition specified: x\nsbatch: error: Socket timed out on send/recv operation",
        "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying",
        "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "sbatch: fatal: Could not establish a configuration source",
        'sbatch: error: xgetaddrinfo: Unable to resolve "ctl": Name or service not known',
        "sbatch: error: If munged is up, restart with --num-threads=10\n"
        f"sbatch: error: Munge encode failed: Failed to access\n{FAILED}Protocol authentication error",
        "Segmentation fault",
    ],
)
def test_everything_else_is_no_answer(said: str) -> None:
    assert isinstance(submit_error(said), SubmitAmbiguous)


def test_every_row_has_a_hint() -> None:
    assert all(row.hint and row.words for row in REFUSALS)


@pytest.mark.parametrize(
    ("excluded", "avoided", "unknown", "retryable", "said"),
    [
        (("n1", "n9"), ("n9",), ("n9",), Retryable.YES, "Slurm no longer knows n9, which orch avoided"),
        (("n[8-9]",), (), (), Retryable.NEVER, "cluster.exclude names n8, n9, which Slurm does not know"),
        (("n8", "n9"), ("n9",), ("n9",), Retryable.YES, "n9"),
    ],
)
def test_unknown_nodes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, excluded: tuple[str, ...], avoided: tuple[str, ...],
    unknown: tuple[str, ...], retryable: Retryable, said: str,
) -> None:  # fmt: skip
    program = tmp_path / "sinfo"
    program.write_text("#!/bin/sh\nprintf 'n1\\nn2\\n'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    resources = Resources(nodes=1, exclude=excluded, avoided=avoided)
    error = sbatch.explain_rejection(submit_error(f"{FAILED}Invalid node name specified"), resources)
    assert isinstance(error, SubmitRejected)
    assert (error.unknown_nodes, error.retryable) == (unknown, retryable)
    assert said in error.what


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
    ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", Lasts.MAY_STAY),
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
def test_a_reason_is_explained_with_a_remedy(reason: str, lasts: Lasts) -> None:
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
    said = waiting_words(reason, ASKED, "a-1", LONG_WAIT - 1)
    assert said.startswith(f" ({reason}): ")
    assert MAY_STAY not in said
    assert "orch cancel" not in said


def test_all_unavailable_resources_are_reported() -> None:
    assert "no nodes have everything it requests (2 nodes with 8 cores, 4 GPUs, 8G, h100)" in waiting_words(
        "BadConstraints", ASKED, "a-1", 0.0
    )


@pytest.mark.parametrize(("reason", "said"), [("", ""), ("None", ""), ("SomethingNew", " (SomethingNew)")])
def test_unknown_reasons_are_passed_on(reason: str, said: str) -> None:
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
        ("Dependency", False), ("JobHeldUser", False), ("NvidiaImexChannels", False),
        ("Waiting for topology block b3", True), ("None", None), ("", None),
    ],
)  # fmt: skip
def test_waits_that_fewer_nodes_may_shorten(reason: str, for_nodes: bool | None) -> None:
    assert waits_for_nodes(reason) is for_nodes
