"""Whose job is it: every mark by itself, ids that were given out again, and what only looks like ours."""

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.config.run_config import ClusterConfig, RunConfig
from orchestrator.controller.scheduler_snapshot import JobRecord, SchedulerSnapshot, changes, identify
from orchestrator.registry.records import Attempt, Run, Submission
from orchestrator.run_dirs.job_spec import job_spec
from orchestrator.scheduler.interface import UNREADABLE, JobStatus, tags
from orchestrator.scheduler.slurm.command_output import epoch
from orchestrator.states import AttemptState, RunState
from trainer.protocol.config import RecoveryConfig

RUN = Run(
    name="tiny-1", state=RunState.QUEUED, reason="", cluster="slurm", run_dir="/runs/tiny-1", config_digest="0" * 64,
    total_steps=1,
)  # fmt: skip
ATTEMPT = Attempt(
    run="tiny-1", number=2, state=AttemptState.INTENT, nonce="00aa00bb", job_name="orch-tiny-1-2-00aa00bb"
)
THEN = "2026-11-22T10:00:00"
SUBMISSION = Submission(run="tiny-1", attempt=2, number=1, submitted_at=epoch(THEN) or 0.0, job_id="7")
RECORD = JobRecord.from_rows(RUN, ATTEMPT, [SUBMISSION])
ADOPTED = JobRecord.from_rows(RUN, replace(ATTEMPT, job_id="7", submit_time=THEN), [SUBMISSION])
NOTHING_OF_OURS = JobStatus(
    job_id="7", name="site-1", state="PENDING", submit_time=THEN, comment="managed", files=("/var/spool/script",)
)
MARKS = {
    "name": {"name": "orch-tiny-1-2-00aa00bb"},
    "comment": {"comment": "orch:tiny-1/2/00aa00bb"},
    "comment with words after it": {"comment": "orch:tiny-1/2/00aa00bb account=x"},
    "script": {"files": ("/runs/tiny-1/attempts/002/submission/submission_file_0.sh",)},
    "output": {"files": ("/tmp/copy", "/runs/tiny-1/attempts/002/submission/%j_0_log.out")},
    "what its script exports": {"script_tag": "orch-tiny-1-2-00aa00bb"},
}
OTHERS = {
    "another attempt's name": {"name": "orch-tiny-1-1-00aa00bc"},
    "another nonce": {"name": "orch-tiny-1-2-ffffffff"},
    "another attempt's comment": {"comment": "orch:tiny-1/3/00aa00bd"},
    "another attempt's files": {"files": ("/runs/tiny-1/attempts/001/submission/submission_file_0.sh",)},
    "a script of somebody else": {"script_tag": ""},
    "another attempt's script": {"script_tag": "orch-tiny-1-1-00aa00bc"},
    "another root": {"files": ("/elsewhere/tiny-1/attempts/002/submission/submission_file_0.sh",)},
}


@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS)
def test_one_mark_is_enough_whatever_the_id_and_the_time(mark: dict[str, object]) -> None:
    job = replace(NOTHING_OF_OURS, job_id="99", submit_time="2026-01-01T00:00:00", **mark)  # type: ignore[arg-type]
    assert identify(job, RECORD)[0]


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("record", [RECORD, ADOPTED], ids=["submitted", "adopted"])
def test_what_names_another_attempt_is_not_ours_even_with_our_id(other: dict[str, object], record: JobRecord) -> None:
    ours, reason = identify(replace(NOTHING_OF_OURS, **other), record)  # type: ignore[arg-type]
    assert not ours
    assert reason


@pytest.mark.parametrize(
    ("record", "submitted", "ours"),
    [
        (ADOPTED, THEN, True),
        (ADOPTED, "2026-11-22T10:00:01", False),
        (ADOPTED, "", False),
        (RECORD, "2026-11-22T10:00:55", True),
        (RECORD, "2026-11-22T09:59:30", True),
        (RECORD, "2026-11-22T10:05:00", False),
        (RECORD, "2026-11-22T09:50:00", False),
        (RECORD, "", False),
        (replace(RECORD, fresh="7"), "2026-11-22T15:00:00", True),
        (replace(RECORD, submissions=()), THEN, False),
    ],
)
def test_an_id_alone_counts_with_its_submit_time(record: JobRecord, submitted: str, ours: bool) -> None:
    assert identify(replace(NOTHING_OF_OURS, submit_time=submitted), record)[0] is ours


def test_a_job_that_slurm_started_again_is_the_same_one() -> None:
    again = replace(NOTHING_OF_OURS, name=ATTEMPT.job_name, submit_time="2026-11-22T12:00:00", restarts=1)
    assert identify(again, ADOPTED)[0]


@pytest.mark.parametrize(
    ("sluid", "state", "ours"),
    [("s1", "RUNNING", True), ("s2", "EXPEDITING", False), ("", "RUNNING", True), ("", UNREADABLE, True)],
)
def test_a_sluid_decides_which_run_of_a_requeued_job_is_the_attempt_s(sluid: str, state: str, ours: bool) -> None:
    record = replace(ADOPTED, sluid="s1")
    job = replace(NOTHING_OF_OURS, name=ATTEMPT.job_name, state=state, sluid=sluid)
    assert identify(job, record)[0] is ours
    continued = JobRecord.from_rows(RUN, replace(ATTEMPT, number=3, nonce="00aa00cc", job_id="7", sluid="s2"), [])
    assert identify(job, continued)[0] is (sluid == "s2" or state == UNREADABLE)


