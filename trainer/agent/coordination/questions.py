"""Requests to the live job: found in the run directory once a second, kept until they are answered."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from trainer.agent.control.wire import Message
from trainer.contract.requests import pending


class Questions:
    """Delivers every new request once; remembers which saves are still awaited."""

    def __init__(self, folder: Path, attempt: int, deliver: Callable[[int, Message], None]) -> None:
        self._folder, self._attempt, self._deliver = folder, attempt, deliver
        self._seen: set[str] = set()
        self._saves: dict[str, int] = {}  # request -> newest saved step when it was asked

    async def look(self) -> None:
        """Look into the folder once; one that cannot be read now is looked at again a second later."""
        try:
            found = await asyncio.to_thread(pending, self._folder, self._attempt, self._seen)
        except OSError:
            return
        for request in found:
            self._seen.add(request.name)
            self._deliver(-1, {"say": "request", "request": request})

    def await_save(self, name: str, saved: int) -> None:
        """A save was asked for when `saved` was the newest saved step."""
        self._saves[name] = saved

    def saved(self, step: int) -> list[str]:
        """Requests that the save of `step` answers, each told once."""
        answered = [name for name, before in self._saves.items() if step > before]
        for name in answered:
            del self._saves[name]
        return answered
