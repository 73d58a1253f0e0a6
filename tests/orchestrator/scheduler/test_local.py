"""Local jobs whose processes die at various moments, and their reported states."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.errors import ConfigError, Precondition, SlurmUnreachable, SubmitRejected
from orchestrator.scheduler.interface import UNREADABLE, JobSpec, JobStatus, Resources
from orchestrator.scheduler.job_environment import Submitter
from orchestrator.scheduler.local import local_scheduler
from orchestrator.scheduler.local.local_scheduler import LocalScheduler
from tests.checkpointing.proofs.mounts import fill, small_tmpfs
from tests.orchestrator.scheduler.contract import PATIENCE_S, World, eventually, local_world
from trainer.protocol.node_identity import discover


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with local_world(tmp_path, tmp_path / "index") as made:
        yield made


def running(world: World) -> tuple[JobSpec, JobStatus]:
    spec = world.spec()
    job = world.submit(spec)
    world.release(job, spec)
    world.until_running(job, spec)
    return spec, job


@dataclass
class Running:
    """A job that runs until the end of these tests, which only inspect it."""

    world: World
    spec: JobSpec
    job: JobStatus


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("job")
    with local_world(folder, folder / "index") as world, pytest.MonkeyPatch.context() as patch:
        world.resources = Resources(nodes=2, gpus_per_node=1, time="5")
        patch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
        patch.delenv("VIRTUAL_ENV", raising=False)
        patch.setenv("CONDA_PREFIX", "/opt/of-the-submitter")
        patch.setenv("CLOUD_SECRET_KEY", "hunter2")
        patch.setenv("SLURM_JOB_ID", "77")
        spec = replace(world.spec(), submitter=Submitter.from_environ(os.environ))
        patch.setenv("CONDA_PREFIX", "/opt/of-the-controller")
        patch.setenv("VIRTUAL_ENV", "/opt/of-the-controller")
        job = world.submit(spec)
        world.release(job, spec)
        world.until_running(job, spec)
        yield Running(world, spec, job)


def facts(spec: JobSpec, node: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((spec.run_dir / f"started-{node}.json").read_text())
    return found


def test_session_and_environment_of_a_task(
    looked_at: Running,
) -> None:
    environ, task = (facts(looked_at.spec, 1)[name] for name in ("environ", "pid"))
    assert isinstance(environ, dict)
    assert isinstance(task, int)
    place, job = discover(environ), looked_at.job
    assert (place.job_id, place.node, place.nodes, place.name) == (job.job_id, 1, 2, "local-1")
    assert os.getsid(task) == int(job.job_id.partition("-")[0]) != os.getsid(0)
    assert environ["CONDA_PREFIX"] == "/opt/of-the-submitter"
    assert "VIRTUAL_ENV" not in environ
    assert "CLOUD_SECRET_KEY" not in environ
    assert "SLURM_JOB_ID" not in environ
    assert environ["HOME"] == os.environ["HOME"]
    seen = [facts(looked_at.spec, node)["environ"] for node in (0, 1)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in seen if isinstance(one, dict)] == ["4", "6"]


def test_a_record_that_cannot_be_read_hides_its_own_job_only(world: World) -> None:
    bad, good = world.spec(), world.spec()
    broken, job = world.submit(bad), world.submit(good)
    record = bad.submission / "local-job.json"
    kept = record.read_text()
    for text in ("{", '{"pid": 1}', "[]"):
        record.write_text(text)
        seen = world.scheduler.poll([broken.job_id, job.job_id])
        assert {name: status.state for name, status in seen.items()} == {job.job_id: "PENDING", bad.name: UNREADABLE}
        found = {status.name: status.state for status in world.scheduler.find("orch-")}
        assert found == {good.name: "PENDING", bad.name: UNREADABLE}
        with pytest.raises(SlurmUnreachable):
            world.scheduler.find(bad.name)
    world.scheduler.cancel(job.job_id)
    assert world.until_ended(job) == "CANCELLED"
    world.submit(world.spec())
    record.write_text(kept)
    assert world.scheduler.poll([broken.job_id])[broken.job_id].state == "PENDING"


def submit_and_die(world: World, spec: JobSpec) -> None:
    """Submit in a fork that is killed right after it has started the job's process."""

    def killed(command: list[str], *, timeout: float, check: bool, capture_output: bool, text: bool, errors: str,
               **more: Any) -> None:  # fmt: skip
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **more)
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        local_scheduler.subprocess.run = killed  # type: ignore[assignment]
        world.scheduler.submit(spec)
    finally:
        os._exit(1)


