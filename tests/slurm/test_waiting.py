"""Jobs that wait for fair share, priority and limits in a real Slurm, and the order of one user's runs."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.scheduler.interface import JobStatus, Resources
from orchestrator.scheduler.slurm.own_order import OwnOrder, WantedOrder
from orchestrator.scheduler.slurm.slurm_scheduler import SlurmScheduler
from orchestrator.scheduler.slurm.wait_figures import WaitFigures
from tests.end_to_end.user import User, warm_environment
from tests.slurm import accounts
from tests.slurm.lab import SlurmLab, temporary_lab
from tests.trainer.agent.warm_agents import WarmAgents

pytestmark = [pytest.mark.slurm, pytest.mark.multi]
ASKED = Resources(nodes=1, cpus_per_task=4)


@pytest.fixture(scope="module")
def limited(suite: str) -> Iterator[SlurmLab]:
    """A Slurm with accounts, QOS, limits and priority factors."""
    with temporary_lab(suite, extra=accounts.CONF) as made:
        accounts.setup(made.ask)
        yield made


@pytest.fixture
def lab(limited: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmLab]:
    for name, value in limited.environment().items():
        monkeypatch.setenv(name, value)
    yield limited
    accounts.end_waits(limited.ask)


def waiting(job: str) -> JobStatus:
    return SlurmScheduler().poll([job])[job]


@pytest.mark.parametrize(
    ("wait", "said"),
    [
        ("qos", "QOS debug: GrpTRES=cpu=6, 4 in use by 1 job; this job requests 4 (at "),
        ("qos for a user", "QOS solo: MaxTRESPU=cpu=6, 4 in use by 1 job; this job requests 4 (at "),
        ("account", "account capped: GrpTRES=cpu=6, 4 in use by 1 job; this job requests 4 (at "),
        ("association", "user root in account rich: MaxJobs=1, 1 in use (at "),
        ("priority", "behind 1 job of at least "),
    ],
)
def test_a_waiting_job_names_the_limit_or_the_jobs_before_it(lab: SlurmLab, wait: str, said: str) -> None:
    job = waiting(accounts.make_wait(lab.ask, wait))
    figures = WaitFigures()(job, ASKED, 60.0)
    assert said in figures, (job.reason, figures)
    assert ("account poor: fair share " in figures) == (wait == "priority")


def test_lower_ranks_get_nice_and_lose_it(lab: SlurmLab) -> None:
    def submit() -> str:
        words = (
            "sbatch",
            "--parsable",
            "-A",
            "rich",
            "-N",
            "4",
            "--exclusive",
            "-o",
            "/dev/null",
            "--wrap",
            "sleep 60",
        )
        return lab.ask(*words).stdout.strip()

    def first() -> str:
        listed = lab.ask("squeue", "-h", "-t", "PD", "-S", "-p,i", "-o", "%i").stdout.split()
        return next(job for job in listed if job in (one, two))

    submit()
    one, two = submit(), submit()
    accounts._until(
        lambda: lab.ask("squeue", "-h", "-t", "PD", "-o", "%Q").stdout.split().count("0") == 0, "priorities"
    )
    order = OwnOrder()
    wanted = {one: WantedOrder(rank=0), two: WantedOrder(rank=10)}
    done = order(wanted)
    assert done, lab.ask("squeue", "-O", "JobID,State,PriorityLong,Nice").stdout
    assert first() == two
    assert order(wanted) == []
    assert order({one: WantedOrder(rank=0)}) == [f"nice 0 for job {one}"]
    assert first() == one


@pytest.fixture
def user(lab: SlurmLab, agents: WarmAgents, tmp_path: Path) -> Iterator[User]:
    someone = User(tmp_path, "slurm", lab.environment() | warm_environment(agents))
    yield someone
    someone.leave()


def submit_sleep(user: User, *words: str, **cluster: object) -> str:
    settings = [f"cluster.{name}={value}" for name, value in cluster.items()]
    base = ["cluster.partition=low", "cluster.time=10", "command=[sleep, '600']"]
    return str(
        user.ask(
            "submit", "torchrun-script", "--cluster", "slurm", *words, f"cluster.root={user.root}", *base, *settings
        )["run"]
    )


def test_orch_orders_its_own_waiting_runs(lab: SlurmLab, user: User) -> None:
    blocker = lab.ask(
        "sbatch", "--parsable", "-A", "poor", "-N", "4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600"
    ).stdout.strip()
    runs = [
        submit_sleep(user, "--priority", word, nodes=4, ranks_per_node=1, cpus_per_task=8, account="poor")
        for word in ("normal", "low", "high")
    ]  # fmt: skip

    def starts() -> list[str]:
        jobs = {str(user.status(run)["job_id"]): run for run in runs}
        listed = lab.ask("squeue", "-h", "-t", "PD", "-S", "-p,i", "-o", "%i").stdout.split()
        return [jobs[job] for job in listed if job in jobs]

    normal, low, high = runs
    user.until(lambda: starts() == [high, normal, low], 60, "high before normal before low")
    assert user.show(high)["priority"] == 10
    assert user.ask("priority", low, "20")["answer"] == f"{low} has priority 20"
    user.until(lambda: starts() == [low, high, normal], 60, "the order after `orch priority`")
    lab.ask("scancel", blocker)
    user.until(lambda: user.status(low)["state"] == "RUNNING", 60, "the first run")


@pytest.mark.proof
def test_status_shows_what_a_run_waits_for(lab: SlurmLab, user: User) -> None:
    lab.ask("sbatch", "-A", "poor", "-q", "debug", "-c", "4", "-o", "/dev/null", "--wrap", "sleep 600")
    run = submit_sleep(user, nodes=1, ranks_per_node=1, cpus_per_task=4, account="poor", qos="debug")
    said = "QOS debug: GrpTRES=cpu=6, 4 in use by 1 job; this job requests 4"
    # Slurm is asked about a waiting job every half a minute for each call that takes, and about limits after a minute.
    user.until(lambda: said in user.status(run)["reason"], 400, said)
    assert said in user.run("show", run).stdout.replace("\n", " ")
    assert os.environ["SLURM_CONF"] == str(lab.conf)
