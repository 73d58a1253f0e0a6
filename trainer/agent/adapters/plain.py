"""Programs that save with `torch.save`, and all programs of no known framework.

Such a program saves on its own schedule. It gets SIGTERM before an end, and its newest checkpoint in ORCH_RESUME_PATH.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.agent.adapters.host import AdapterHost


_STEP = re.compile(r"(\d+)(?!.*\d)", re.ASCII)
"""Last number in a name."""
_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".safetensors")
_TEMPORARY = re.compile(r"(?<![a-z])(tmp|temp|partial|incomplete)(?![a-z])", re.IGNORECASE)
_CHECKPOINT = re.compile(r"ckpt|checkpoint|snapshot", re.IGNORECASE)
_PARAMETERS = (".weight", ".bias")
"""Ends of the names of most modules' parameters."""
_DEPTH, _MOST_VALUES = 3, 100
_MOST_FILES = 64
"""Number of the newest files for which a program may choose another name."""


def install(module: Any, host: AdapterHost) -> None:
    """Report calls of `torch.save` as saves. `module` is `torch.serialization`, from which torch takes its `save`."""
    save, torch = module.save, sys.modules.get("torch")
    written = WrittenFiles(host)

    @functools.wraps(save)
    def save_and_report(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        begin()
        try:
            result = save(obj, f, *args, **kwargs)
        finally:
            end()
        report(f, obj)
        return result

    begin = host.guard(lambda: host.leads and host.rank.enter("checkpoint"))
    end = host.guard(lambda: host.leads and host.rank.leave("checkpoint"))
    report = host.guard(written.note)
    module.save = save_and_report
    if getattr(torch, "save", None) is save:
        setattr(torch, "save", save_and_report)  # noqa: B010  # torch is loaded already, with its own name for it


class WrittenFiles:
    """Files that this program writes with `torch.save`, under the names that they get in the end."""

    def __init__(self, host: AdapterHost) -> None:
        self._host = host
        self._newest: list[tuple[str, bool]] = []  # with whether it holds data
        self._renaming: list[Any] = []  # functions of `os` that report

    def note(self, target: Any, content: Any) -> None:
        """Report a finished file. A temporary one, or one in a temporary folder, is reported under its next name."""
        if not self._host.leads or not isinstance(target, (str, os.PathLike)):
            return
        path = os.path.abspath(os.fspath(target))
        self._watch_names()
        is_data = not (_CHECKPOINT.search(path) or holds_state(content))
        self._newest = [*self._newest[1 - _MOST_FILES :], (path, is_data)]
        if not any(map(_TEMPORARY.search, path.split(os.sep)[-2:])):
            self._report(path, is_data)

    def _report(self, path: str, is_data: bool) -> None:
        """Report a file. Predictions or rollouts are no checkpoint, even if their name has a step."""
        self._host.saved(_step(os.path.basename(path)), path, is_data=is_data)

    def _watch_names(self) -> None:
        for name in ("replace", "rename"):
            if getattr(os, name) not in self._renaming:
                setattr(os, name, self._report_names(getattr(os, name)))

    def _report_names(self, rename: Any) -> Any:
        report = self._host.guard(self._finish)

        @functools.wraps(rename)
        def rename_and_report(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            result = rename(src, dst, *args, **kwargs)
            if not kwargs:  # names relative to a descriptor are not those of a saved file
                report(src, dst)
            return result

        self._renaming.append(rename_and_report)
        return rename_and_report

    def _finish(self, src: Any, dst: Any) -> None:
        """Report the files that this renaming has given their names."""
        if not isinstance(src, (str, os.PathLike)):
            return
        old, new = os.path.abspath(os.fspath(src)), os.path.abspath(os.fspath(dst))
        moved = [one for one in self._newest if one[0] == old or one[0].startswith(old + os.sep)]
        self._newest = [one for one in self._newest if one not in moved]
        for path, is_data in moved:
            self._report(new + path[len(old) :], is_data)


def holds_state(value: Any, depth: int = _DEPTH) -> bool:
    """Return whether an object contains a module, or the state of a module or an optimizer."""
    if callable(getattr(type(value), "named_parameters", None)) or "_metadata" in getattr(value, "__dict__", {}):
        return True
    if isinstance(value, dict):
        names = [name for name in list(value)[:_MOST_VALUES] if isinstance(name, str)]
        if "param_groups" in value or any(name.endswith(_PARAMETERS) for name in names):
            return True
        value = list(value.values())
    if not isinstance(value, (list, tuple)) or not depth:
        return False
    return any(holds_state(each, depth - 1) for each in value[:_MOST_VALUES])


def _step(name: str) -> int:
    """Return the last number in a name, or -1 if it has none."""
    found = _STEP.search(os.path.splitext(name)[0])
    return int(found[1][:18]) if found else -1


def checkpoints(folder: str) -> list[tuple[int, str]]:
    """Return files with a number in their names and a suffix that `torch.save` users choose, lowest step first."""
    found = []
    for name in os.listdir(folder):
        step = _step(name)
        if step >= 0 and name.endswith(_SUFFIXES) and not _TEMPORARY.search(name):
            found.append((step, os.path.join(folder, name)))
    return sorted(found)


def damage(path: str) -> str:
    """Return why the path is not a checkpoint; a program's own format has no other rules."""
    if os.path.isdir(path):
        return "" if os.listdir(path) else "is an empty folder"
    return "" if os.path.getsize(path) else "is empty"


def resume(path: str) -> tuple[dict[str, str], list[str]]:
    """Return the variable that a program may read; most programs scan their folder themselves."""
    return ({"ORCH_RESUME_PATH": path} if path else {}), []