def test_a_job_outlives_its_killed_submitter(world: World) -> None:
    world.resources = Resources(nodes=1, time="5")
    spec = world.spec()
    if (submitter := os.fork()) == 0:
        submit_and_die(world, spec)
    assert os.waitstatus_to_exitcode(os.waitpid(submitter, 0)[1]) == -signal.SIGKILL
    eventually(lambda: bool(world.scheduler.find(spec.name)), "its process has recorded itself")
    (job,) = world.scheduler.find(spec.name)
    assert job.held
    world.release(job, spec)
    world.until_running(job, spec)


def test_a_submitter_killed_before_the_spawn_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(local_scheduler, "_start", die)
    spec = world.spec()
    with pytest.raises(Killed):
        world.scheduler.submit(spec)
    assert [intent.name for intent in local_scheduler.intents(tmp_path / "index")] == [spec.name]
    assert world.scheduler.find(spec.name) == []


def test_a_task_that_fails_fails_the_job_with_its_code(world: World, tmp_path: Path) -> None:
    world.scheduler = LocalScheduler(entry="tests.slurm.payload:fail", index=tmp_path / "index")
    spec = world.spec()
    (spec.run_dir / "code").write_text("76")
    job = world.submit(spec)
    world.release(job, spec)
    assert world.until_ended(job) == "FAILED"
    ended = world.scheduler.poll([job.job_id])[job.job_id]
    assert (ended.exit_code, ended.signal, ended.nodes) == (76, None, ("local-0", "local-1"))


def test_one_task_ends_and_the_others_go_on(world: World) -> None:
    spec, job = running(world)
    task = facts(spec, 0)["pid"]
    assert isinstance(task, int)
    os.kill(task, signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(task) or psutil.Process(task).status() == "zombie", "the task is dead")
    assert world.state(job) == "RUNNING"
    (spec.run_dir / "stop").touch()
    assert world.until_ended(job) == "FAILED"
    assert world.scheduler.poll([job.job_id])[job.job_id].signal == signal.SIGKILL


def holder_of(job: JobStatus) -> int:
    return int(job.job_id.partition("-")[0])


def kill_holder(job: JobStatus) -> None:
    holder = holder_of(job)
    os.kill(holder, signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(holder) or psutil.Process(holder).status() == "zombie", "it is dead")


def test_a_job_with_a_killed_holder_runs_while_a_task_lives(world: World) -> None:
    world.resources = Resources(nodes=1, time="5")
    spec, job = running(world)
    kill_holder(job)
    assert world.state(job) == "RUNNING"
    (spec.run_dir / "stop").touch()
    assert world.until_ended(job) == "FAILED"
    assert "was killed" in world.scheduler.poll([job.job_id])[job.job_id].reason


def test_cancel_reaches_the_tasks_of_a_killed_holder(world: World) -> None:
    world.resources = Resources(nodes=1, time="5")
    spec, job = running(world)
    assert facts(spec, 0)["environ"]["CUDA_VISIBLE_DEVICES"] == ""  # type: ignore[index]
    kill_holder(job)
    host = local_scheduler.read_job_process(spec.submission)
    assert host is not None
    assert host.space
    for written in (replace(host, space=""), host):
        local_scheduler.write_job_process(spec.submission, written)
        assert world.state(job) == "RUNNING"
    local_scheduler.write_job_process(spec.submission, replace(host, space=""))
    world.scheduler.cancel(job.job_id)
    assert local_scheduler.marked_processes(spec.name) == []
    for written in (replace(host, space=""), host):
        local_scheduler.write_job_process(spec.submission, written)
        assert world.state(job) == "FAILED"


