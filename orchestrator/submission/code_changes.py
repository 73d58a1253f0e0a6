"""PURE: what differs between the user's code as it was recorded and as it is now, file by file where that is known."""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from orchestrator.submission.imported_files import is_imported

_CODE = {".py", ".pyi", ".pyx", ".so", ".pyd", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".pth"}
"""Suffixes of files that may change what is imported by being there."""
Place = Mapping[str, Any]


def code_changes(before: Sequence[Place], now: Sequence[Place]) -> list[str]:
    """What differs in the user's folders and scripts, in words; empty where nothing can change what is computed.

    A new file beside the code that is no code itself (a log, an export, notes) is no change of it, nor is a module
    that the workload does not import.
    """
    if len(before) != len(now):
        return ["another list of folders"]
    return [words for old, new in zip(before, now, strict=True) for words in _place_changes(old, new)]


def _place_changes(old: Place, new: Place) -> list[str]:
    if (old.get("git"), old.get("diff_sha256")) != (new.get("git"), new.get("diff_sha256")):
        return [_git_words(old, new)]
    kinds = (("files", "sha256"), ("untracked_files", "untracked_sha256"))
    found = [change for names, whole in kinds for change in _file_changes(old, new, names, whole)]
    imported = new.get("imported")
    return [words for file, words in found if not file or imported is None or is_imported(file, imported)]


def _git_words(old: Place, new: Place) -> str:
    place = new.get("path", "")
    if old.get("git") != new.get("git"):
        return f"{place}: commit {_short(old.get('git'))} -> {_short(new.get('git'))}"
    return f"{place}: other changes since commit {_short(new.get('git'))}"


def _short(commit: Any) -> str:
    return str(commit)[:10] if commit else "none"


def _file_changes(old: Place, new: Place, names: str, whole: str) -> list[tuple[str, str]]:
    """The file, empty where it is not known which, and what is different."""
    if old.get(whole) == new.get(whole):
        return []
    was, is_now = _files(old, names, whole), _files(new, names, whole)
    if was is None or is_now is None:  # too many to name, or recorded by an older orch
        return [("", f"files in {new.get('path', '')}")]
    changed = [(name, f"{name} changed") for name in was if name in is_now and was[name] != is_now[name]]
    gone = [(name, f"{name} is gone") for name in was if name not in is_now]
    added = [(name, f"{name} is new") for name in is_now if name not in was and PurePosixPath(name).suffix in _CODE]
    return [*changed, *gone, *added]


def _files(place: Place, names: str, whole: str) -> Mapping[str, str] | None:
    """The digest of each file; None where they are not known."""
    listed = place.get(names)
    return listed if listed is not None or place.get(whole) is not None else {}
