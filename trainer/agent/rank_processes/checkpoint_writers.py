"""The checkpoint writers of one node: one process and one memory file per local rank, both kept across generations.
The agent owns them because a rank's copies of its state must outlive the rank for a restart in place to use.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping

from checkpointing.python_command import module_command
from trainer.protocol.messages.ranks import packet_pair
from trainer.protocol.rank_progress.progress import block_step_signals

_LEAVE_SECONDS = 1.0


class CheckpointWriter:
    """Writer of one rank. A dead process is replaced, with the same memory, when the next generation requests it."""

    def __init__(self, rank: int, environ: Mapping[str, str], output: int) -> None:
        """Must be called in the main thread: the kernel ties the parent-death signal to the starting thread."""
        self._rank, self._environ, self._output = rank, environ, output
        self._memory = os.memfd_create(f"orch-arena-{rank}", os.MFD_CLOEXEC)
        self._start()

    def _start(self) -> None:
        self._control, theirs = packet_pair()
        self._control.setblocking(False)
        self._untaken = 0  # connections that the writer has not accepted yet
        # The module is named, not imported: agents do not load its dependencies.
        command = [*module_command("checkpointing.writer.process"), "many"]
        command += [str(theirs.fileno()), str(self._memory), str(os.getpid()), str(self._rank)]
        with theirs, block_step_signals():
            self._process = subprocess.Popen(
                command,
                env=dict(self._environ),
                pass_fds=[theirs.fileno(), self._memory],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
            )

    @property
    def pid(self) -> int | None:
        """Return the PID of the writer process, or None once it has exited."""
        return self._process.pid if self._process.poll() is None else None

    @contextlib.contextmanager
    def connection(self) -> Iterator[list[int]]:
        """Yield descriptors for this generation's rank (the memory and its end of a new connection), then close them.
        Any connection from an earlier generation ends. Yield no descriptors if no writer is available; ranks then
        create their own.
        """
        theirs = self._connect_or_restart()
        if theirs is None:
            yield []
            return
        with theirs:
            yield [self._memory, theirs.fileno()]

    def _connect_or_restart(self) -> socket.socket | None:
        with contextlib.suppress(OSError):
            if self._listens():
                return self._connect()
        with contextlib.suppress(OSError):
            self._end()
            self._start()
            return self._connect()
        return None

    def _connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with ours:
            try:
                socket.send_fds(self._control, [b"c"], [ours.fileno()])
            except OSError:
                theirs.close()
                raise
        self._untaken += 1
        return theirs

    def _listens(self) -> bool:
        """Return whether the writer is alive and has accepted every connection so far, as a stopped one would not."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._untaken and self._control.recv(1):
                self._untaken -= 1
        return self.pid is not None and not self._untaken

    def _end(self) -> None:
        self._control.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it is stuck in the kernel because of a dead disk
                self._process.wait(_LEAVE_SECONDS)

    def dismiss(self) -> None:
        """Ask the writer to exit by closing its socket."""
        self._control.close()

    def close(self) -> None:
        """Kill the writer if it is still running, and release the memory."""
        self._end()
        os.close(self._memory)


class CheckpointWriters:
    def __init__(self, ranks: range, environ: Mapping[str, str], output: int) -> None:
        """`output` is the descriptor for the writers' stdout and stderr."""
        self._writers = [CheckpointWriter(rank, environ, output) for rank in ranks]
        self._first = ranks.start

    def connection(self, local_rank: int) -> "contextlib.AbstractContextManager[list[int]]":
        """Yield the descriptors of one local rank's writer, as `CheckpointWriter.connection` does."""
        return self._writers[local_rank].connection()

    def writer_pid(self, rank: int) -> int | None:
        return self._writers[rank - self._first].pid

    def pids(self) -> set[int]:
        return {checkpoint_writer.pid for checkpoint_writer in self._writers if checkpoint_writer.pid is not None}

    async def close(self) -> None:
        """End all writers and release their memory."""
        for checkpoint_writer in self._writers:
            checkpoint_writer.dismiss()
        for _ in range(int(_LEAVE_SECONDS * 100)):
            if not self.pids():
                break
            await asyncio.sleep(0.01)
        for checkpoint_writer in self._writers:
            checkpoint_writer.close()
