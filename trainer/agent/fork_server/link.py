"""The agent's side of its fork server: starts it, receives its messages and detects its death."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from checkpointing.python_command import module_command
from trainer.agent.processes.proc import read_activity
from trainer.protocol.failures.rank_end import exit_words
from trainer.protocol.messages.ranks import (
    FROM_FORK_SERVER,
    FromForkServer,
    SignalRanks,
    StartRank,
    ToForkServer,
    packet_pair,
    receive_packet,
    send_packet,
)
from trainer.protocol.rank_progress.progress import block_step_signals
from trainer.protocol.run_dir import AttemptDir

_DEFAULTS = {"PYTHONHASHSEED": "0"}
"""Environment variables for ranks, unless `env` or the job's environment sets them.
Python draws its hash seed when the interpreter starts, and the seed determines the order of a set of strings. Every
attempt, node, fork and restore test must therefore use the same seed.
"""


class ForkServerLink:
    """Fork server process. A new link replaces one whose process is lost."""

    def __init__(
        self,
        *,
        attempt: AttemptDir,
        environ: Mapping[str, str],
        output: int,
        on_message: Callable[[FromForkServer, list[int]], None],
        on_lost: Callable[[str], None],
        python: str = sys.executable,
    ) -> None:
        """`output` is the descriptor for its stdout and stderr.
        Must be called in the main thread: the kernel ties the parent-death signal to the starting thread.
        """
        self._on_message, self._on_lost = on_message, on_lost
        self._lost = self._listening = False
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = packet_pair()
        # A fork server that reads nothing for this long counts as dead.
        self._socket.settimeout(5.0)
        try:
            self._process = self._start(python, theirs, attempt, {**_DEFAULTS, **environ}, output)
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._death = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._socket, self._read)
        self._loop.add_reader(self._death, self._on_exit)

    @staticmethod
    def _start(
        python: str, theirs: socket.socket, attempt: AttemptDir, environ: Mapping[str, str], output: int
    ) -> "subprocess.Popen[bytes]":
        command = module_command("trainer.agent.fork_server.server", python)
        command += [str(theirs.fileno()), str(os.getpid()), str(attempt.path)]
        quiet = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        with block_step_signals():
            return subprocess.Popen(
                command,
                env={**environ, **quiet},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lost(self) -> bool:
        return self._lost

    def stopped(self) -> bool:
        signs = None if self._lost else read_activity(self._process.pid)
        return signs is not None and signs.state in "Tt"

    def start_rank(self, order: StartRank, descriptors: Sequence[int]) -> None:
        """Order one rank; a fork server that cannot receive the order counts as lost."""
        self._send(order, descriptors)

    def signal_ranks(self, number: int) -> None:
        self._send(SignalRanks(number=number))

    def _send(self, message: ToForkServer, descriptors: Sequence[int] = ()) -> None:
        if self._lost:
            return
        try:
            send_packet(self._socket, message, descriptors)
        except OSError as error:
            self._lose(f"cannot send to it: {error}")

    def _read(self) -> None:
        message, descriptors = receive_packet(self._socket, FROM_FORK_SERVER)
        if message is None:
            self._loop.remove_reader(self._socket)
            return
        self._listening = True
        self._on_message(message, descriptors)

    def _on_exit(self) -> None:
        self._lose("")

    def kill(self, reason: str) -> None:
        """Kill a fork server that has not carried out an order."""
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self._lost:
            return
        self._lost = True
        self._drain()
        self._process.kill()
        status = self._process.wait(timeout=10)
        self._close()
        self._on_lost(reason or exit_words(status, -status if status < 0 else None))

    def _drain(self) -> None:
        """Read the last messages of a dead fork server before its death is reported."""
        self._socket.setblocking(False)
        try:
            while True:
                message, descriptors = receive_packet(self._socket, FROM_FORK_SERVER)
                if message is None:
                    return
                self._on_message(message, descriptors)
        except OSError:
            return

    def _close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_reader(self._death)
        self._socket.close()
        os.close(self._death)

    async def stop(self) -> bool:
        """End the fork server, and return whether it left no ranks behind, having reaped them all or started none."""
        if self._lost:
            return False
        # When its socket closes, it kills its remaining ranks and exits.
        self._lost = True
        self._close()
        if not self._listening:  # it is still importing and has no ranks
            self._process.kill()
        for _ in range(250):
            if self._process.poll() is not None:
                return self._process.returncode == 0 or not self._listening
            await asyncio.sleep(0.01)
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(timeout=10)
        return False
