"""Requests to the live job: files in the run directory, read once a second."""

import asyncio
from pathlib import Path

from trainer.contract.requests import Request, pending


class RequestInbox:
    """Returns every request once."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self._folder, self._attempt = folder, attempt
        self._seen: set[str] = set()

    async def poll(self) -> list[Request]:
        """The new requests; none while the folder cannot be read."""
        try:
            found = await asyncio.to_thread(pending, self._folder, self._attempt, self._seen)
        except OSError:
            return []
        self._seen.update(request.name for request in found)
        return found
