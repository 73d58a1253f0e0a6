"""Whether locks work: between two processes of this host, and between this host and another one."""

import os
import secrets
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from orchestrator.registry.locks import lock_peer
from orchestrator.registry.locks.lock_peer import ANSWER, DONE, FREE, HELD, LockPeer

PATIENCE = 90.0
"""Seconds for the other host's first answer, which may wait for Slurm; later ones come at once."""
_LOCAL_PATIENCE = 20.0

PeerCall = Callable[[str], str]
"""Gives one half of the probe a command, and returns its answer; raises ProbeFailed."""


class ProbeFailed(Exception):
    """The other half gave no answer: nothing is known."""


@contextmanager
def probe_file(registry: Path) -> Iterator[Path]:
    """A file of its own beside the registry.

    WARNING: closing a descriptor drops every POSIX lock that the process has on that file: never the registry itself.
    """
    path = registry.with_name(f".{registry.name}.{secrets.token_hex(6)}.probe")
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        path.with_name(f"{path.name}.link").unlink(missing_ok=True)


@contextmanager
def other_peer(launcher: Sequence[str], path: Path, patience: float = PATIENCE) -> Iterator[PeerCall]:
    """Another process with its half of the probe, started by `launcher` (nothing: on this host)."""
    source = Path(lock_peer.__file__).read_text()
    command = [*launcher, *_words(launcher, [sys.executable, "-I", "-S", "-c", source, str(path)])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    stdin = process.stdin

    def say(text: str) -> str:
        try:
            stdin.write(f"{text}\n".encode())
            stdin.flush()
        except OSError as error:
            raise ProbeFailed(_why(process)) from error
        return _answer(process, patience)

    try:
        yield say
    finally:
        process.kill()
        process.communicate()


def _words(launcher: Sequence[str], command: list[str]) -> list[str]:
    """ssh gives what it is told to a shell."""
    return [shlex.join(command)] if launcher[:1] == ("ssh",) else command


def _answer(process: "subprocess.Popen[bytes]", patience: float) -> str:
    assert process.stdout is not None
    give_up, heard, poll = time.monotonic() + patience, b"", select.poll()
    poll.register(process.stdout, select.POLLIN)
    while not heard.endswith(b"\n") or ANSWER.encode() not in heard:
        if not poll.poll(1000 * max(0.0, give_up - time.monotonic())):
            raise ProbeFailed(f"no answer within {patience:.0f} s")
        data = os.read(process.stdout.fileno(), 4096)
        if not data:
            raise ProbeFailed(_why(process))
        heard += data
    return heard.decode(errors="replace").rpartition(ANSWER)[2].strip()


def _why(process: "subprocess.Popen[bytes]") -> str:
    assert process.stderr is not None
    process.kill()
    lines = process.stderr.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"{process.args!s:.40} ended without an answer"


def lock_fault(here: PeerCall, there: PeerCall) -> str | None:
    """What is wrong with the locks between two halves of a probe; None when each always stops the other."""
    written = ""
    for (name, holder), (other, rival) in (
        (("this host", here), ("the other one", there)),
        (("the other host", there), ("this one", here)),
    ):
        written += f"<{secrets.token_hex(4)}>"
        text = written[written.rindex("<") :]
        if (holder("lock"), rival("lock")) != (FREE, HELD):
            return f"a lock of {name} does not stop {other}"
        if (holder(f"add {text}"), holder("unlock"), rival("lock")) != (DONE, DONE, FREE):
            return f"a lock that {name} released still stops {other}"
        if rival("read") != written:
            return f"{other} does not see what {name} wrote under its lock"
        rival("unlock")
        if (holder("link"), rival("link")) != (FREE, HELD):
            return f"a name that {name} linked can be linked again by {other}"
        if (holder("unlink"), rival("link"), rival("unlink")) != (DONE, FREE, DONE):
            return f"a name that {name} removed is still there for {other}"
    return None


def locks_work(registry: Path) -> bool:
    """Whether locks beside `registry` stop a second process of this host, and their release lets it go on.

    Raises OSError when no file can be made there.
    """
    with probe_file(registry) as path:
        peer = LockPeer(str(path))
        try:
            with other_peer((), path, _LOCAL_PATIENCE) as there:
                return lock_fault(peer.do, there) is None
        except (OSError, ProbeFailed):
            return False
        finally:
            peer.close()
