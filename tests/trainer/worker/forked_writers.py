"""Checkpoint writers forked from one process, because starting their program takes longer than their work.

Run as a program this is that process: `forked_writers.py SOCKET` forks a writer for every pair of a connection and a
memory that it receives over SOCKET, and ends with the other end of it.
"""

import os
import signal
import socket
import subprocess
import sys
from functools import partial

from checkpointing.writer import process
from tests.warm_root import as_program


class ForkedWriters:
    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "tests.trainer.worker.forked_writers", str(theirs.fileno())]
        with theirs:
            subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def connection(self) -> tuple[int, int]:
        memory = os.memfd_create("orch-arena", os.MFD_CLOEXEC)
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"w"], [theirs.fileno(), memory])
        return memory, ours.detach()


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no one waits for a writer
    while descriptors := socket.recv_fds(control, 1, 2, socket.MSG_CMSG_CLOEXEC)[1]:
        if os.fork() == 0:
            control.close()
            as_program(partial(process.main, ["one", *map(str, descriptors), str(os.getppid()), ""]))
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    main()
