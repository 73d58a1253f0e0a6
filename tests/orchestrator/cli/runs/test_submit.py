"""`orch submit`: what it answers, what it leaves behind, and that a dry run leaves nothing."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cli.runs import submit as submitting
from orchestrator.registry.store import Store
from orchestrator.states import AttemptState, RunState
from tests.fakes.slurm_commands import refusing, write_commands
from tests.orchestrator.cli.conftest import Type


@pytest.fixture
def text(tmp_path: Path) -> str:
    """An override that trains on a little text instead of the standard library."""
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question\n" * 200)
    return f"data.text=[{path}]"


@pytest.fixture
def service(home: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A controller that launches every intent at once, or does what a test puts in its place."""
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


def words(tmp_path: Path, text: str) -> list[str]:
    return ["submit", "tiny-gpt", f"cluster.root={tmp_path / 'runs'}", "--cluster", "local", text]


def test_submit_json_has_the_promised_shape(orch: Type, service: SimpleNamespace, tmp_path: Path, text: str) -> None:
    done = orch(*words(tmp_path, text), "--name", "mine", "-t", "b", "-t", "a", "--json")
    assert done.code == 0, done.err
    assert done.answer["schema"] == "orch.submit/1"
    data = done.data
    assert list(data) == ["run", "attempt", "job_id", "cluster", "run_dir", "config_digest", "tags"]
    digest = data.pop("config_digest")
    assert len(digest) == 64
    assert data == {
        "run": "mine-1", "attempt": 1, "job_id": "41", "cluster": "local", "run_dir": str(tmp_path / "runs" / "mine-1"),
        "tags": ["a", "b"],
    }  # fmt: skip
    assert orch("status", "mine-1", "--json").data[0]["tags"] == ["a", "b"]
    assert service.knocks == ["ensure_running"]
    assert orch("config", "diff", "mine-1", digest, "--json").data == []


def test_submit_tells_a_person_what_to_type_next(
    orch: Type, service: SimpleNamespace, tmp_path: Path, text: str
) -> None:
    done = orch(*words(tmp_path, text), "--no-controller")
    assert done.out.startswith("tiny-gpt-1 submitted (local, job 41, config ")
    for command in ("orch status tiny-gpt-1", "orch logs tiny-gpt-1 -f", "orch cancel tiny-gpt-1"):
        assert command in done.err
    assert service.knocks == ["tick_once"]


