"""Workers of pytest-xdist as forks of one process with the collected tests, whose imports take ten CPU seconds.

As a program with a path, this replaces the Python that execnet starts: it passes its streams to that process over a
socket and exits like the fork that received them. With two descriptors and arguments of pytest, it is that process;
without arguments of pytest, it collects nothing.
"""

import contextlib
import os
import random
import select
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[1]


def fork_workers(config: "pytest.Config", folder: Path) -> None:
    """Start the process, which ends with this one, and let it create the workers; its socket is in `folder`."""
    place, (lifeline, ours) = folder / "workers", os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(place))
        listener.listen()
        descriptors = [listener.fileno(), lifeline]
        words = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-m", config.option.markexpr, *config.args]
        process = subprocess.Popen(
            [sys.executable, __file__, *map(str, descriptors), *words],
            cwd=config.invocation_params.dir, pass_fds=descriptors, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    os.close(lifeline)
    process.returncode = 0  # it is never waited for
    config.add_cleanup(partial(os.close, ours))
    command = shlex.join([sys.executable, __file__, str(place)])
    config.option.tx = [f"popen//python={command}" for _ in config.option.tx]


# ---- replacement of a Python


def hand_over(place: str) -> int:
    """Pass the standard streams on; return the exit code of the process that received them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(place)
        socket.send_fds(link, [b"streams"], [0, 1, 2])
        return int(link.recv(16) or 1)


# ---- the process itself


def collect(words: Sequence[str]) -> bool:
    """Import all tests; return whether that succeeded."""
    import pytest

    return pytest.main(list(words)) == pytest.ExitCode.OK


def serve(listener: socket.socket, lifeline: int) -> None:
    forks: dict[int, tuple[int, socket.socket]] = {}  # handle of a fork -> its pid, and the socket for its exit code
    while True:
        for ready in select.select([listener, lifeline, *forks], [], [])[0]:
            if ready == lifeline:
                return
            if ready is listener:
                link, _ = listener.accept()
                streams = socket.recv_fds(link, 16, 3)[1]
                if (pid := os.fork()) == 0:
                    listener.close()
                    os.close(lifeline)
                    for _, other in forks.values():
                        other.close()
                    become_worker(streams)
                    return
                for stream in streams:
                    os.close(stream)
                forks[os.pidfd_open(pid)] = (pid, link)
            else:
                pid, link = forks.pop(ready)
                os.close(ready)
                with contextlib.suppress(BrokenPipeError), link:
                    link.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def become_worker(streams: Sequence[int]) -> None:
    """Execute the program that execnet sends to a new Python."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    random.seed()
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})


def main() -> None:
    sys.path[0] = str(ROOT)
    if not sys.argv[1].isdigit():
        sys.exit(hand_over(sys.argv[1]))
    listener, lifeline, *words = sys.argv[1:]
    if words and not collect(words):  # a module that failed would be an empty one in the workers: begin anew
        os.execv(sys.executable, [sys.executable, __file__, listener, lifeline])
    serve(socket.socket(fileno=int(listener)), int(lifeline))


if __name__ == "__main__":
    main()
