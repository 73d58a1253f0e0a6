"""Commands of `orch` as forks of this process: to start a new one takes longer than what most of them do."""

import gc
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.cli import main
from orchestrator.registry.store import Store
from tests.warm_root import as_program

_MOST_DESCRIPTORS = 4096


class ForkedOrch(subprocess.Popen[str]):
    def __init__(self, store: Store, words: Sequence[str], *, more: Mapping[str, str] | None = None, **streams: Any):
        store.close()  # a fork must not have an open database
        environ = {**os.environ, **(more or {})}
        super().__init__(list(words), text=True, env=environ, **streams)

    def _execute_child(  # type: ignore[override]
        self, words: list[str], executable: Any, preexec: Any, close: Any, keep: Any, cwd: Any,
        environ: Mapping[str, str], *rest: Any,
    ) -> None:  # fmt: skip
        pipes = rest[3:9]
        streams = [theirs if theirs != -1 else number for number, theirs in enumerate((pipes[0], pipes[3], pipes[5]))]
        if (pid := os.fork()) == 0:
            as_program(lambda: _begin(words, streams, environ))
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _begin(words: list[str], streams: list[int], environ: Mapping[str, str]) -> None:
    gc.disable()  # what belongs to this process's parent is left alone
    for number, stream in enumerate([os.dup(stream) for stream in streams]):
        os.dup2(stream, number)
    os.closerange(3, _MOST_DESCRIPTORS)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["orch", *words]
    main.main()


def on_a_terminal(store: Store, *words: str) -> str:
    ours, theirs = pty.openpty()
    more = {"COLUMNS": "200", "TERM": "xterm", "NO_COLOR": "1"}
    child = ForkedOrch(store, words, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL, more=more)
    os.close(theirs)
    drawn = b""
    while True:
        try:
            block = os.read(ours, 65536)
        except OSError:  # how Linux says that the other side of a terminal is closed
            break
        drawn += block
    os.close(ours)
    assert child.wait(timeout=30) == 0, drawn
    return drawn.decode()
