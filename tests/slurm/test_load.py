"""Load on Slurm: calls of its clients by a controller are counted, and slow accounting delays no run."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.registry import fast_queries
from tests.end_to_end.user import User, warm_environment
from tests.slurm.counted_clients import CountedClients
from tests.slurm.lab import SlurmLab
from tests.trainer.agent.warm_agents import WarmAgents

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
SHAPE = ["cluster.nodes=1", "cluster.ranks_per_node=1", "cluster.cpus_per_task=1", "cluster.time=60"]
IDLE_BUDGET, BUSY_BUDGET = 2.0, 6.0
"""Queries per minute of a controller whose jobs do not change, and of one with a hundred running runs."""


def waiting_for(path: Path) -> str:
    """Return the command of a run that ends once a file exists."""
    return f"command=['/bin/sh', '-c', 'while [ ! -e {path} ]; do sleep 1; done']"


@pytest.fixture
def clients(lab: SlurmLab, tmp_path: Path) -> CountedClients:
    return CountedClients(tmp_path / "clients", lab.environment()["PATH"])


@pytest.fixture
def user(lab: SlurmLab, agents: WarmAgents, tmp_path: Path, clients: CountedClients) -> Iterator[User]:
    environment = {**lab.environment(), "PATH": clients.path, **warm_environment(agents)}
    someone = User(tmp_path, "slurm", environment)
    yield someone
    someone.leave()
    lab.ask("scancel", "--me")
    someone.until(lambda: not lab.ask("squeue", "-h", "--me").stdout.strip(), 60, "an empty queue")


def run_until(user: User, path: Path) -> str:
    run = str(user.submit("torchrun-script", waiting_for(path), *SHAPE)["run"])
    user.until(lambda: user.status(run)["state"] == "RUNNING", 90, "a running run")
    return run


def test_a_run_ends_at_once_though_slurm_is_asked_rarely(user: User, clients: CountedClients) -> None:
    done = user.folder / "done"
    run = run_until(user, done)
    time.sleep(8)  # nothing can be waited for: the controller stops asking
    quiet = time.time()
    time.sleep(10)
    assert len(clients.queries(quiet)) <= 1
    assert clients.calls(quiet) == clients.queries(quiet)
    done.touch()
    ended = time.monotonic()
    assert user.wait(run) == 0
    assert time.monotonic() - ended < 20
    asked = [call.arguments for call in clients.calls() if call.name == "squeue" and "NodeList" in call.arguments]
    assert asked
    assert all(" -j " in arguments for arguments in asked), "long rows are for known jobs only"


@pytest.mark.proof
@pytest.mark.parametrize(("runs", "budget"), [(1, IDLE_BUDGET), (10, BUSY_BUDGET)])
def test_the_budget_in_real_minutes(
    user: User, clients: CountedClients, runs: int, budget: float, record_property: Callable[[str, object], None]
) -> None:
    done = user.folder / "done"
    names = [run_until(user, done) for _ in range(runs)]
    time.sleep(30)
    since = time.time()
    time.sleep(240)
    rate = clients.rate(since)
    record_property(f"queries a minute with {runs} running", f"{rate:.1f}")
    assert rate <= budget, clients.queries(since)
    assert {call.name for call in clients.calls(since)} <= {"squeue", "scontrol"}
    done.touch()
    assert [user.wait(name) for name in names] == [0] * runs


SLOW_SACCT = "sleep 60"
ARRAY_TASKS = """S=$(printf '\\037')
case "$*" in *%A*) seq 900001 905000 | sed "s|.*|&${S}RUNNING${S}&${S}(null)${S}/home/ann/eval.sh${S}eval${S}|" ;; esac
"""
"""Five thousand running array tasks of the same user in each search of the queue."""
LONGEST_PASS = 30.0


class PassTimes(threading.Thread):
    """The longest time between two passes of a user's controller, sampled until `stop`."""

    def __init__(self, registry: Path) -> None:
        super().__init__(daemon=True)
        self._registry, self._over = registry, threading.Event()
        self.longest = 0.0

    def run(self) -> None:
        while not self._over.wait(0.5):
            ticks = [lease.ticked_at for lease in fast_queries.leases(self._registry) if lease.holder]
            self.longest = max([self.longest, *(time.time() - tick for tick in ticks if tick)])

    def stop(self) -> float:
        self._over.set()
        self.join()
        return self.longest


@pytest.fixture
def overloaded(clients: CountedClients) -> None:
    clients.before("sacct", SLOW_SACCT)
    clients.before("squeue", ARRAY_TASKS)


@pytest.mark.usefixtures("overloaded")
def test_a_run_beside_5000_array_tasks_and_slow_accounting(lab: SlurmLab, user: User, clients: CountedClients) -> None:
    array = ["sbatch", "--parsable", "--hold", "--array=1-1000", "-o", "/dev/null", "--wrap", "sleep 9"]
    assert lab.ask(*array).returncode == 0
    done = user.folder / "done"
    run = run_until(user, done)
    passes = PassTimes(user.folder / "home" / "registry.db")
    passes.start()
    done.touch()
    assert user.wait(run, timeout=60) == 0
    assert passes.stop() < LONGEST_PASS
    listed = [call.arguments for call in clients.calls() if call.name == "squeue"]
    assert not [arguments for arguments in listed if "900001" in arguments], "long rows of array tasks"


@pytest.mark.proof
@pytest.mark.usefixtures("overloaded")
def test_a_job_that_left_the_queue_delays_no_other_run(lab: SlurmLab, user: User, clients: CountedClients) -> None:
    done = user.folder / "done"
    done.touch()
    blocker = lab.ask("sbatch", "--parsable", "-N", "4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600")
    gone = user.submit("torchrun-script", waiting_for(done), *SHAPE)
    user.kill_controller()
    lab.ask("scancel", gone["job_id"], blocker.stdout.strip())
    user.until(lambda: lab.ask("squeue", "-h", "-j", gone["job_id"]).returncode, 180, "a purged job")
    other = user.submit("torchrun-script", waiting_for(done), *SHAPE)["run"]
    passes = PassTimes(user.folder / "home" / "registry.db")
    passes.start()
    began = time.monotonic()
    assert user.wait(other, timeout=55) == 0
    assert time.monotonic() - began < 55, "before accounting has answered"
    assert user.status(gone["run"])["state"] == "QUEUED"
    user.until(lambda: "cancelled, not by orch" in str(user.status(gone["run"])["reason"]), 150, "accounting's answer")
    assert passes.stop() < LONGEST_PASS
    assert len([call for call in clients.calls() if call.name == "sacct"]) <= 3
