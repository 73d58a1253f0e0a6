"""Lines that a thread of its own appends to a file: training waits for no file system, and many lines share a write."""

import threading
from collections.abc import Callable

from trainer.contract.logs.line_file import Lines

BATCH_SECONDS = 1.0
"""Lines that come within so long after a write are written together."""
MOST_CHARACTERS = 16 << 20
"""So much waits at most for a file that hangs; what comes then is lost."""


class LinesBehind:
    """Appends lines in order, within BATCH_SECONDS while the file answers; only `flush` and `close` wait for it.

    `open_file` is called by that thread, at the first line; `lost` hears why lines could not be written.
    """

    def __init__(
        self, open_file: Callable[[], Lines], lost: Callable[[str], object], *, batch_seconds: float = BATCH_SECONDS
    ) -> None:
        self._open, self._lost, self._batch_seconds = open_file, lost, batch_seconds
        self._lines: list[str] = []
        self._characters = 0
        self._writing = self._hurry = self._closed = self._full = False
        self._gathers = False  # nobody need wake the thread for a line
        self._news = threading.Condition()
        threading.Thread(target=self._run, name="orch-lines", daemon=True).start()

    def append(self, line: str) -> None:
        """Have `line` written; returns at once."""
        with self._news:
            full = self._characters + len(line) > MOST_CHARACTERS
            told, self._full = self._full, full
            if not full:
                self._lines.append(line)
                self._characters += len(line)
                if not self._gathers:
                    self._news.notify_all()
        if full and not told:
            self._lost("too much waits for a file that hangs; what follows is lost too, until it answers")

    def flush(self, seconds: float) -> bool:
        """Have all that was appended written now, and wait for that so long at most; whether it is."""
        with self._news:
            self._hurry = True
            self._news.notify_all()
            return self._news.wait_for(lambda: not (self._lines or self._writing), seconds)

    def close(self, seconds: float = 5.0) -> None:
        """Flush, then let the thread close the file when it has written the rest."""
        if not self.flush(seconds):
            self._lost("its file hangs at the end")
        with self._news:
            self._closed = True
            self._news.notify_all()

    def _run(self) -> None:
        file: Lines | None = None
        while lines := self._next():
            try:
                file = file or self._open()
                file.append("\n".join(lines))
            except OSError as error:
                self._lost(str(error))
            with self._news:
                self._writing = False
                self._news.notify_all()
                # Many lines a second share a write; one now and then is written at once.
                self._gathers = True
                self._news.wait_for(lambda: self._hurry or self._closed, self._batch_seconds)
                self._gathers = False
        if file is not None:
            file.close()

    def _next(self) -> list[str]:
        """What waits, once there is any; nothing after the end."""
        with self._news:
            self._news.wait_for(lambda: self._lines or self._closed)
            lines, self._lines, self._characters = self._lines, [], 0
            self._writing = bool(lines)
            self._hurry = False
            return lines
