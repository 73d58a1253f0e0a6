"""Which changes beside the user's code ask for a word, and how they are named."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from orchestrator.submission.code_changes import code_changes
from orchestrator.submission.run_identity import FILES_NAMED, _place


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text("width = 64\n")
    (tmp_path / "vocabulary.txt").write_text("a b c\n")
    return tmp_path


def changes(folder: Path, before: dict[str, Any]) -> list[str]:
    return code_changes([before], [_place(folder)])


def in_git(folder: Path) -> None:
    for words in (["init", "-q"], ["add", "model.py"], ["commit", "-q", "-m", "one"]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(folder), *identity, *words], check=True)


@pytest.mark.parametrize("git", [False, True])
def test_what_is_new_beside_the_code_and_no_code_is_no_change(folder: Path, git: bool) -> None:
    if git:
        in_git(folder)
    before = _place(folder)
    (folder / "exported").mkdir()
    (folder / "exported" / "model.safetensors").write_bytes(b"x")
    (folder / "notes.txt").write_text("hi\n")
    assert _place(folder) != before
    assert changes(folder, before) == []


@pytest.mark.parametrize("git", [False, True])
def test_files_that_matter_are_named(folder: Path, git: bool) -> None:
    if git:
        in_git(folder)
    before = _place(folder)
    (folder / "torch.py").write_text("raise ImportError\n")
    assert changes(folder, before) == ["torch.py is new"]
    (folder / "vocabulary.txt").write_text("a c b\n")
    assert changes(folder, before) == ["vocabulary.txt changed", "torch.py is new"]
    (folder / "vocabulary.txt").unlink()
    assert changes(folder, before) == ["vocabulary.txt is gone", "torch.py is new"]


def test_a_change_of_what_git_knows_is_told_with_the_commit(folder: Path) -> None:
    in_git(folder)
    before = _place(folder)
    (folder / "model.py").write_text("width = 65\n")
    (words,) = changes(folder, before)
    assert words == f"{folder}: other changes since commit {before['git'][:10]}"


def test_what_is_too_much_to_name_or_was_recorded_without_names_counts_whole(folder: Path) -> None:
    before = _place(folder)
    old = {key: value for key, value in before.items() if key != "files"}
    assert changes(folder, old) == []
    for number in range(FILES_NAMED):
        (folder / f"{number}.txt").touch()
    assert changes(folder, before) == [f"files in {folder}"]
    assert changes(folder, old) == [f"files in {folder}"]


def test_another_list_of_folders_is_a_change(folder: Path) -> None:
    assert code_changes([_place(folder)], []) == ["another list of folders"]
