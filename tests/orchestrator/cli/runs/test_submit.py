"""`orch submit`: what it answers, what it leaves behind, and that a dry run leaves nothing."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cli.runs import submit as submitting
from orchestrator.registry.store import Store
from orchestrator.states import AttemptState, RunState
from tests.fakes.slurm_commands import refusing, write_commands
from tests.orchestrator.cli.conftest import Patch, Type, Typed


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question\n" * 200)
    return f"data.text=[{path}]"


@pytest.fixture
def service(home: Path, monkeypatch: Patch) -> SimpleNamespace:
    import orchestrator.controller

    def launch(store: Store, run: Any, epoch: int) -> None:
        stamp = {"epoch": epoch, "now": time.time()}
        store.move_attempt(run.name, 1, AttemptState.SUBMITTED, "queued", **stamp, job_id="41", job_state="PENDING")
        store.move_run(run.name, RunState.QUEUED, "job 41 is queued", **stamp)

    fake = SimpleNamespace(knocks=[], act=launch, silent=())

    def drive(path: Path) -> object:
        with Store.open(path) as store:
            lease = store.take_lease("me:1:1", time.time(), 60.0)
            assert lease is not None
            for run in store.runs([RunState.CREATED]):
                fake.act(store, run, lease.epoch)
            store.drop_lease(lease)
        return SimpleNamespace(unreachable=fake.silent)

    fake.ensure_running = lambda path, kind: (fake.knocks.append("ensure_running"), drive(path))
    fake.tick_once = lambda path, kind, **_: (fake.knocks.append("tick_once"), drive(path))[1]
    monkeypatch.setattr(orchestrator.controller, "service", fake, raising=False)
    monkeypatch.setitem(sys.modules, "orchestrator.controller.service", fake)
    return fake


Submit, Service = Callable[..., Typed], SimpleNamespace


@pytest.fixture
def submit(orch: Type, service: Service, tmp_path: Path, text: str) -> Submit:
    return lambda *more: orch(
        "submit", "tiny-gpt", f"cluster.root={tmp_path / 'runs'}", "--cluster", "local", text, *more
    )


def test_json_shape(orch: Type, submit: Submit, service: Service, tmp_path: Path) -> None:
    done = submit("--name", "mine", "-t", "b", "-t", "a", "--json")
    assert done.code == 0, done.err
    assert done.answer["schema"] == "orch.submit/1"
    data = done.data
    assert list(data) == ["run", "attempt", "job_id", "cluster", "run_dir", "config_digest", "tags", "after"]
    digest = data.pop("config_digest")
    assert len(digest) == 64
    assert data == {
        "run": "mine-1", "attempt": 1, "job_id": "41", "cluster": "local", "run_dir": str(tmp_path / "runs" / "mine-1"),
        "tags": ["a", "b"], "after": None,
    }  # fmt: skip
    assert orch("status", "mine-1", "--json").data[0]["tags"] == ["a", "b"]
    assert service.knocks == ["ensure_running"]
    assert orch("config", "diff", "mine-1", digest, "--json").data == []


def test_next_commands(orch: Type, submit: Submit, service: Service) -> None:
    done = submit("--no-controller")
    assert done.out.startswith("tiny-gpt-1 submitted (local, job 41, config ")
    for command in ("orch status tiny-gpt-1", "orch logs tiny-gpt-1 -f", "orch cancel tiny-gpt-1"):
        assert command in done.err
    assert service.knocks == ["tick_once"]


def test_late_job(submit: Submit, service: Service, monkeypatch: Patch) -> None:
    def alive(path: Path, kind: str) -> None:
        with Store.open(path) as store:
            assert store.take_lease("busy:1:1", time.time(), 60.0) is not None

    service.ensure_running = alive
    monkeypatch.setattr(submitting, "JOB_WITHIN", 0.0)
    done = submit("--json")
    assert done.code == 0
    assert done.data["job_id"] is None
    assert [item["code"] for item in done.answer["warnings"]] == ["no_job_yet"]


def test_stalled_controller(orch: Type, submit: Submit, service: Service, monkeypatch: Patch) -> None:
    def stalled(path: Path, kind: str) -> None:
        with Store.open(path) as store:
            if store.lease() is None:
                assert store.take_lease("login2:7:7", time.time() - 300.0, 60.0) is not None

    service.ensure_running = stalled
    monkeypatch.setattr(submitting, "JOB_WITHIN", 0.0)
    monkeypatch.setattr(submitting, "TAKEN_OVER_WITHIN", 0.3)
    done = submit()
    assert done.code == 4
    assert "tiny-gpt-1 is recorded, but no controller runs it: controller stalled for 30" in done.err
    assert "(pid 7 on login2)" in done.err
    assert "do not submit it again" in done.err
    assert [row["run"] for row in orch("status", "--json").data] == ["tiny-gpt-1"]
    shown = orch("status")
    assert "controller stalled for 30" in shown.err
    assert "`orch controller start` takes over" in shown.err
    assert [item["code"] for item in orch("status", "--json").answer["warnings"]] == ["controller_stalled"]


def test_controller_cannot_start(orch: Type, submit: Submit, service: Service) -> None:
    def full(path: Path, kind: str) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable", sys.executable)

    service.ensure_running = full
    done = submit()
    assert done.code == 4
    assert "tiny-gpt-1 is recorded, but no controller can be started: Resource temporarily" in done.err
    assert "do not submit it again; `orch controller start`" in done.err


def test_refused_job(orch: Type, submit: Submit, service: Service) -> None:
    def refuse(store: Store, run: Any, epoch: int) -> None:
        store.move_run(run.name, RunState.HELD, "Slurm refused: invalid partition", epoch=epoch, now=time.time())

    service.act = refuse
    done = submit()
    assert done.code == 8
    assert "invalid partition" in done.err
    assert "orch resume tiny-gpt-1" in done.err


def test_refused_by_slurm(orch: Type, submit: Submit, service: Service, tmp_path: Path, monkeypatch: Patch) -> None:
    said = "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified"
    monkeypatch.setenv("PATH", write_commands(tmp_path / "bin", refusing(said)))
    typed = ["--cluster", "slurm", "cluster.partition=nope"]
    done = submit(*typed)
    assert done.code == 4
    assert "Slurm refused the job: invalid partition specified: nope" in done.err
    assert "partitions here: low, high: type cluster.partition=low" in done.err
    assert orch("status", "--json").data == []
    assert service.knocks == []
    assert not (tmp_path / "runs").exists()
    (warned,) = submit(*typed, "--dry-run", "--json").answer["warnings"]
    assert warned["code"] == "slurm_refuses"
    assert "type cluster.partition=low" in warned["message"]


def test_exit_code_of_wait(submit: Submit, service: Service) -> None:
    launch = service.act

    def fail(store: Store, run: Any, epoch: int) -> None:
        launch(store, run, epoch)
        store.move_run(run.name, RunState.FAILED, "a bug", epoch=epoch, now=time.time())

    service.act = fail
    done = submit("--wait", "--json")
    assert done.code == 8
    assert (done.data["run"], done.data["state"], done.data["reason"]) == ("tiny-gpt-1", "FAILED", "a bug")
    assert submit("--follow").code == 8


def everything(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_dry_run(submit: Submit, service: Service, tmp_path: Path, kind: str) -> None:
    before = everything(tmp_path)
    typed = ["--cluster", kind, "--dry-run"]
    shown = submit(*typed)
    assert shown.code == 0, shown.err
    assert "train.steps = " in shown.out
    assert "# override" in shown.out
    assert ("#SBATCH --no-requeue" in shown.out) == (kind == "slurm")
    data = submit(*typed, "--json").data
    assert data["cluster"] == kind
    assert (data["sbatch"] or "").startswith("#!/bin/bash") == (kind == "slurm")
    assert data["origins"]["train.steps"]
    assert everything(tmp_path) == before
    assert service.knocks == []


def test_print_sbatch(submit: Submit) -> None:
    shown = submit("--cluster", "slurm", "--print-sbatch")
    assert shown.out.startswith("#!/bin/bash")
    assert "#SBATCH --hold" in shown.out
    assert "train.steps" not in shown.out


def test_unwritable_run_folder(orch: Type, submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file in the way")
    refused = submit(f"cluster.root={tmp_path}/file/runs")
    assert refused.code == 4
    assert f"{tmp_path}/file/runs" in refused.err
    assert "cluster.root" in refused.err
    assert orch("status", "--json").data == []
    assert os.listdir(tmp_path / "home")


@pytest.mark.parametrize("name", ["../esc", "a/b", "a b", "-x", "a\nb", "", "x" * 64, "\N{SNOWMAN}", "a'\"b", "${env}"])
def test_invalid_name(orch: Type, submit: Submit, service: Service, name: str) -> None:
    refused = submit(f"--name={name}")
    assert refused.code == 2, refused.err
    assert "name" in refused.err
    assert orch("status", "--json").data == []
    assert service.knocks == []


def test_numeric_name(submit: Submit) -> None:
    assert submit("--name", "007", "--json").data["run"] == "007-1"


def test_missing_text(submit: Submit, tmp_path: Path) -> None:
    refused = submit(f"data.text=[{tmp_path / 'nothing'}]")
    assert refused.code in (2, 3)
    assert "nothing" in refused.err


def test_controller_is_started_again(submit: Submit, service: Service, monkeypatch: Patch) -> None:
    launch = service.act

    def late(store: Store, run: Any, epoch: int) -> None:
        if len(service.knocks) >= 3:
            launch(store, run, epoch)

    service.act = late
    monkeypatch.setattr(submitting, "CHECK_CONTROLLER_EVERY", 0.2)
    done = submit("--json")
    assert done.data["job_id"] == "41"
    assert service.knocks == ["ensure_running"] * 3


def test_silent_scheduler_without_controller(orch: Type, submit: Submit, service: Service, monkeypatch: Patch) -> None:
    service.act, service.silent = (lambda *_: None), ("local",)
    monkeypatch.setattr(submitting, "JOB_WITHIN_ALONE", 0.0)
    done = submit("--no-controller")
    assert done.code == 5
    assert "local does not answer" in done.err
    assert "tiny-gpt-1 is recorded" in done.err
    assert [row["state"] for row in orch("status", "--json").data] == ["CREATED"]


PIPELINE = ("parallel.dp_shard=0", "parallel.tp=1", "parallel.pipeline.stages=2")


@pytest.mark.parametrize("verb", [("submit", "--dry-run"), ("config", "validate")])
def test_few_micro_batches(orch: Type, verb: tuple[str, ...]) -> None:
    few = orch(*verb, "tiny-gpt", *PIPELINE, "parallel.pipeline.micro_batches=4")
    assert few.code == 0, few.err
    warned = [line for line in few.err.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 1
    assert "4 micro-batches for a pipeline of 2 ranks: ranks wait for 20% of each step" in few.err
    assert "warning" not in few.out
    assert "type parallel.pipeline.micro_batches=8" in " ".join(few.err.split())
    assert "micro-batches for" not in orch(*verb, "tiny-gpt", *PIPELINE, "parallel.pipeline.micro_batches=8").err


def test_few_micro_batches_json(orch: Type) -> None:
    done = orch("submit", "--dry-run", "--json", "tiny-gpt", *PIPELINE, "parallel.pipeline.micro_batches=4")
    assert [item["code"] for item in done.answer["warnings"]] == ["few_micro_batches"]
