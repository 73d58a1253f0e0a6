"""A thread that does nothing but tick in the progress cell: it stands still when Python's lock is never given back."""

import threading

from trainer.contract.ranks.progress import ProgressCell

SECONDS = 0.5


class Ticker:
    """Ticks from `start` to `stop`; a daemon, so that it never holds up the end of a rank."""

    def __init__(self, cell: ProgressCell, seconds: float = SECONDS) -> None:
        self._cell, self._seconds = cell, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="orch-ticker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _tick(self) -> None:
        while True:
            self._cell.tick()
            if self._ended.wait(self._seconds):
                return
