"""The Slurm scheduler on a real Slurm, with outages."""

import json
import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from orchestrator.config.run_config import ClusterConfig, RunConfig
from orchestrator.controller.submission_limits import PartitionSizes
from orchestrator.errors import SlurmUnreachable, SubmitAmbiguous, SubmitRejected
from orchestrator.scheduler.interface import UNRECORDED, Resources
from orchestrator.scheduler.slurm.accounting import query_accounting
from orchestrator.scheduler.slurm.command_output import read_version, run_command
from orchestrator.scheduler.slurm.node_capacity import usable_nodes
from orchestrator.scheduler.slurm.slurm_scheduler import SlurmScheduler
from tests.orchestrator.scheduler.contract import SchedulerContract, World, eventually
from tests.slurm.lab import SlurmLab

pytestmark = pytest.mark.slurm


class TestSlurm(SchedulerContract):
    """The contract suite on the real Slurm."""


def test_environment_folder_and_independent_tasks_of_a_job(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUD_SECRET_KEY", "hunter2")
    monkeypatch.setenv("SBATCH_COMMENT", "not this one")
    monkeypatch.setenv("SLURM_NTASKS", "7")
    spec = world.spec()
    job = world.submit(spec)
    assert job.comment == spec.comment
    world.release(job, spec)
    world.until_running(job, spec)
    facts = json.loads((spec.run_dir / "started-1.json").read_text())
    assert facts["cwd"] == str(spec.run_dir)
    assert "CLOUD_SECRET_KEY" not in facts["environ"]
    assert facts["environ"]["SLURM_NTASKS"] == "2"
    assert facts["environ"]["SLURM_CPUS_PER_TASK"] == "1"
    assert "SLURM_RESTART_COUNT" not in facts["environ"]

    os.kill(facts["pid"], signal.SIGKILL)
    time.sleep(2)  # nothing can be waited for: it must not happen
    assert world.state(job) == "RUNNING"
    (spec.run_dir / "stop").touch()
    assert world.until_ended(job) == "FAILED"
    assert world.scheduler.poll([job.job_id])[job.job_id].exit_code == 137


def test_a_drained_node_is_out_of_service_until_it_is_resumed(world: World, lab: SlurmLab) -> None:
    asked, four, nobody = frozenset({"n3", "n4"}), Resources(nodes=4), frozenset[str]()
    assert world.scheduler.out_of_service(asked) == frozenset()
    assert usable_nodes(four, nobody) == 4
    assert PartitionSizes()(RunConfig(cluster=ClusterConfig(partition="high"))) == 4
    assert PartitionSizes()(RunConfig()) == 4
    lab.ask("scontrol", "update", "nodename=n4", "state=drain", "reason=fan")
    try:
        assert world.scheduler.out_of_service(asked) == {"n4"}
        assert usable_nodes(four, nobody) == 3
        assert usable_nodes(four, frozenset({"n1", "n4"})) == 2
    finally:
        lab.ask("scontrol", "update", "nodename=n4", "state=resume")
    assert world.scheduler.out_of_service(asked) == frozenset()


def test_job_log_below_a_shared_folder(world: World) -> None:
    shared = world.folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    spec = replace(world, folder=shared).spec()
    job = world.submit(spec)
    world.release(job, spec)
    world.until_running(job, spec)
    assert json.loads((spec.run_dir / "started-0.json").read_text())["cwd"] == str(spec.run_dir)
    logs = {path.name: path.read_text() for path in spec.submission.glob("*_log.*")}
    assert set(logs) == {f"{job.job_id}_{node}_log.{kind}" for node in (0, 1) for kind in ("out", "err")}
    assert world.scheduler.poll([job.job_id])[job.job_id].name == spec.name

    (spec.run_dir / "stop").touch()
    world.until_ended(job)

    version = read_version(run_command(["scontrol", "--version"], 30.0).stdout)

    def recorded() -> bool:
        rows = query_accounting([job.job_id], version=version)
        return [(row.state, row.name) for row in rows] == [("COMPLETED", spec.name)]

    eventually(recorded, "accounting has it")
    (row,) = query_accounting([job.job_id], version=version)
    queued = world.scheduler.poll([job.job_id])[job.job_id]
    # Accounting is asked for jobs that have ended, of which nobody needs the start or the first node.
    same = {"reason": queued.reason, "start_time": queued.start_time, "batch_node": queued.batch_node}
    assert replace(row, source="queue", **same) == queued


def test_an_ambiguous_submit_is_adopted_and_may_be_requeued(lab: SlurmLab, world: World) -> None:
    spec = world.spec()
    lab.pause_controller()
    try:
        with pytest.raises(SubmitAmbiguous, match="may exist anyway"):
            world.scheduler.submit(spec)
    finally:
        lab.resume_controller()
    eventually(lambda: len(world.scheduler.find(spec.name)) == 1, "the job turns up")
    (job,) = world.scheduler.find(spec.name)
    assert job.held
    assert not list(spec.submission.glob("*_submitted.pkl"))
    world.release(job, spec)
    world.until_running(job, spec)

    lab.ask("scontrol", "update", f"jobid={job.job_id}", "requeue=1")
    lab.ask("scontrol", "requeue", job.job_id)
    eventually(lambda: world.state(job) == "PENDING", "it waits again", 60)
    (again,) = world.scheduler.find(spec.name)
    assert (again.job_id, again.restarts) == (job.job_id, 1)
    assert again.submit_time > job.submit_time

    def closed() -> bool:
        rows = lab.ask("sacct", "-X", "-D", "-n", "-j", job.job_id, "-o", "State").stdout.split()
        return "REQUEUED" in rows

    eventually(closed, "accounting has closed its first incarnation", 90)
    world.scheduler.cancel(job.job_id)
    assert world.until_ended(job) == "CANCELLED"
    assert [found.state for found in world.scheduler.find(spec.name)] == ["CANCELLED"]


def test_silent_controller_and_dead_node(lab: SlurmLab, world: World) -> None:
    spec = world.spec()
    job = world.submit(spec)
    time.sleep(6)  # slurmctld saves its state at most every 5 s: before that a kill loses the job for good
    lab.kill_controller()
    try:
        questions = (
            lambda: world.scheduler.find(spec.name),
            lambda: world.scheduler.poll([job.job_id]),
            lambda: world.release(job, spec),
            lambda: world.scheduler.cancel(job.job_id),
            lambda: world.scheduler.submit(world.spec()),
        )
        for silent in _errors(questions):
            assert isinstance(silent, SlurmUnreachable)
    finally:
        lab.start_controller()
    assert world.state(job) == "PENDING"
    world.release(job, spec)
    world.until_running(job, spec)

    nodes = world.scheduler.poll([job.job_id])[job.job_id].nodes
    lab.kill_node(nodes[1])
    try:
        eventually(lambda: world.state(job) not in ("RUNNING", "COMPLETING"), "Slurm has noticed", 60)
        ended = world.scheduler.poll([job.job_id])[job.job_id]
        assert (ended.state, ended.nodes, ended.restarts) == ("NODE_FAIL", nodes, 0)
        assert ended.name == spec.name
    finally:
        lab.start_node(nodes[1])


def _errors(questions: tuple[object, ...]) -> list[object]:
    """Ask in parallel, because each timeout takes long; return the errors or answers."""
    said: list[object] = [None] * len(questions)

    def ask(index: int, question: object) -> None:
        try:
            said[index] = question()  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001  whatever it is, the test judges it
            said[index] = error

    threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(questions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    return said


def test_without_accounting_the_queue_answers_for_what_it_knows(lab: SlurmLab, world: World) -> None:
    spec = world.spec()
    job = world.submit(spec)
    lab.stop_accounting()
    try:
        assert world.state(job) == "PENDING"
        assert [found.job_id for found in world.scheduler.find(spec.name)] == [job.job_id]
        assert world.scheduler.poll(["99999999"])["99999999"].state == UNRECORDED
        assert world.scheduler.find("orch-nobody") == []
    finally:
        lab.start_accounting()
    assert SlurmScheduler().poll(["99999999"]) == {}, "another scheduler has no pause to keep"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"partition": "nonesuch"}, "partition"),
        ({"constraint": "h100"}, "feature"),
        ({"sbatch": {"reservation": "nonesuch"}}, "reservation"),
        ({"sbatch": {"no-such-option": "1"}}, "unrecognized option"),
    ],
)
def test_a_definite_no_is_a_rejection_in_slurms_words(world: World, change: dict[str, object], words: str) -> None:
    spec = replace(world.spec(), resources=replace(Resources(nodes=1), **change))  # type: ignore[arg-type]
    with pytest.raises(SubmitRejected, match=words):
        world.scheduler.submit(spec)
    assert world.scheduler.find(spec.name) == []


