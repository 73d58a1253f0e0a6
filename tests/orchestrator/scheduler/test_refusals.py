"""What sbatch's words mean: refused for good, refused for now, or no answer."""

import stat
from pathlib import Path

import pytest

from orchestrator.errors import Retryable, SubmitAmbiguous, SubmitRejected
from orchestrator.scheduler.interface import Resources
from orchestrator.scheduler.slurm import sbatch
from orchestrator.scheduler.slurm.refusals import REFUSALS, submit_error

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
def test_what_no_outage_explains_is_refused_for_good(said: str) -> None:
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
def test_what_a_typo_and_an_outage_share_is_judged_by_whether_the_job_was_ever_taken(said: str) -> None:
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
def test_what_passes_is_refused_for_now(said: str) -> None:
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
        (("n1", "n9"), ("n9",), ("n9",), Retryable.YES, "Slurm does not know n9 any more, which orch avoided"),
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
