"""Rotated log that several processes append to."""

import logging
from contextlib import closing
from pathlib import Path

from trainer.protocol.logs.log_rotation import LogFile, LogsConfig


class RotatedLog(logging.Handler):
    """Handler for the controllers' log; opens the file for each line because daemons of several schedulers share it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        try:
            with closing(LogFile(self._path, LogsConfig())) as file:
                file.write(self.format(record).encode(errors="replace") + b"\n")
        except OSError:
            self.handleError(record)
