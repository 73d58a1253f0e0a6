"""Recorded code and environment of a run, without secrets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.config.run_config import RunConfig
from orchestrator.submission import run_identity
from trainer.protocol.config import WorkloadConfig

SECRET = "hunter2-canary"


def git(folder: Path, *words: str) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *author, *words], check=True, capture_output=True)


def config(folder: Path) -> RunConfig:
    return RunConfig(workload=WorkloadConfig(path=(str(folder),)))


def test_a_clean_repository_is_named_by_its_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "model.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    (found,) = run_identity.code(config(tmp_path))["user"]
    assert len(found["git"]) == 40
    assert found["dirty"] is False
    (tmp_path / "model.py").write_text("a = 2\n")
    (tmp_path / "new.py").write_text("b = 1\n")
    (found,) = run_identity.code(config(tmp_path))["user"]
    assert found["dirty"] is True
    assert "+a = 2" in found["diff"]
    assert found["untracked"] == ["new.py"]


def test_a_folder_without_git_is_named_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("a = 1\n")
    before = run_identity.digest([tmp_path])
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "model.pyc").write_text("x")
    assert run_identity.digest([tmp_path]) == before
    (tmp_path / "model.py").write_text("a = 2\n")
    assert run_identity.digest([tmp_path]) != before
    (tmp_path / "model.py").write_text("a = 1\n")
    (tmp_path / "model.py").rename(tmp_path / "other.py")
    assert run_identity.digest([tmp_path]) != before


def test_secrets_are_not_recorded(tmp_path: Path) -> None:
    environ = {
        "WANDB_API_KEY": SECRET, "HF_TOKEN": SECRET, "NCCL_AUTH_TOKEN": SECRET, "MY_PASSWORD": SECRET,
        "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "HOME": "/home/ann",
    }  # fmt: skip
    found = run_identity.identify(config(tmp_path), "local", data={}, environ=environ)
    assert SECRET not in json.dumps(found)
    assert found["env"]["variables"] == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}


def test_the_environment_is_named_without_importing_torch() -> None:
    found = run_identity.environment("local", {})
    assert found["torch"] == run_identity.packages()["torch"]
    assert found["slurm"] is None
    assert found["python"].count(".") == 2


def test_the_imported_one_of_two_equal_packages_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, version in (("first", "2.0"), ("second", "1.0")):
        about = tmp_path / folder / f"twice-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: twice\nVersion: {version}\n\nName: of the text\n"
        )
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second")])
    assert run_identity.packages() == {"twice": "2.0"}


def test_a_git_that_does_not_answer_leaves_open_whether_there_are_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"rev-parse": "0" * 40, "ls-files": ""}
    monkeypatch.setattr(run_identity, "_git", lambda folder, verb, *more: answers.get(verb))
    (found,) = run_identity.code(config(tmp_path))["user"]
    assert found["dirty"] is None
    assert "git diff" in found["dirty_reason"]
    answers["ls-files"] = "new.py\0"
    (found,) = run_identity.code(config(tmp_path))["user"]
    assert found["dirty"] is True


def test_untracked_files_are_listed_whatever_their_names_are(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-qm", "first", "--allow-empty")
    for name in ("m\N{LATIN SMALL LETTER U WITH DIAERESIS}ll.py", "a\nb.py", os.fsdecode(b"\xff.py")):
        (tmp_path / name).write_text("a = 1\n")
        (found,) = run_identity.code(config(tmp_path))["user"]
        assert found["untracked"] == [os.fsencode(name).decode(errors="replace")]
        json.dumps(found, ensure_ascii=False).encode()
        (tmp_path / name).unlink()


def test_a_repository_that_a_hook_or_a_shell_has_chosen_is_not_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "-q")
        (tmp_path / name / "model.py").write_text(f"a = '{name}'\n")
        git(tmp_path / name, "add", ".")
        git(tmp_path / name, "commit", "-qm", name)
    (alone,) = run_identity.code(config(tmp_path / "mine"))["user"]
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "other" / ".git" / "index"))
    (found,) = run_identity.code(config(tmp_path / "mine"))["user"]
    assert found == alone
    assert found["dirty"] is False


def test_the_diff_runs_no_program_of_the_repository(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitattributes").write_text("*.py diff=slow\n")
    (tmp_path / "model.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "config", "diff.slow.command", f"touch {tmp_path}/.git/ran; false")
    git(tmp_path, "config", "diff.slow.textconv", f"touch {tmp_path}/.git/ran; false")
    (tmp_path / "model.py").write_text("a = 2\n")
    (found,) = run_identity.code(config(tmp_path))["user"]
    assert "+a = 2" in found["diff"]
    assert not (tmp_path / ".git" / "ran").exists()
