"""Secrets of a run go from the submitter's shell into one private file only, whichever process makes the folder."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import failpoints
from orchestrator.config.compose import compose
from orchestrator.controller.reconcile import Controller
from orchestrator.errors import ConfigError, Precondition
from orchestrator.registry.records import REPLACED_VARIABLES, Run
from orchestrator.registry.store import Store
from orchestrator.restore_tests.create import RestoreTestRequest, create_test
from orchestrator.run_dirs.run_folder import ensure_run_dir
from orchestrator.states import RunState
from orchestrator.submission import create_run
from orchestrator.submission.resume_request import resume_request
from tests.fakes.scheduler import FakeScheduler
from trainer.protocol.run_dir import RunDir
from trainer.protocol.secrets.run_secrets import RunSecrets

CANARY, OTHER = "canary-shell-12345", "canary-newer-67890"
HOOK = "https://hooks.example.org/services/canary-hook"


class Killed(BaseException):
    """Stands for `kill -9`."""


class Shell:
    """A user's shell with a registry."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder, self.store, self.root = folder, store, folder / "runs"
        (folder / "text.txt").write_text("to be or not to be " * 100)

    def submit(self, *overrides: str, **given: Any) -> Run:
        own = (f"cluster.root={self.root}", "cluster.kind=local", f"data.text=[{self.folder / 'text.txt'}]")
        composed = compose("tiny-gpt", (*own, "train.seq_len=16", *overrides), environ={"HOME": str(self.folder)})
        return create_run.create_run(self.store, composed, cluster=None, now=5.0, **given)[0]

    def files_with(self, *values: str) -> list[str]:
        """Return all files below the folder, including the registry's, that contain one of these values."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        found = [path for path in files if any(value.encode() in path.read_bytes() for value in values)]
        return sorted(str(path.relative_to(self.folder)) for path in found)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("ORCH_PRIVATE", "canary-orch-12345")
    with Store.open(tmp_path / "registry.db") as opened:
        yield Shell(tmp_path, opened)


NAMES = "env_from=[HF_TOKEN,ORCH_PRIVATE]"


def test_values_stand_in_one_private_file(shell: Shell) -> None:
    run = shell.submit(NAMES, f"notify.webhook={HOOK}")
    folder = RunDir(Path(run.run_dir))
    assert shell.files_with(CANARY, "canary-orch", "canary-hook") == ["runs/tiny-gpt-1/secrets.json"]
    assert os.stat(folder.secrets).st_mode & 0o777 == 0o600
    secrets = RunSecrets.read(folder.secrets)
    assert secrets.values == {"HF_TOKEN": CANARY, "ORCH_PRIVATE": "canary-orch-12345"}
    shown = shell.store.config(run.config_digest)["notify"]["webhook"]
    assert shown == "https://hooks.example.org/***"
    assert secrets.webhooks == {shown: HOOK}
    assert not (RunDir(Path(shell.submit().run_dir)).secrets).exists(), "a run without secrets has no such file"


def test_a_variable_that_the_shell_lacks_is_named_before_anything_is_written(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError) as refused:
        shell.submit(NAMES)
    assert refused.value.what == "env_from: HF_TOKEN is not set in this shell"
    assert refused.value.hint.startswith("`export HF_TOKEN=...`")
    assert shell.store.runs() == []
    assert not list(shell.root.glob("*"))


def test_a_variable_that_is_no_secret_hides_nothing_of_what_orch_records(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SORT_KEY", os.getcwd())
    run = shell.submit("env_from=[SORT_KEY]", f"+env.FOLDER={os.getcwd()}")
    assert run.identity["submit_dir"] == os.getcwd()


@pytest.mark.parametrize("override", [f"+workload.args.word=a{CANARY}b", f"+env.WORDS=my {CANARY}"])
def test_a_secret_also_in_the_config_is_refused(shell: Shell, override: str) -> None:
    with pytest.raises(ConfigError, match="contains the value of HF_TOKEN") as refused:
        shell.submit(NAMES, override)
    assert CANARY not in f"{refused.value.what} {refused.value.where} {refused.value.hint}"
    assert shell.store.runs() == []


def test_a_file_of_the_users_is_looked_at_before_anything_is_written(shell: Shell) -> None:
    listed = shell.folder / "tokens"
    listed.write_text("HF_TOKEN=x\n")
    for mode, names, what in (
        (0o644, "env_from=[]", "can be read by others"),
        (0o600, NAMES, "HF_TOKEN is also in the configuration"),
    ):
        listed.chmod(mode)
        with pytest.raises(ConfigError, match=what):
            shell.submit(f"secrets_file={listed}", names)
    with pytest.raises(ConfigError, match="no such file here"):
        shell.submit(f"secrets_file={listed}.gone")
    assert shell.store.runs() == []


@pytest.mark.parametrize("point", ["after_create", "before_folder", "after_folder"])
def test_a_submitter_that_dies_has_left_the_values_to_the_controller(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    def die(reached: str) -> None:
        if reached == point:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "reach", die)
        with pytest.raises(Killed):
            shell.submit(NAMES)
    (run,) = shell.store.runs()
    monkeypatch.delenv("HF_TOKEN")
    (name,) = shell.files_with(CANARY)
    assert (shell.folder / name).stat().st_mode & 0o777 == 0o600
    folder = ensure_run_dir(run, shell.store.attempts(run.name)[0], shell.store.config(run.config_digest))
    assert RunSecrets.read(folder.secrets).values["HF_TOKEN"] == CANARY
    assert shell.files_with(CANARY) == ["runs/tiny-gpt-1/secrets.json"]


def test_a_run_that_is_refused_leaves_no_value_behind(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise Precondition("cannot make the run's folder", hint="make room")

    with monkeypatch.context() as patch:
        patch.setattr(create_run, "ensure_run_dir", full)
        with pytest.raises(Precondition):
            shell.submit(NAMES)
    assert shell.files_with(CANARY) == []

    def locked(*_: Any, **__: Any) -> None:
        raise Killed

    monkeypatch.setattr(shell.store, "create_run", locked)
    with pytest.raises(Killed):
        shell.submit(NAMES)
    assert shell.files_with(CANARY) == []


def test_files_of_a_killed_submitter_are_deleted(shell: Shell) -> None:
    shell.root.mkdir()
    old, fresh = shell.root / ".secrets-00000001.json", shell.root / ".secrets-00000002.json"
    for path in (old, fresh):
        RunSecrets(values={"A": CANARY}).create(path)
    os.utime(old, (1.0, 1.0))
    shell.submit(NAMES)
    assert (old.exists(), fresh.exists()) == (False, True)


def test_a_run_without_its_secrets_waits_for_them(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shell.submit(NAMES)
    folder = RunDir(Path(run.run_dir))
    folder.secrets.unlink()
    lease = shell.store.take_lease("me", 6.0, 1e9)
    assert lease is not None
    scheduler = FakeScheduler()
    controller = Controller(shell.store, {"local": scheduler})
    controller.tick(lease)
    held = shell.store.run(run.name)
    assert held.state is RunState.HELD
    assert held.reason == (
        f"{folder.secrets} has no value for HF_TOKEN, ORCH_PRIVATE; type `export HF_TOKEN=... ORCH_PRIVATE=...`; "
        f"when it is fixed: orch resume {run.name}"
    )
    assert not scheduler.jobs
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match="env_from: HF_TOKEN is not set in this shell"):
        resume_request(shell.store, held, [], [])
    monkeypatch.setenv("HF_TOKEN", OTHER)
    asked = resume_request(shell.store, held, [], [])
    assert OTHER not in json.dumps(asked)
    shell.store.add_user_request(run.name, "resume", asked, now=7.0)
    controller.tick(lease)
    assert scheduler.jobs
    assert shell.files_with(OTHER) == ["runs/tiny-gpt-1/secrets.json"]


def test_resume_takes_what_the_shell_has_and_keeps_the_rest(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shell.submit(NAMES, f"notify.webhook={HOOK}")
    folder = RunDir(Path(run.run_dir))
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("ORCH_PRIVATE", OTHER)
    newer = "https://hooks.example.net/services/canary-newer-hook"
    notes: list[str] = []
    asked = resume_request(shell.store, run, [f"notify.webhook={newer}"], [], notes.append)
    assert notes == [f"{run.name} continues with the new value of ORCH_PRIVATE from this shell"]
    assert asked[REPLACED_VARIABLES] == ["ORCH_PRIVATE"]
    secrets = RunSecrets.read(folder.secrets)
    assert secrets.values == {"HF_TOKEN": CANARY, "ORCH_PRIVATE": OTHER}
    assert sorted(secrets.webhooks.values()) == sorted([HOOK, newer])
    assert shell.store.config(asked["config"])["notify"]["webhook"] == "https://hooks.example.net/***"
    assert shell.files_with(CANARY, OTHER, "canary-hook", "canary-newer") == ["runs/tiny-gpt-1/secrets.json"]
    monkeypatch.delenv("ORCH_PRIVATE")
    before = folder.secrets.stat().st_mtime_ns
    assert (resume_request(shell.store, run, [], [], notes.append), len(notes)) == ({}, 1)
    assert folder.secrets.stat().st_mtime_ns == before, "nothing is newer"


def _lease(store: Store) -> int:
    lease = store.take_lease("me", 6.0, 1e9)
    assert lease is not None
    return lease.epoch


def test_a_restore_test_gets_a_copy_of_the_values(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.registry.records import Checkpoint
    from orchestrator.states import Trust

    run = shell.submit(NAMES, f"notify.webhook={HOOK}")
    attempt = shell.store.attempts(run.name)[0]
    folder = RunDir(Path(run.run_dir))
    name = f"step-00000100.001-{attempt.nonce}"
    row = Checkpoint(
        run=run.name, name=name, step=100, attempt=1, trust=Trust.COMMITTED, bytes=10,
        path=f"{folder.checkpoints}/{name}", committed_at=5.0, manifest="f" * 32,
    )  # fmt: skip
    shell.store.put_checkpoint(row, epoch=_lease(shell.store))
    for variable in ("HF_TOKEN", "ORCH_PRIVATE"):
        monkeypatch.delenv(variable)
    test = shell.store.run(create_test(shell.store, run, RestoreTestRequest(checkpoint=row, forced=True), 8.0).test)
    first = shell.store.attempts(test.name)[0]
    made = ensure_run_dir(test, first, shell.store.config(first.config_digest))
    assert RunSecrets.read(made.secrets) == RunSecrets(values=RunSecrets.read(folder.secrets).values)
    assert made.secrets.stat().st_mode & 0o777 == 0o600
