"""What Slurm says of nodes: which of a job's are down, and which get no jobs for now."""

from pathlib import Path

import pytest

from orchestrator.config.run_config import ClusterConfig, RunConfig
from orchestrator.controller.submission_limits import PartitionSizes
from orchestrator.errors import SlurmUnreachable
from orchestrator.scheduler.available_schedulers import FACTORIES
from orchestrator.scheduler.interface import UNREADABLE, Resources
from orchestrator.scheduler.slurm.node_capacity import usable_nodes
from orchestrator.scheduler.slurm.slurm_scheduler import SlurmScheduler
from tests.orchestrator.scheduler.conftest import Program, printing
from tests.orchestrator.scheduler.test_slurm_text import queue


def test_a_job_that_is_over_says_which_of_its_nodes_are_down(program: Program, tmp_path: Path) -> None:
    program("squeue", printing(tmp_path, "queue", queue(JobID="7", State="FAILED", NodeList="n[1-3]")))
    program("sacct", "true")
    program("sinfo", r"printf 'n1 idle\nn2 down*\nn3 idle*\n'")
    assert SlurmScheduler().poll(["7"])["7"].nodes_down == ("n2",)


def test_nodes_that_get_no_jobs_for_now(program: Program) -> None:
    states = ["idle", "down*", "drained", "draining*", "maint", "mixed", "idle*", "reboot", "fail"]
    names = [f"n{number}" for number in range(len(states))]
    program("sinfo", "; ".join(f"echo {one} {state!r}" for one, state in zip(names, states, strict=True)))
    assert SlurmScheduler().out_of_service(frozenset(names)) == {"n1", "n2", "n3", "n4", "n7", "n8"}
    program("sinfo", "exit 1")
    with pytest.raises(SlurmUnreachable):
        SlurmScheduler().out_of_service(frozenset(names))


@pytest.mark.parametrize("state", ["drained$", "down$", "down@", "draining^", "drained~", "inval", "inval*", "maint*"])
def test_what_slurm_marks_beside_a_state_puts_no_node_back_into_service(program: Program, state: str) -> None:
    program("sinfo", f"echo n1 '{state}'")
    assert SlurmScheduler().out_of_service(frozenset({"n1"})) == {"n1"}


@pytest.mark.parametrize("state", ["idle~", "idle#", "allocated+", "mixed-", "allocated$", "allocated@"])
def test_a_node_that_saves_power_or_has_jobs_is_in_service(program: Program, state: str) -> None:
    program("sinfo", f"echo n1 '{state}'")
    assert SlurmScheduler().out_of_service(frozenset({"n1"})) == frozenset()


def test_a_node_that_is_down_in_a_maintenance_reservation_is_down(program: Program, tmp_path: Path) -> None:
    program("squeue", printing(tmp_path, "queue", queue(JobID="7", State="FAILED", NodeList="n1")))
    program("sacct", "true")
    program("sinfo", "echo 'n1 down$'")
    assert SlurmScheduler().poll(["7"])["7"].nodes_down == ("n1",)


def test_silence_about_one_job_s_nodes_hides_no_other_job(program: Program, tmp_path: Path) -> None:
    rows = queue(JobID="7", State="FAILED", NodeList="n1") + queue(JobID="8")
    program("squeue", printing(tmp_path, "queue", rows))
    program("sinfo", "exit 1")
    assert {key: job.state for key, job in SlurmScheduler().poll(["7", "8"]).items()} == {
        "7": UNREADABLE,
        "8": "RUNNING",
    }


def test_a_warning_among_the_nodes_hides_none(program: Program, tmp_path: Path) -> None:
    program("squeue", printing(tmp_path, "queue", queue(JobID="7", State="FAILED", NodeList="n[1-2]")))
    program("sinfo", r"printf 'sinfo: warning: slow today\nn1 idle\nn2 down*\n'")
    assert SlurmScheduler().poll(["7"])["7"].nodes_down == ("n2",)


def test_nodes_of_hidden_partitions_are_seen_whatever_the_shell_asks_of_sinfo(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without -a, sinfo leaves hidden partitions out; with -p, it refuses -a; SINFO_PARTITION leaves out the others."""
    monkeypatch.setenv("SINFO_PARTITION", "debug")
    hidden = 'test -z "$SINFO_PARTITION" || exit 0; case " $* " in *" -p "*) exit 1 ;; *" -a "*) {} ;; esac'
    program("sinfo", hidden.format("echo n1 drained"))
    assert SlurmScheduler().out_of_service(frozenset({"n1"})) == {"n1"}
    program("sinfo", hidden.format("echo 4 secret"))
    assert PartitionSizes()(RunConfig(cluster=ClusterConfig(partition="secret"))) == 4
    program("sinfo", hidden.format("echo n1"))
    factory = FACTORIES["slurm"]
    assert factory.has_node is not None
    assert factory.has_node("n1")
    program("sinfo", hidden.format("echo 'n1|secret|8|4000|(null)|idle'"))
    assert usable_nodes(Resources(nodes=1, partition="secret"), frozenset()) == 1


@pytest.mark.parametrize("sinfo", ["exit 1", "echo nonsense of three words"])
def test_silence_about_nodes_is_no_answer(program: Program, tmp_path: Path, sinfo: str) -> None:
    program("squeue", printing(tmp_path, "queue", queue(JobID="7", State="FAILED", NodeList="n1")))
    program("sacct", "true")
    program("sinfo", sinfo)
    with pytest.raises(SlurmUnreachable):
        SlurmScheduler().poll(["7"])
