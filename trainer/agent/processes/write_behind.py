"""Text that a thread of its own writes: a file system that hangs does not delay the caller."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

MOST_TEXTS = 10_000
MOST_CHARACTERS = 16 << 20
"""So much waits at most for a file that hangs; what comes then is lost."""

CLOSE_SECONDS = 5.0
"""How long a file that hangs may delay the end."""


class WriteBehind:
    """Writes in the order of `append`, at once while the file answers; never raises OSError.

    `write` and `close` may block, and run in that thread only. `lost` hears of every text that could not be written,
    and why; of those for which there was no room it hears of the first one.
    """

    def __init__(
        self, write: Callable[[str], object], lost: Callable[[str, str], object],
        close: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._write, self._lost, self._close_file = write, lost, close
        self._texts: deque[str] = deque()  # the one that is being written included
        self._characters = 0
        self._full = self._closed = False
        # Reentrant, as it is made: what the collector of garbage has to say may come in the middle of anything.
        self._news = threading.Condition()
        threading.Thread(target=self._run, name="orch-behind", daemon=True).start()

    def append(self, text: str) -> None:
        """Have `text` written; returns at once."""
        with self._news:
            told, why = self._full, self._refusal()
            if not why:
                self._texts.append(text)
                self._characters += len(text)
                self._news.notify_all()
        if why and not told:
            self._lost(text, why)

    def _refusal(self) -> str:
        """Why nothing more can be taken; empty when it can."""
        if self._closed:
            return "it came after the end"
        # Once full it takes nothing until all is written: gaps are few, and each is reported.
        if len(self._texts) >= MOST_TEXTS or self._characters >= MOST_CHARACTERS:
            self._full = True
        return "too much waits for a file that hangs; what follows is lost too, until it answers" if self._full else ""

    def flush(self, seconds: float) -> bool:
        """Wait until all is written, for so long at most; whether it is."""
        with self._news:
            return self._news.wait_for(lambda: not self._texts, seconds)

    def close(self, seconds: float | None = None) -> None:
        """Flush, then let the thread close the file when it has written the rest."""
        done = self.flush(CLOSE_SECONDS if seconds is None else seconds)
        with self._news:
            self._closed = True
            left = list(self._texts)
            self._news.notify_all()
        if not done and left:
            self._lost(left[0], f"its file hangs at the end; {len(left) - 1} more after it are lost, too")

    def _run(self) -> None:
        while (text := self._next()) is not None:
            try:
                self._write(text)
            except (OSError, ValueError) as error:  # ValueError: a stream that was closed
                self._lost(text, str(error))
            with self._news:
                self._texts.popleft()
                self._characters -= len(text)
                self._full = self._full and bool(self._texts)
                self._news.notify_all()
        self._close_file()

    def _next(self) -> str | None:
        with self._news:
            self._news.wait_for(lambda: self._texts or self._closed)
            return self._texts[0] if self._texts else None


def settle(all_of_them: Iterable[WriteBehind], seconds: float = CLOSE_SECONDS) -> None:
    """Close them, within `seconds` together."""
    give_up = time.monotonic() + seconds
    for one in all_of_them:
        one.close(max(0.0, give_up - time.monotonic()))
