"""Runs a check of a submit in a child process with a time limit, so that a hang or crash does not end the submit."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from trainer.contract.secrets.secret_redaction import in_use

NOTED_AFTER = 2.0
"""Seconds of waiting after which the user sees a note about the check."""
_LAST_WORDS = 4096


@dataclass(frozen=True, kw_only=True)
class ChildAnswer:
    """Findings of a child. `ended`: it finished in time; `died`: how it crashed, with its last line."""

    found: dict[str, Any] = field(default_factory=dict)
    ended: bool = False
    died: str = ""


class BoundedChild:
    """`python -P -m MODULE DESCRIPTOR`: it reads JSON from stdin and writes JSON objects, a line each, to DESCRIPTOR.

    The child and its own children are killed at the end of the block.
    """

    def __init__(self, module: str, order: Mapping[str, Any], environ: Mapping[str, str], what: str) -> None:
        """`what`: description of the check, for the user who waits."""
        self._redactor = in_use(environ)
        self._what, self._printed = what, tempfile.TemporaryFile()  # noqa: SIM115  # closed when the block is left
        self._answers, theirs = os.pipe()
        self._started = time.monotonic()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs)], env=dict(environ), pass_fds=[theirs],
                stdin=subprocess.PIPE, stdout=self._printed, stderr=self._printed, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(theirs)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died at once: `answer` reports its last words
            self._process.stdin.write(json.dumps(order).encode())
            self._process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._answers)
        self._printed.close()

    def answer(self, seconds: float, note: Callable[[str], None]) -> ChildAnswer:
        """Wait for the end of the child, at most `seconds` after its start; a long wait calls `note`."""
        text, noted, ended = b"", False, False
        while not ended and (left := self._started + seconds - time.monotonic()) > 0:
            if not noted and time.monotonic() - self._started >= NOTED_AFTER:
                noted = True
                note(f"{self._what} (at most {seconds:.0f} s)")
            ready, _, _ = select.select([self._answers], [], [], min(left, 0.2))
            if ready:
                part = os.read(self._answers, 1 << 16)
                text, ended = text + part, not part
        lines = [json.loads(line) for line in text.splitlines() if line.endswith(b"}")]
        found = {key: value for line in lines for key, value in line.items()}
        died = "" if found.pop("done", False) or not ended else self._last_words()
        return ChildAnswer(found=found, ended=ended and not died, died=died)

    def _last_words(self) -> str:
        status = self._process.wait()
        self._printed.seek(max(0, self._printed.seek(0, os.SEEK_END) - _LAST_WORDS))
        lines = [line.strip() for line in self._printed.read().decode(errors="replace").splitlines() if line.strip()]
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        return self._redactor.text(f"{how}: {lines[-1]}" if lines else how)