def test_a_job_that_is_late_is_no_failure(
    orch: Type, service: SimpleNamespace, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def alive(path: Path, kind: str) -> None:
        with Store.open(path) as store:
            assert store.take_lease("busy:1:1", time.time(), 60.0) is not None

    service.ensure_running = alive
    monkeypatch.setattr(submitting, "JOB_WITHIN", 0.0)
    done = orch(*words(tmp_path, text), "--json")
    assert done.code == 0
    assert done.data["job_id"] is None
    assert [item["code"] for item in done.answer["warnings"]] == ["no_job_yet"]


def test_a_run_that_nobody_drives_is_no_success(
    orch: Type, service: SimpleNamespace, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stalled(path: Path, kind: str) -> None:
        with Store.open(path) as store:
            if store.lease() is None:
                assert store.take_lease("login2:7:7", time.time() - 300.0, 60.0) is not None

    service.ensure_running = stalled
    monkeypatch.setattr(submitting, "JOB_WITHIN", 0.0)
    monkeypatch.setattr(submitting, "TAKEN_OVER_WITHIN", 0.3)
    done = orch(*words(tmp_path, text))
    assert done.code == 4
    assert "tiny-gpt-1 is recorded, but no controller runs it: controller stalled for 30" in done.err
    assert "(pid 7 on login2)" in done.err
    assert "do not submit it again" in done.err
    assert [row["run"] for row in orch("status", "--json").data] == ["tiny-gpt-1"]
    shown = orch("status")
    assert "controller stalled for 30" in shown.err
    assert "`orch controller start` takes over" in shown.err
    assert [item["code"] for item in orch("status", "--json").answer["warnings"]] == ["controller_stalled"]


def test_a_controller_that_cannot_be_started_does_not_hide_the_run(
    orch: Type, service: SimpleNamespace, tmp_path: Path, text: str
) -> None:
    """A login node that lets a user have no more processes."""

    def full(path: Path, kind: str) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable", sys.executable)

    service.ensure_running = full
    done = orch(*words(tmp_path, text))
    assert done.code == 4
    assert "tiny-gpt-1 is recorded, but no controller can be started: Resource temporarily" in done.err
    assert "do not submit it again; `orch controller start`" in done.err


def test_a_job_that_is_refused_for_good_says_why(
    orch: Type, service: SimpleNamespace, tmp_path: Path, text: str
) -> None:
    def refuse(store: Store, run: Any, epoch: int) -> None:
        store.move_run(run.name, RunState.HELD, "Slurm refused: invalid partition", epoch=epoch, now=time.time())

    service.act = refuse
    done = orch(*words(tmp_path, text))
    assert done.code == 8
    assert "invalid partition" in done.err
    assert "orch resume tiny-gpt-1" in done.err


def test_what_slurm_would_refuse_makes_no_run(
    orch: Type, service: SimpleNamespace, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified"
    monkeypatch.setenv("PATH", write_commands(tmp_path / "bin", refusing(said)))
    typed = [*words(tmp_path, text)[:3], "--cluster", "slurm", text, "cluster.partition=nope"]
    done = orch(*typed)
    assert done.code == 4
    assert "Slurm refused the job: invalid partition specified: nope" in done.err
    assert "partitions here: low, high: type cluster.partition=low" in done.err
    assert orch("status", "--json").data == []
    assert service.knocks == []
    assert not (tmp_path / "runs").exists()
    (warned,) = orch(*typed, "--dry-run", "--json").answer["warnings"]
    assert warned["code"] == "slurm_refuses"
    assert "type cluster.partition=low" in warned["message"]


def test_submit_wait_brings_the_exit_code_of_the_run(
    orch: Type, service: SimpleNamespace, tmp_path: Path, text: str
) -> None:
    launch = service.act

    def fail(store: Store, run: Any, epoch: int) -> None:
        launch(store, run, epoch)
        store.move_run(run.name, RunState.FAILED, "a bug", epoch=epoch, now=time.time())

    service.act = fail
    done = orch(*words(tmp_path, text), "--wait", "--json")
    assert done.code == 8
    assert (done.data["run"], done.data["state"], done.data["reason"]) == ("tiny-gpt-1", "FAILED", "a bug")
    assert orch(*words(tmp_path, text), "--follow").code == 8


def everything(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_a_dry_run_shows_everything_and_writes_nothing(
    orch: Type, service: SimpleNamespace, tmp_path: Path, text: str, kind: str
) -> None:
    before = everything(tmp_path)
    typed = ["submit", "tiny-gpt", f"cluster.root={tmp_path / 'runs'}", "--cluster", kind, text, "--dry-run"]
    shown = orch(*typed)
    assert shown.code == 0, shown.err
    assert "train.steps = " in shown.out
    assert "# override" in shown.out
    assert ("#SBATCH --no-requeue" in shown.out) == (kind == "slurm")
    data = orch(*typed, "--json").data
    assert data["cluster"] == kind
    assert (data["sbatch"] or "").startswith("#!/bin/bash") == (kind == "slurm")
    assert data["origins"]["train.steps"]
    assert everything(tmp_path) == before
    assert service.knocks == []


def test_print_sbatch_prints_the_script_alone(orch: Type, tmp_path: Path, text: str) -> None:
    shown = orch("submit", "tiny-gpt", f"cluster.root={tmp_path}", "--cluster", "slurm", text, "--print-sbatch")
    assert shown.out.startswith("#!/bin/bash")
    assert "#SBATCH --hold" in shown.out
    assert "train.steps" not in shown.out


def test_an_unwritable_run_folder_is_refused_and_nothing_is_lost(
    orch: Type, service: SimpleNamespace, tmp_path: Path, text: str
) -> None:
    (tmp_path / "file").write_text("a file in the way")
    refused = orch(*words(tmp_path, text), f"cluster.root={tmp_path}/file/runs")
    assert refused.code == 4
    assert f"{tmp_path}/file/runs" in refused.err
    assert "cluster.root" in refused.err
    assert orch("status", "--json").data == []
    assert os.listdir(tmp_path / "home")


@pytest.mark.parametrize("name", ["../esc", "a/b", "a b", "-x", "a\nb", "", "x" * 64, "\N{SNOWMAN}", "a'\"b", "${env}"])
def test_a_name_is_checked_before_anything_is_written(
    orch: Type, service: SimpleNamespace, tmp_path: Path, text: str, name: str
) -> None:
    refused = orch(*words(tmp_path, text), f"--name={name}")
    assert refused.code == 2, refused.err
    assert "name" in refused.err
    assert orch("status", "--json").data == []
    assert service.knocks == []


def test_a_name_may_look_like_a_number(orch: Type, service: SimpleNamespace, tmp_path: Path, text: str) -> None:
    assert orch(*words(tmp_path, text), "--name", "007", "--json").data["run"] == "007-1"


def test_missing_text_is_refused(orch: Type, service: SimpleNamespace, tmp_path: Path) -> None:
    refused = orch(*words(tmp_path, f"data.text=[{tmp_path / 'nothing'}]"))
    assert refused.code in (2, 3)
    assert "nothing" in refused.err


def test_submit_starts_a_controller_again_when_the_one_it_saw_was_a_single_pass(
    orch: Type, service: SimpleNamespace, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = service.act

    def late(store: Store, run: Any, epoch: int) -> None:
        if len(service.knocks) >= 3:
            launch(store, run, epoch)

    service.act = late
    monkeypatch.setattr(submitting, "CHECK_CONTROLLER_EVERY", 0.2)
    done = orch(*words(tmp_path, text), "--json")
    assert done.data["job_id"] == "41"
    assert service.knocks == ["ensure_running"] * 3


def test_without_a_controller_a_silent_slurm_is_said_and_the_run_stays(
    orch: Type, service: SimpleNamespace, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.act, service.silent = (lambda *_: None), ("local",)
    monkeypatch.setattr(submitting, "JOB_WITHIN_ALONE", 0.0)
    done = orch(*words(tmp_path, text), "--no-controller")
    assert done.code == 5
    assert "local does not answer" in done.err
    assert "tiny-gpt-1 is written down" in done.err
    assert [row["state"] for row in orch("status", "--json").data] == ["CREATED"]
