"""Programs that save with `torch.save`, and all programs of no known framework.

Such a program saves on its own schedule. It gets SIGTERM before an end, and its newest checkpoint in ORCH_RESUME_PATH.
"""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.agent.adapters.host import AdapterHost


_STEP = re.compile(r"(\d+)(?!.*\d)", re.ASCII)
"""Last number in a name."""
_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".tar", ".safetensors")
_TEMPORARY = re.compile(r"(?<![a-z])(tmp|temp|partial|incomplete)(?![a-z])", re.IGNORECASE)


def install(module: Any, host: AdapterHost) -> None:
    """Report calls of `torch.save` as saves. `module` is `torch.serialization`."""
    save = module.save

    @functools.wraps(save)
    def save_and_report(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        begin()
        try:
            result = save(obj, f, *args, **kwargs)
        finally:
            end()
        report(f)
        return result

    begin = host.guard(lambda: host.leads and host.rank.enter("checkpoint"))
    end = host.guard(lambda: host.leads and host.rank.leave("checkpoint"))

    def note(target: Any) -> None:
        if host.leads and isinstance(target, (str, os.PathLike)):
            path = os.fspath(target)
            host.saved(_step(os.path.basename(path)), os.path.abspath(path))

    report = host.guard(note)
    module.save = save_and_report


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
