"""Requests to the live job: files in the run directory, read once a second."""

from pathlib import Path

from trainer.agent.processes.detached_thread import RepeatedRead
from trainer.contract.requests import Request, pending

READ_SECONDS = 2.0
"""Seconds by which a look may delay the other files of the coordinator."""


class RequestInbox:
    """Returns every request once."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self._seen: set[str] = set()
        self._requests = RepeatedRead(lambda: pending(folder, attempt, self._seen), folder)

    async def poll(self) -> list[Request]:
        """The new requests; none while the folder cannot be read."""
        try:
            found = await self._requests.result(READ_SECONDS)
        except OSError:
            return []
        self._seen.update(request.name for request in found)
        return found
