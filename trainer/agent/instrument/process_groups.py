"""Process groups of a program: its rank, the number of its collectives, and flight records for the agent.

Standard library, Python 3.9.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any


class ProcessGroups:
    """Groups of this process. It keeps no reference to a group, because programs destroy them."""

    def __init__(self, program: Any, module: Any) -> None:
        """`program` is the module `program_rank`, `module` is `torch.distributed.distributed_c10d`."""
        self._program, self._module, self._world = program, module, module._world
        self._listed = 0
        self._silent: set[int] = set()
        self._server: Any = None

    def refresh(self) -> None:
        """Report the rank if this process has joined a group, and list its groups if they have changed."""
        listed = len(self._world.pg_names)
        if listed == self._listed:
            return
        self._listed, self._silent = listed, set()
        if not listed or self._world.default_pg is None:
            return
        rank = self._program.join(self._module.get_rank())
        if rank is None:
            return
        rank.found("torch.distributed")
        rank.use_counts(self.count, self.count_all)
        self._serve(_flight_path(rank))

    def count(self) -> int:
        """Return the number of collectives that this rank has started in all its groups."""
        total = 0
        for group in list(self._world.pg_names):
            if id(group) not in self._silent:
                try:
                    total += group._get_sequence_number_for_group()
                except RuntimeError:  # some backends have no counter
                    self._silent.add(id(group))
        return total

    def count_all(self) -> int | None:
        """Return the same number, or None if a backend has no counter."""
        total = self.count()
        return None if self._silent else total

    def _serve(self, path: str) -> None:
        """Start torch's server, which answers the agent even while Python's lock is held, and list the groups, which
        gloo's records lack.
        """
        if not path:
            return
        if self._server is None:
            self._server = _start_server(path)
        rows = {
            name: {"name": name, "desc": group.group_desc, "runs": _runs(self._module.get_process_group_ranks(group))}
            for group, name in self._world.pg_names.items()
        }
        temporary = f"{path}.groups.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8") as stream:
            json.dump(rows, stream)
        os.replace(temporary, f"{path}.groups")


_known: list[ProcessGroups] = []


def refresh() -> None:
    """Report new process groups, however they were made."""
    for groups in _known:
        groups.refresh()


def install(hook: Any, program: Any, module: Any) -> None:
    """Report process groups as soon as they exist, since a program may hang before its first step."""
    groups = ProcessGroups(program, module)
    _known.append(groups)
    report = hook.guard(groups.refresh)
    for name in ("init_process_group", "new_group"):
        original = getattr(module, name)
        _replace(name, original, _call_and_report(original, report))


def _call_and_report(original: Any, report: Any) -> Any:
    @functools.wraps(original)
    def call_and_report(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        report()
        return made

    return call_and_report


def _replace(name: str, original: Any, wrapped: Any) -> None:
    """Replace a function in all of torch's modules that have imported it."""
    for place, module in list(sys.modules.items()):
        if place.startswith("torch.distributed") and getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, wrapped)


def _flight_path(rank: Any) -> str:
    paths = os.environ.get("ORCH_FLIGHTS", "").split(",")
    return paths[rank.local_rank] if rank.local_rank < len(paths) else ""


def _start_server(path: str) -> Any:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with _stderr_silenced():
        return sys.modules["torch._C._distributed_c10d"]._WorkerServer(path, -1)


@contextlib.contextmanager
def _stderr_silenced() -> Iterator[None]:
    """Suppress the C++ message about the start of the server."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _runs(ranks: list[int]) -> list[list[int]]:
    """Return ascending ranks as runs [first, last, step], as the agent decodes them."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and (found[-1][0] == found[-1][1] or rank - found[-1][1] == found[-1][2]):
            found[-1][2] = rank - found[-1][1]
            found[-1][1] = rank
        else:
            found.append([rank, rank, 1])
    return found