def test_after_a_restart_of_the_machine_its_jobs_are_gone(looked_at: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    world, job = looked_at.world, looked_at.job
    monkeypatch.setattr(local_scheduler, "boot_id", lambda: "another")
    monkeypatch.setattr(local_scheduler, "boot_time", lambda: time.time() + 1.0)
    assert world.state(job) == "NODE_FAIL"
    world.scheduler.cancel(job.job_id)
    left = local_scheduler.marked_processes(looked_at.spec.name)
    assert len(left) >= 2, "a process that only has the same pid must not be hit"


def elsewhere(monkeypatch: pytest.MonkeyPatch, machine: bool) -> None:
    """Make later look-ups run as in another container, or on another machine of the same name."""
    monkeypatch.setattr(local_scheduler, "is_visible", lambda space: False)
    monkeypatch.setattr(local_scheduler, "marked_processes", lambda name: [])
    if machine:
        monkeypatch.setattr(local_scheduler, "boot_id", lambda: "another")


def test_an_invisible_job_is_judged_by_its_heartbeat(looked_at: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    world, spec, job = looked_at.world, looked_at.spec, looked_at.job
    beat = spec.submission.parent / "heartbeat.json"
    beat.write_text("{}")
    for machine in (False, True):
        with monkeypatch.context() as patch:
            elsewhere(patch, machine)
            assert world.state(job) == "RUNNING"
            patch.setattr(local_scheduler, "_SILENT_S", 0.0)
            assert world.scheduler.poll([job.job_id]) == {}
            assert world.scheduler.find(spec.name) == []
            world.scheduler.cancel(job.job_id)
        assert world.state(job) == "RUNNING"


def test_jobs_of_another_host_are_kept(looked_at: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    world, job = looked_at.world, looked_at.job
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "elsewhere")
        assert world.scheduler.find("orch-") == []
        assert world.scheduler.poll([job.job_id]) == {}
        world.scheduler.cancel(job.job_id)
        local_scheduler.forget_old(world.folder / "index", 1e12)
    assert world.scheduler.poll([job.job_id])[job.job_id].state == "RUNNING"


def test_the_time_limit_ends_it_after_a_warning(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world.resources = Resources(nodes=1, time="5")
    spec = world.spec()
    write = local_scheduler.write_intent
    monkeypatch.setattr(
        local_scheduler, "write_intent", lambda index, intent: write(index, replace(intent, limit_s=60, signal_lead=4))
    )
    world.scheduler = LocalScheduler(entry="tests.slurm.payload:note_warning", index=tmp_path / "index")
    job = world.submit(spec)
    holder = os.pidfd_open(holder_of(job))
    world.release(job, spec)
    select.select([holder], [], [], PATIENCE_S)  # to ask all the time costs more than the job
    os.close(holder)
    assert world.until_ended(job) == "TIMEOUT"
    assert [path.name for path in spec.run_dir.glob("warned-*")] == ["warned-0"]


def test_a_cancel_while_the_job_is_prepared_is_no_failure(world: World, tmp_path: Path) -> None:
    world.scheduler = LocalScheduler(entry="tests.orchestrator.scheduler.signalled_entry:record", index=tmp_path / "i")
    spec = world.spec()
    job = world.submit(spec)
    assert world.until_ended(job) == "CANCELLED"
    assert world.started(spec) == 0


def test_srun_arguments_have_no_place_here(world: World) -> None:
    spec = replace(world.spec(), templates=("pyxis",), template_args={"image": "x.sqsh"})
    with pytest.raises(ConfigError, match="need srun"):
        world.scheduler.submit(spec)


def test_more_gpus_than_there_are_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    world.resources = Resources(nodes=2, gpus_per_node=2, time="5")
    with pytest.raises(SubmitRejected, match=r"more than this machine.s 2 GPUs"):
        world.scheduler.submit(world.spec())


def test_why_a_job_cannot_start(world: World, tmp_path: Path) -> None:
    world.scheduler = LocalScheduler(entry="no.such.module:here", index=tmp_path / "index")
    with pytest.raises(SubmitRejected, match="No module named 'no'"):
        world.scheduler.submit(world.spec())


def test_an_end_is_known_elsewhere_and_entries_of_jobs_long_ended_are_dropped(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = world.spec()
    job = world.submit(spec)
    assert world.submit(spec).job_id == job.job_id, "a second submission under the same name is the same job"
    world.scheduler.cancel(job.job_id)
    world.until_ended(job)
    for machine in (False, True):
        with monkeypatch.context() as patch:
            elsewhere(patch, machine)
            assert world.state(job) == "CANCELLED"
    end = local_scheduler.read_end(spec.submission)
    assert end is not None
    local_scheduler.forget_old(tmp_path / "index", end.ended_at + 86400)
    assert len(world.scheduler.find("orch-")) == 1
    local_scheduler.forget_old(tmp_path / "index", end.ended_at + 8 * 86400)
    assert world.scheduler.find("orch-") == []


@pytest.fixture
def small_world(tmp_path: Path) -> Iterator[World]:
    with small_tmpfs(tmp_path / "disk", "1m") as folder, local_world(folder, tmp_path / "index") as made:
        yield made


def test_a_job_on_a_full_disk(
    small_world: World,
) -> None:
    small_world.resources = Resources(nodes=1, time="5")
    spec = small_world.spec()
    filler = fill(small_world.folder)
    with pytest.raises(Precondition) as refused:
        small_world.scheduler.submit(spec)
    assert refused.value.what == f"storage: the local job cannot be started: disk full ({spec.submission})"
    assert isinstance(refused.value.__cause__, OSError), "by its cause it is known to pass"
    assert small_world.scheduler.find(spec.name) == []
    filler.unlink()
    job = small_world.submit(spec)
    small_world.release(job, spec)
    small_world.until_running(job, spec)
    fill(small_world.folder)
    small_world.scheduler.cancel(job.job_id)
    assert small_world.until_ended(job) == "CANCELLED"
    assert local_scheduler.read_end(spec.submission) is not None
