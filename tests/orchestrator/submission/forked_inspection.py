"""The process that imports a workload before a submit, as a fork of a process that has imported torch."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from tests.warm_root import start_warm

PROGRAM = "trainer.worker.startup.inspect_workload"


def _start(command: list[str], *, env: Mapping[str, str], pass_fds: Sequence[int], **_: Any) -> SimpleNamespace:
    """Replacement of `user_code.subprocess.Popen`."""
    assert command == [sys.executable, "-P", "-m", PROGRAM, str(pass_fds[0])]
    child = start_warm(f"{__name__}:main", environ=env, descriptors=pass_fds)
    return SimpleNamespace(pid=child.pid, stdin=child.stdin.buffer, wait=lambda: None)


FORKING = SimpleNamespace(Popen=_start, PIPE=subprocess.PIPE)


def main() -> None:
    from trainer.worker.startup import inspect_workload  # it imports torch

    os.setsid()
    inspect_workload.main(sys.argv[1:])
