"""One host's half of the lock probe. Standard library alone: the other host runs it as text, by `python -c`.

As a program it reads commands from stdin, one a line, and answers each with one line that begins with `ANSWER`.
"""

import contextlib
import fcntl
import os
import socket
import sys
from pathlib import Path

ANSWER = "orch-locks:"
HELD, FREE, DONE = "held", "free", "done"


class LockPeer:
    """Locks on one file of this host's, and a second name of it made by link()."""

    def __init__(self, path: str) -> None:
        """The file must be there, and be no database: closing it drops all locks that this process has on it."""
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def do(self, command: str) -> str:
        """`who`, `lock`, `unlock`, `read`, `add TEXT`, `link` or `unlink`; raises OSError."""
        name, _, text = command.partition(" ")
        match name:
            case "who":
                return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
            case "lock":
                return self._lock()
            case "unlock":
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
                return DONE
            case "read":
                return os.pread(self._descriptor, 4096, 0).decode()
            case "add":
                os.pwrite(self._descriptor, text.encode(), os.fstat(self._descriptor).st_size)
                os.fsync(self._descriptor)
                return DONE
            case "link":
                return self._link()
            case "unlink":
                os.unlink(f"{self._path}.link")
                return DONE
        raise ValueError(f"no command: {command}")

    def _lock(self) -> str:
        """As SQLite does: one exclusive byte-range lock, not waited for."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except (BlockingIOError, PermissionError):
            return HELD
        return FREE

    def _link(self) -> str:
        mine = f"{self._path}.{os.getpid()}"
        os.close(os.open(mine, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        try:
            with contextlib.suppress(FileExistsError):
                os.link(mine, f"{self._path}.link")
            return FREE if os.stat(mine).st_nlink == 2 else HELD
        finally:
            os.unlink(mine)

    def close(self) -> None:
        os.close(self._descriptor)


def main(path: str) -> None:
    peer = LockPeer(path)
    for line in sys.stdin:
        try:
            answer = peer.do(line.strip())
        except OSError as error:
            answer = f"failed {error.strerror}"
        sys.stdout.write(f"{ANSWER}{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
