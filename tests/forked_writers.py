"""Checkpoint writers as forks of their parents, because their imports take longer than their writes.

Their parents, arguments, descriptors and environments are the same. Writers with another interpreter, module path or
an environment too large for a fork are started as programs.
"""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from checkpointing.writer import process
from tests.warm_root import as_program, become, has_room

_PROGRAM = [sys.executable, "-P", "-m", process.__name__]
_PATH = os.environ.get("PYTHONPATH")
execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]
"""Original method, which starts the program."""


def fork_writers() -> None:
    """Make writers of this process and its forks forks of their parents."""
    subprocess.Popen._execute_child = _fork_or_execute  # type: ignore[attr-defined]


def _fork_or_execute(
    child: Any, words: Any, executable: Any, preexec: Any, close: Any, keep: Sequence[int], cwd: Any,
    environ: Mapping[str, str] | None, *rest: Any,
) -> None:  # fmt: skip
    """Replacement of `Popen._execute_child`; the ends of the pipes follow three other arguments."""
    is_usual = (os.environ if environ is None else environ).get("PYTHONPATH") == _PATH
    if list(words[:4]) != _PROGRAM or not is_usual or not (environ is None or has_room(environ)):
        execute_child(child, words, executable, preexec, close, keep, cwd, environ, *rest)
        return
    pipes = rest[3:9]
    streams = [theirs if theirs != -1 else number for number, theirs in enumerate((pipes[0], pipes[3], pipes[5]))]
    if (pid := os.fork()) == 0:
        as_program(lambda: _begin(words[4:], streams, environ, keep))
    child.pid, child._child_created = pid, True
    child._close_pipe_fds(*pipes)


def _begin(words: list[str], streams: list[int], environ: Mapping[str, str] | None, keep: Sequence[int]) -> None:
    gc.disable()  # what belongs to this process's parent is left alone
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    become(environ, (streams[0], streams[1], streams[2]), keep)
    process.main(words)
