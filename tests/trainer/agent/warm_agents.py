"""Agents as forks of one process that has imported torch, and fork servers as forks of their agents.

Started as programs, both import for seconds before they do what most tests are about: of the work of a small job that
is two thirds. Tests of how the real processes start use `LocalJob` as it is. `main`
is that process, a fork of `tests/warm_root.py`.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

from tests.warm_children import fork_for_order, listen
from tests.warm_root import HASH_SEED, MOST, as_program, become, start_warm
from trainer.agent.fork_server.link import ForkServerLink
from trainer.protocol.rank_progress.progress import block_step_signals
from trainer.protocol.run_dir import AttemptDir

_START_PROGRAM = ForkServerLink._start
FIRST = "WARM_AGENT_FIRST"
"""The variable with code that an agent runs first: a test may change its limits, or what it calls."""


class ForkedProcess:
    """As much of `subprocess.Popen` as a test or an agent uses, for a process that was not started by it."""

    stdin: IO[bytes] | None = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def _ended(self, seconds: float | None) -> int | None:
        """Its exit code, waited for so long."""
        raise NotImplementedError

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._ended(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._ended(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmAgent(ForkedProcess):
    """An agent: how it ends comes out of a pipe."""

    def __init__(self, pid: int, status: int) -> None:
        super().__init__(pid)
        self._status = status

    def _ended(self, seconds: float | None) -> int | None:
        ready, _, _ = select.select([self._status], [], [], seconds)
        if not ready:
            return None
        code = int(os.read(self._status, 16))
        os.close(self._status)
        return code


class WarmAgents:
    """The running process, asked for one agent at a time; `orders` is its socket for `tests/warm_children.py`."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._link, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)
        listener, self.orders = listen()
        with theirs, listener:
            descriptors = [theirs.fileno(), listener.fileno()]
            self._process = start_warm(f"{__name__}:main", environ=os.environ, descriptors=descriptors)

    def start(self, run_dir: Path, environ: Mapping[str, str], log: int) -> WarmAgent:
        """The agent of attempt 1, in a session of its own, with this environment and its output in `log`."""
        status, theirs = os.pipe()
        order = json.dumps({"run_dir": str(run_dir), "environ": dict(environ)}).encode()
        socket.send_fds(self._link, [order], [log, theirs])
        os.close(theirs)
        return WarmAgent(int(self._link.recv(64)), status)

    def close(self) -> None:
        self._link.close()
        self._process.communicate(30)
        shutil.rmtree(Path(self.orders).parent)


@contextlib.contextmanager
def warm_agents() -> Iterator[WarmAgents]:
    made = WarmAgents()
    try:
        yield made
    finally:
        made.close()


# ---- the process itself


def serve(link: socket.socket, listener: socket.socket) -> None:
    """Fork agents, and tell how they have ended, and what is ordered, until nobody asks any more."""
    forks: dict[int, tuple[int, int]] = {}  # handle of a fork -> its pid, and where its end is told
    while True:
        for ready in select.select([link.fileno(), listener.fileno(), *forks], [], [])[0]:
            if ready in forks:
                pid, status = forks.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):  # its test is over
                    os.write(status, str(code).encode())
                os.close(status)
                os.close(ready)
                continue
            if ready == listener.fileno():
                pid, told = fork_for_order(listener)
                forks[os.pidfd_open(pid)] = (pid, told)
                continue
            message, descriptors, _, _ = socket.recv_fds(link, MOST, 2)
            if not message:
                return
            log, status = descriptors
            if (pid := os.fork()) == 0:
                as_program(partial(become_agent, json.loads(message), log))
            os.close(log)
            forks[os.pidfd_open(pid)] = (pid, status)
            link.send(str(pid).encode())


def become_agent(order: dict[str, Any], log: int) -> None:
    from trainer.agent.main import run_agent

    os.setsid()
    become(order["environ"], (os.open(os.devnull, os.O_RDONLY), log, log))
    ForkServerLink._start = staticmethod(start_fork_server)  # type: ignore[assignment,method-assign]
    exec(os.environ.pop(FIRST, ""), {})
    run_agent(order["run_dir"], "1")


class ForkServerProcess(ForkedProcess):
    """A fork server, to its agent: a child."""

    def _ended(self, seconds: float | None) -> int | None:
        handle = os.pidfd_open(self.pid)
        try:
            if not select.select([handle], [], [], seconds)[0]:
                return None
        finally:
            os.close(handle)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def start_fork_server(
    python: str, theirs: socket.socket, attempt: AttemptDir, environ: Mapping[str, str], output: int
) -> "ForkServerProcess | subprocess.Popen[bytes]":
    """In the place of ForkServerLink's own: the same process, less its imports, unless they depend on the job."""
    from trainer.agent.fork_server import server

    own = {"PYTHONPATH": os.environ.get("PYTHONPATH"), "PYTHONHASHSEED": HASH_SEED}
    if python != sys.executable or any(environ.get(name) != value for name, value in own.items()):
        return _START_PROGRAM(python, theirs, attempt, environ, output)
    words = [str(theirs.fileno()), str(os.getpid()), str(attempt.path)]
    quiet = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

    def begin() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        become({**environ, **quiet}, (os.open(os.devnull, os.O_RDONLY), output, output), [theirs.fileno()])
        server.main(words)

    with block_step_signals():
        if (pid := os.fork()) == 0:
            as_program(begin)
    return ForkServerProcess(pid)


def main() -> None:
    serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:3]))
