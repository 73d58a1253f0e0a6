"""Requests to the live job: found in the run directory once a second, kept until they are answered."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.agent.control.tcp_transport import Message
from trainer.contract.requests import pending


def newest_own_save(reports: Sequence[Mapping[str, Any]], restored: int) -> int:
    """The newest step that the generation of these reports has saved itself, not found; 0: none."""
    saved = max((int(report.get("saved", 0)) for report in reports), default=0)
    return saved if saved > restored else 0


def newest_begun_save(reports: Sequence[Mapping[str, Any]], total: int) -> int:
    """The newest step whose save may have been begun already: who asks for one now does not mean that one.

    After the last step of all no later one can come.
    """
    step = max((int(report.get("step", 0)) for report in reports), default=0)
    return min(step, total - 1) if total else step


class RequestInbox:
    """Delivers every new request once; remembers which saves are still awaited."""

    def __init__(self, folder: Path, attempt: int, deliver: Callable[[int, Message], None]) -> None:
        self._folder, self._attempt, self._deliver = folder, attempt, deliver
        self._seen: set[str] = set()
        self._saves: dict[str, int] = {}  # request -> step whose save was no answer to it yet

    async def poll(self) -> None:
        """Look into the folder once; one that cannot be read now is looked at again a second later."""
        try:
            found = await asyncio.to_thread(pending, self._folder, self._attempt, self._seen)
        except OSError:
            return
        for request in found:
            self._seen.add(request.name)
            self._deliver(-1, {"say": "request", "request": request})

    def await_save(self, name: str, step: int) -> None:
        """A save was asked for: that of a step after this one answers it."""
        self._saves[name] = step

    def reset_awaited_saves(self) -> bool:
        """New ranks have not heard of it: their first save is the answer. Whether there is one to be asked for."""
        self._saves = dict.fromkeys(self._saves, 0)
        return bool(self._saves)

    def saved(self, step: int) -> list[str]:
        """Requests that the save of `step` answers, each told once."""
        answered = [name for name, before in self._saves.items() if step > before]
        for name in answered:
            del self._saves[name]
        return answered
