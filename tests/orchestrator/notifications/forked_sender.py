"""The sender of notifications as a fork of this process, because its imports take longer than its work."""

import os
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import BinaryIO

from orchestrator.notifications import channels
from tests.warm_root import as_program

COMMAND = [sys.executable, "-P", "-m", "orchestrator.notifications.channels"]


class ForkedSender:
    """The part of `subprocess.Popen` that the controller uses."""

    def __init__(
        self, command: list[str], *, stdin: BinaryIO, stdout: int, stderr: int, env: Mapping[str, str], cwd: str,
        start_new_session: bool,
    ) -> None:  # fmt: skip
        assert (command, stdout, stderr, cwd, start_new_session) == (
            COMMAND, subprocess.PIPE, subprocess.DEVNULL, "/", True,
        )  # fmt: skip
        self.returncode: int | None = None
        answer, written = os.pipe()
        if (pid := os.fork()) == 0:
            as_program(lambda: _send(stdin.fileno(), written, env))
        os.close(written)
        self.pid, self.stdout = pid, open(answer, "rb")  # noqa: SIM115  # its reader closes it

    def poll(self) -> int | None:
        return self._ended(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        return self._ended(0)

    def _ended(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _send(given: int, written: int, environ: Mapping[str, str]) -> None:
    os.setsid()
    os.chdir("/")
    os.environ.clear()
    os.environ.update(environ)
    for number, stream in enumerate((given, written, os.open(os.devnull, os.O_WRONLY))):
        os.dup2(stream, number)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    channels.main()


FORKING = SimpleNamespace(Popen=ForkedSender, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
"""Replacement for `delivery.subprocess`."""