@pytest.mark.parametrize("name", ["eval-orch-tiny-1-2-00aa00bb", "orch-tiny-1-2-00aa00bb-eval", "Xorch-tiny-1"])
def test_a_name_around_ours_is_somebody_s(name: str) -> None:
    stranger = replace(NOTHING_OF_OURS, job_id="99", name=name, comment=f"evaluates {ATTEMPT.job_name}")
    assert not identify(stranger, RECORD)[0]


def test_an_unreadable_row_with_our_id_leaves_its_run_unknown() -> None:
    job = JobStatus(job_id="7", name="", state=UNREADABLE, reason="its row is damaged")
    adopted = replace(ATTEMPT, state=AttemptState.RUNNING, job_id="7", submit_time=THEN)
    seen = SchedulerSnapshot(
        answered=True, swept=True, polled={"7": job}, records={("tiny-1", 2): ADOPTED}
    ).for_attempt(adopted)
    assert (seen.answered, seen.error) == (False, "the report on job 7 cannot be read: its row is damaged")


def test_the_owner_of_an_orphan_is_found_by_its_id() -> None:
    seen = SchedulerSnapshot(
        answered=True, swept=True, polled={}, found=(NOTHING_OF_OURS,), records={("tiny-1", 2): RECORD}
    )
    assert seen.owner(NOTHING_OF_OURS) == RECORD
    assert seen.of_run(RUN) == [NOTHING_OF_OURS]
    assert seen.owner(replace(NOTHING_OF_OURS, job_id="8")) is None


OF_ANOTHER = {
    "the same name, elsewhere": {
        "name": "orch-tiny-1-1-ffffffff", "comment": "orch:tiny-1/1/ffffffff",
        "files": ("/elsewhere/tiny-1/attempts/001/submission/submission_file_0.sh",),
    },
    "the same name, no files told": {"name": "orch-tiny-1-2-ffffffff"},
    "a name that only looks like ours": {"name": "orch-tiny-1-2-analysis"},
}  # fmt: skip
OF_OURS = {
    "a recorded nonce": {"name": "orch-tiny-1-2-00aa00bb"},
    "nothing written down, our folder": {
        "name": "orch-tiny-1-3-ffffffff", "files": ("/runs/tiny-1/attempts/003/submission/submission_file_0.sh",),
    },
}  # fmt: skip


@pytest.mark.parametrize("marks", [*OF_ANOTHER.values(), *OF_OURS.values()], ids=[*OF_ANOTHER, *OF_OURS])
def test_a_run_of_another_registry_may_have_the_same_name(marks: dict[str, object]) -> None:
    job = replace(NOTHING_OF_OURS, job_id="99", **marks)  # type: ignore[arg-type]
    seen = SchedulerSnapshot(answered=True, swept=True, polled={}, found=(job,), records={("tiny-1", 2): RECORD})
    assert seen.of_run(RUN) == ([job] if marks in OF_OURS.values() else [])


@pytest.mark.parametrize("mark", [{"name": "orch-x-1-1-analysis"}, {"comment": "orch:x-1/1/analysis"}])
def test_only_a_nonce_makes_a_name_or_a_comment_ours(mark: dict[str, object]) -> None:
    assert tags(replace(NOTHING_OF_OURS, **mark)) == ()  # type: ignore[arg-type]


ASKED = job_spec(
    RUN,
    ATTEMPT,
    RunConfig(
        cluster=ClusterConfig(time="1:00:00", partition="gpu,big", account="Ann"),
        recovery=RecoveryConfig(requeue="never"),
    ),
)
AS_ASKED = JobStatus(
    job_id="7", name=ASKED.name, state="PENDING", comment=ASKED.comment,
    settings={"time limit": "1:00:00", "requeue": "0", "partition": "big", "account": "ann", "qos": "normal"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"name": "site-1"}, "Slurm renamed the job: orch-tiny-1-2-00aa00bb -> site-1"),
        ({"comment": ""}, "Slurm changed its comment to ''"),
        ({"comment": "", "source": "accounting"}, ""),
        ({"settings": {"partition": "low"}}, "Slurm changed its partition: gpu,big -> low"),
        ({"settings": {"account": "bob"}}, "Slurm changed its account: Ann -> bob"),
        ({"settings": {"requeue": "1"}}, "Slurm changed its requeue: 0 -> 1"),
        ({"settings": {"time limit": "30:00"}}, "Slurm changed its time limit: 1:00:00 -> 30:00"),
        ({"settings": {"time limit": "UNLIMITED"}}, "Slurm changed its time limit: 1:00:00 -> UNLIMITED"),
    ],
)
def test_what_a_site_has_changed_is_said(change: dict[str, object], words: str) -> None:
    assert changes(replace(AS_ASKED, **change), ASKED) == words  # type: ignore[arg-type]


def test_a_record_has_the_folder_that_sbatch_is_told_of() -> None:
    assert RECORD.folder == str(ASKED.submission) == str(Path("/runs/tiny-1/attempts/002/submission"))
