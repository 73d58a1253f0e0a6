"""The nice values that put one user's pending jobs in order."""

import pytest

from orchestrator.scheduler.slurm.own_order import OwnOrder, PendingJob, WantedOrder, plan_nice, read_pending


def pending(job_id: str, priority: int, nice: int = 0, partition: str = "low") -> PendingJob:
    return PendingJob(job_id=job_id, partition=partition, priority=priority, nice=nice)


def ranks(**wanted: int) -> dict[str, WantedOrder]:
    return {job.removeprefix("j"): WantedOrder(rank=rank) for job, rank in wanted.items()}


@pytest.mark.parametrize(
    ("jobs", "wanted", "plan"),
    [
        ([pending("1", 500), pending("2", 400)], ranks(j1=0, j2=10), {"1": 101}),
        ([pending("1", 300), pending("2", 400)], ranks(j1=0, j2=10), {}),
        ([pending("1", 500), pending("2", 400)], ranks(j1=0, j2=0), {}),
        ([pending("1", 399, 101), pending("2", 400)], ranks(j1=0, j2=10), {}),  # done already
        ([pending("1", 399, 101)], ranks(j1=0), {"1": 0}),  # the other one has started
        ([pending("1", 500), pending("2", 400, partition="high")], ranks(j1=0, j2=10), {}),
        ([pending("1", 900), pending("2", 500), pending("3", 400)], ranks(j1=-10, j2=0, j3=10), {"2": 101, "1": 502}),
        ([pending("1", 500), pending("2", 1)], ranks(j1=0, j2=10), {}),  # nothing is below 1
    ],
)
def test_jobs_get_just_enough_nice(
    jobs: list[PendingJob], wanted: dict[str, WantedOrder], plan: dict[str, int]
) -> None:
    assert plan_nice(jobs, wanted) == plan


def test_the_nice_value_of_the_configuration_is_kept() -> None:
    wanted = {"1": WantedOrder(rank=0, nice=50), "2": WantedOrder(rank=10)}
    assert plan_nice([pending("1", 450, 50), pending("2", 400)], wanted) == {"1": 101}
    assert plan_nice([pending("1", 399, 101)], wanted) == {"1": 50}


def test_a_refused_change_is_not_repeated() -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> tuple[int, str, str]:
        commands.append(command)
        if command[0] == "squeue":
            return 0, "1   |500  |0   |low  |\n2   |400  |0   |low  |\nrubbish\n", ""
        return 1, "", "Access/permission denied for job 1"

    order = OwnOrder(run)
    assert order(ranks(j1=0, j2=10)) == order(ranks(j1=0, j2=10)) == []
    assert [words[0] for words in commands] == ["squeue", "scontrol", "squeue"]
    assert commands[1] == ["scontrol", "update", "JobId=1", "Nice=101"]


def test_rows_of_squeue() -> None:
    assert read_pending("12        |4294901757|-5  |low   |\n12_[1-3] |1|0|low|\n") == [pending("12", 4294901757, -5)]
