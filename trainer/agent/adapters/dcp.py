"""torch.distributed.checkpoint: folders of `.distcp` files and `.metadata`, as torchtitan and FSDP2 loops write them.

`.metadata` is written last and names every file. It is a pickle, of which only strings and numbers are read here.
"""

from __future__ import annotations

import functools
import os
import pickletools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.agent.adapters.host import AdapterHost

SAVE_AND_GO_ON = 1
_METADATA = ".metadata"
_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)", re.ASCII)
_LARGEST = 64 << 20
_FIELDS = ("relative_path", "offset", "length")
"""Fields of `_StorageInfo`, in the order in which torch pickles them."""


def _number(name: str) -> int:
    found = _LAST_NUMBER.search(name)
    return int(found[1][:18]) if found else -1


def install(module: Any, host: AdapterHost) -> None:
    """Report saves, and save on request with torchtitan's `CheckpointManager`.

    `module` is `torch.distributed.checkpoint.state_dict_saver`, or one of torchtitan with that class. An asynchronous
    save ends in another thread, so without torchtitan only the part that blocks the program is reported.
    """
    if hasattr(module, "CheckpointManager"):
        _hook_manager(module.CheckpointManager, host)
        return
    for name in ("save", "async_save"):
        setattr(module, name, _report_calls(getattr(module, name), name == "save", host))


def _hook_manager(manager: Any, host: AdapterHost) -> None:
    """Hook the call that torchtitan's trainer makes after every step; the manager decides there whether to save."""
    save = manager.save
    if not hasattr(manager, "_should_save") or save.__name__ == "save_and_answer":  # another name of the same class
        return
    saves = TitanSaves(host, save)
    before, after = host.guard(saves.is_due), host.guard(saves.after_step)

    @functools.wraps(save, assigned=("__doc__",))
    def save_and_answer(self: Any, curr_step: int, last_step: bool = False) -> Any:
        is_saved = before(self, curr_step, last_step)
        result = save(self, curr_step, last_step)
        after(self, curr_step, last_step, is_saved)
        return result

    manager.save = save_and_answer


class TitanSaves:
    """Steps and saves of torchtitan in this process."""

    def __init__(self, host: AdapterHost, save: Any) -> None:
        self._host, self._save = host, save
        self._answers = False
        self._written: tuple[int, str, Any] | None = None  # step, path and future of an asynchronous save

    def is_due(self, manager: Any, step: int, is_last: bool) -> bool:
        """Return whether the manager itself saves after this step."""
        return _is_used(manager) and bool(manager._should_save(step, is_last))

    def after_step(self, manager: Any, step: int, is_last: bool, is_saved: bool) -> None:
        """Report the step and finished saves, and save if all ranks agree to."""
        if not _is_used(manager) or not self._host.leads:
            return
        if not self._answers:
            self._host.answer_requests()
            self._answers = True
        if is_last:
            self._host.finish(step)
            return
        self._host.rank.step(number=step)
        reason = self._host.due(step)
        if reason and not is_saved:
            self._force(manager, step)
        self._report_written(manager, step if is_saved or reason else 0, wait=reason > SAVE_AND_GO_ON)
        if reason > SAVE_AND_GO_ON:
            self._host.leave()

    def _force(self, manager: Any, step: int) -> None:
        """Save the whole state, as the manager does at its own steps."""
        manager._should_save = lambda *_, **__: True
        try:
            self._save(manager, step)
        finally:
            del manager._should_save

    def _report_written(self, manager: Any, step: int, *, wait: bool) -> None:
        """Report an asynchronous save once it has ended; `dcp.save` reports the others."""
        future = getattr(manager, "save_future", None)
        if step and future is not None:
            self._written = step, os.path.abspath(manager._create_checkpoint_id(step)), future
        if self._written is None or not (wait or self._written[2].done()):
            return
        (step, path, future), self._written = self._written, None
        if future.exception() is None:
            self._host.saved(step, path, late=True)


def _is_used(manager: Any) -> bool:
    return getattr(manager, "enable", True) and not getattr(manager, "load_only", False)


def _report_calls(save: Any, is_whole: bool, host: AdapterHost) -> Any:
    enter = host.guard(lambda: host.leads and host.rank.enter("checkpoint"))
    leave = host.guard(lambda: host.leads and host.rank.leave("checkpoint"))

    def report(path: Any) -> None:
        if host.leads and is_whole and isinstance(path, (str, os.PathLike)):
            place = os.path.abspath(os.fspath(path))
            host.saved(_number(os.path.basename(place)), place)

    saved = host.guard(report)

    @functools.wraps(save)
    def save_and_report(*args: Any, **kwargs: Any) -> Any:
        enter()
        try:
            result = save(*args, **kwargs)
        finally:
            leave()
        saved(kwargs.get("checkpoint_id"))
        return result

    return save_and_report


def checkpoints(folder: str) -> list[tuple[int, str]]:
    """Return folders with a number in their names and torch's files, lowest step first. Raises OSError."""
    found = []
    for entry in os.scandir(folder):
        if entry.is_dir() and _number(entry.name) >= 0:
            names = os.listdir(entry.path)
            if _METADATA in names or any(name.endswith(".distcp") for name in names):
                found.append((_number(entry.name), entry.path))
    return sorted(found)


def damage(path: str) -> str:
    """Return why a checkpoint is incomplete, or "" if it is complete. Raises OSError."""
    place = os.path.join(path, _METADATA)
    if not os.path.isfile(place):
        return f"lacks {_METADATA}"
    if os.path.getsize(place) > _LARGEST:
        return ""
    with open(place, "rb") as stream:
        data = stream.read()
    try:
        ends = list(_read_ends(data))
    except (ValueError, IndexError, KeyError) as error:
        return f"{_METADATA} is unreadable: {type(error).__name__}"
    if not ends:
        return f"{_METADATA} names no files"
    for name, end in sorted(ends):
        file = os.path.join(path, name)
        if not os.path.isfile(file):
            return f"lacks {name}"
        if os.path.getsize(file) < end:
            return f"{name} has {os.path.getsize(file)} of {end} bytes"
    return ""


def _read_ends(data: bytes) -> Iterator[tuple[str, int]]:
    """Yield file names, and for each the end of a part in bytes. Raises ValueError and others for a torn pickle."""
    atoms = list(_read_atoms(data))
    for at, atom in enumerate(atoms[:-5]):
        if atom == _FIELDS[0] and (atoms[at + 2], atoms[at + 4]) == _FIELDS[1:]:
            name, offset, length = atoms[at + 1], atoms[at + 3], atoms[at + 5]
            if isinstance(name, str) and isinstance(offset, int) and isinstance(length, int):
                yield name, offset + length


def _read_atoms(data: bytes) -> Iterator[str | int]:
    """Yield the strings and numbers of a pickle in order, without creating its objects."""
    memo: dict[int, str | int | None] = {}
    last: str | int | None = None
    for opcode, argument, _ in pickletools.genops(data):
        name, at = opcode.name, argument if type(argument) is int else -1
        if name == "MEMOIZE":
            memo[len(memo)] = last
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[at] = last
        else:
            is_atom = "UNICODE" in name or ("INT" in name and at >= 0) or name == "LONG1"
            last = memo.get(at) if name in ("BINGET", "LONG_BINGET") else argument if is_atom else None
            if last is not None:
                yield last


def resume(path: str) -> tuple[dict[str, str], list[str]]:
    """Return the variable that a program may read; torchtitan loads the newest folder by itself."""
    return ({"ORCH_RESUME_PATH": path} if path else {}), []