def test_an_impossible_job_waits_with_slurms_reason(world: World) -> None:
    world.resources = Resources(nodes=99, time="5")
    spec = world.spec()
    job = world.submit(spec)
    world.release(job, spec)
    world.release(job, spec)
    waiting = world.scheduler.poll([job.job_id])[job.job_id]
    assert (waiting.state, waiting.held, waiting.reason) == ("PENDING", False, "PartitionConfig")


def test_a_job_that_slurm_holds_itself_is_no_silence(world: World) -> None:
    world.resources = Resources(nodes=2, time="5", exclude=("n1", "n2", "n3"))
    spec = world.spec()
    job = world.submit(spec)
    world.release(job, spec)
    eventually(lambda: world.scheduler.poll([job.job_id])[job.job_id].reason == "BadConstraints", "a reason", 30)
    assert world.scheduler.poll([job.job_id])[job.job_id].held
    world.release(job, spec)


def test_a_job_that_waits_is_kept_off_other_nodes_and_one_that_runs_is_not(lab: SlurmLab, world: World) -> None:
    def avoids(job_id: str) -> str:
        shown = lab.ask("scontrol", "show", "job", job_id).stdout
        return shown.partition("ExcNodeList=")[2].split()[0]

    # Slurm holds a job that no set of nodes could ever run, so this one waits for nodes that are busy.
    busy = ("-w", "n3,n4", "-N", "2", "--exclusive", "--parsable", "-o", "/dev/null", "--wrap", "sleep 600")
    blocker = lab.ask("sbatch", *busy).stdout.strip()
    eventually(lambda: lab.ask("squeue", "-h", "-j", blocker, "-o", "%T").stdout.strip() == "RUNNING", "it runs")
    two = ("n1", "n2")
    free = world.spec()
    spec = replace(free, resources=replace(free.resources, nodes=2, exclude=two, avoided=two))
    job = world.submit(spec)
    world.release(job, spec)
    assert avoids(job.job_id) == "n[1-2]"
    eventually(lambda: not world.scheduler.poll([job.job_id])[job.job_id].held, "Slurm has released it")
    world.scheduler.release(job.job_id, spec.submission, ("n2", "n3"))
    assert avoids(job.job_id) == "n[2-3]"
    world.scheduler.release(job.job_id, spec.submission, ())
    assert avoids(job.job_id) == "(null)"
    world.until_running(job, spec)
    with pytest.raises(SubmitRejected, match=f"nodes that job {job.job_id} avoids: Job is no longer pending"):
        world.scheduler.release(job.job_id, spec.submission, ("n1",))


def test_strange_but_allowed_values_reach_slurm_unchanged(lab: SlurmLab, world: World) -> None:
    more = {"nice": 7, "mail-type": "TIME_LIMIT_90"}
    value = "a b,c;d|e&f=(g)[h]!*~^%i@j+k"
    spec = replace(world.spec(), resources=Resources(nodes=1, time="5", sbatch={"mail-user": value, **more}))
    job = world.submit(spec)
    shown = lab.ask("scontrol", "show", "job", job.job_id).stdout
    assert f"MailUser={value} " in shown.replace("\n", " ")
    assert "Nice=7" in shown


def test_times_and_identity_do_not_depend_on_the_shell(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = world.spec()
    job = world.submit(spec)
    monkeypatch.setenv("TZ", "America/New_York")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "%c")
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    assert world.scheduler.poll([job.job_id])[job.job_id].submit_time == job.submit_time
