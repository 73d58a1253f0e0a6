"""How often a job is submitted that nobody can find."""

import pytest

from orchestrator.controller.submission_limits import ADOPTED, HOUR, MOST_IN_AN_HOUR, SubmitStep, submit_permission
from orchestrator.registry.records import Submission

NOW = 1_000_000.0


def submissions(count: int, *, ago: float = 60.0, job_id: str | None = None, outcome: str = "") -> list[Submission]:
    return [
        Submission(run="a", attempt=1, number=n, submitted_at=NOW - ago + n, job_id=job_id, outcome=outcome)
        for n in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    ("own", "everyone", "step"),
    [
        ([], [], SubmitStep.SUBMIT),
        (submissions(2), submissions(2), SubmitStep.SUBMIT),
        (submissions(3), submissions(3), SubmitStep.GIVE_UP),
        (submissions(3, outcome=ADOPTED), [], SubmitStep.SUBMIT),
        ([], submissions(MOST_IN_AN_HOUR - 1), SubmitStep.SUBMIT),
        ([], submissions(MOST_IN_AN_HOUR), SubmitStep.WAIT),
        ([], submissions(100, outcome=ADOPTED), SubmitStep.SUBMIT),
        ([], submissions(MOST_IN_AN_HOUR, ago=HOUR + 100.0), SubmitStep.SUBMIT),
    ],
)
def test_three_for_an_attempt_and_twenty_in_an_hour(
    own: list[Submission], everyone: list[Submission], step: SubmitStep
) -> None:
    assert submit_permission(own, everyone, NOW).step is step


def test_the_reasons_say_until_when_and_what_to_type() -> None:
    waits = submit_permission([], submissions(MOST_IN_AN_HOUR, ago=1800.0), NOW).reason
    assert waits.startswith("waits until 1970-01-12 14:16:41Z: 20 jobs that were submitted within the last hour")
    known = submit_permission(submissions(3, job_id="7"), [], NOW).reason
    assert "sbatch gave the job ids 7, 7, 7" in known
    assert "`scontrol show job 7`" in known
    assert "`scancel 7 7 7`" in known
    unknown = submit_permission(submissions(3), [], NOW).reason
    assert "sbatch gave no job id" in unknown
    assert "`squeue --me`" in unknown
