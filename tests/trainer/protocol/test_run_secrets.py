"""Files of secrets: private ones are read, all others are refused with what to type, and no value is ever shown."""

import os
from pathlib import Path

import pytest

from trainer.protocol.config import JobConfig
from trainer.protocol.run_dir import RunDir
from trainer.protocol.secrets import run_secrets
from trainer.protocol.secrets.run_secrets import RunSecrets, SecretsRefused, enter, read_list, values_for_job
from trainer.protocol.secrets.secret_redaction import LISTED

CANARY = "canary-12345"


def private(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_runs_own_file_is_private_and_new(tmp_path: Path) -> None:
    path, secrets = tmp_path / "secrets.json", RunSecrets(values={"HF_TOKEN": CANARY, "BYTES": "\udcff"})
    secrets.create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert RunSecrets.read(path) == secrets
    assert CANARY not in repr(secrets)
    with pytest.raises(FileExistsError):
        secrets.create(path)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        secrets.create(tmp_path / "link")
    secrets.replace(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert not RunSecrets.read(tmp_path / "none")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = private(tmp_path / "my secrets", f"A={CANARY}", mode)
    with pytest.raises(SecretsRefused, match=f"can be read by others .mode 0{mode:o}") as refused:
        read_list(path)
    assert refused.value.hint == f"chmod 600 '{path}'"


def test_what_is_no_private_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(SecretsRefused, match="is not a regular file"):
            read_list(path)
    with pytest.raises(SecretsRefused, match="no such file here"):
        read_list(tmp_path / "none")
    (tmp_path / "link").symlink_to(private(tmp_path / "file", f"A={CANARY}"))
    assert read_list(tmp_path / "link") == {"A": CANARY}
    with pytest.raises(SecretsRefused, match="is a link"):
        RunSecrets.read(tmp_path / "link")
    with pytest.raises(SecretsRefused, match="is damaged"):
        RunSecrets.read(tmp_path / "file")
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "file").stat().st_uid + 1)
    with pytest.raises(SecretsRefused, match="belongs to another user"):
        read_list(tmp_path / "file")


def test_lines_are_names_and_values(tmp_path: Path) -> None:
    text = "# tokens\n\nHF_TOKEN=a=b \nexport KEY='with space'\n  Q=\"x\"\nEMPTY=\n"
    assert read_list(private(tmp_path / "f", text)) == {"HF_TOKEN": "a=b", "KEY": "with space", "Q": "x", "EMPTY": ""}
    for wrong in (f"A=1\n{CANARY}\n", f"A=1\n7{CANARY}=x\n", f"A=1\n{LISTED}={CANARY}\n"):
        with pytest.raises(SecretsRefused, match="line 2 is not NAME=VALUE") as refused:
            read_list(private(tmp_path / "f", wrong))
        assert CANARY not in str(refused.value)


def test_a_job_gets_each_variable_from_one_place(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "tiny-1")
    run.path.mkdir()
    listed = str(private(tmp_path / "f", f"KEY={CANARY}"))
    RunSecrets(values={"HF_TOKEN": "x", "OLD": "y"}).create(run.secrets)
    both = JobConfig(env_from=("HF_TOKEN",), secrets_file=listed)
    assert values_for_job(run, both) == {"HF_TOKEN": "x", "KEY": CANARY}
    assert values_for_job(run, JobConfig()) == {}
    with pytest.raises(SecretsRefused, match="has no value for WANDB; `export WANDB=...`, then `orch resume tiny-1`"):
        values_for_job(run, JobConfig(env_from=("HF_TOKEN", "WANDB")))
    with pytest.raises(SecretsRefused, match="KEY is also in the configuration"):
        values_for_job(run, JobConfig(env={"KEY": "x"}, secrets_file=listed))


def test_the_environment_lists_its_secrets() -> None:
    environ = {LISTED: "FROM_OUTSIDE", "A": "1"}
    enter({}, environ)
    assert environ == {"A": "1"}
    enter({"B": "2", "A": "3"}, environ)
    assert environ == {"A": "3", "B": "2", LISTED: "A,B"}
    assert run_secrets.is_name("HF_TOKEN")
    assert not run_secrets.is_name(LISTED)
