"""The process that imports torch and all of orch once for all workers; other warm processes are its forks.

As a program, this is that process. It receives orders {call, arguments, environ, cwd} on sockets, with descriptors for
stdin, stdout, the exit code and the call's own needs; the numbers of the latter follow the arguments in sys.argv.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import pkgutil
import random
import select
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from setproctitle import getproctitle

ROOT = Path(__file__).resolve().parents[1]
MOST = 1 << 20
"""Maximum bytes of an order, which contains an environment."""
HASH_SEED = os.environ.get("PYTHONHASHSEED", "0")
"""Hash seed of all warm processes: a fork has its parent's, regardless of its environment."""
_ROOM = {"ROOM": "-" * 100_000}
"""Placeholder in the initial environment, to be overwritten with the environments of forks."""
_PLACE = "ORCH_TESTS_WARM_ROOT"
_place = os.environ.pop(_PLACE, "")
"""Address of the root shared by all workers; empty if each process starts its own."""
_links: dict[int, socket.socket] = {}
"""Link to the root by the pid of this process."""


class WarmChild:
    """A fork of the root, like `subprocess.Popen` with pipes."""

    def __init__(self, pid: int, stdin: int, stdout: int, status: int) -> None:
        self.pid, self._status = pid, status
        self.stdin, self.stdout = open(stdin, "w"), open(stdout)  # noqa: SIM115
        atexit.register(self.communicate, 30.0)

    def communicate(self, timeout: float | None = None) -> None:
        """Close its stdin and wait until it has exited. Raises TimeoutExpired."""
        if self.stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()
        if not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a warm process", timeout or 0.0)
        os.close(self._status)


def start_warm(
    call: str, arguments: Sequence[str] = (), *, environ: Mapping[str, str], descriptors: Sequence[int] = ()
) -> WarmChild:
    """Start `module:function` like a program with these arguments and this environment."""
    link = _links.get(os.getpid()) or _links.setdefault(os.getpid(), _link())
    stdin, written = os.pipe()
    read, stdout = os.pipe()
    status, theirs = os.pipe()
    order = {"call": call, "arguments": list(arguments), "environ": dict(environ), "cwd": str(ROOT)}
    socket.send_fds(link, [json.dumps(order).encode()], [stdin, stdout, theirs, *descriptors])
    for descriptor in (stdin, stdout, theirs):
        os.close(descriptor)
    return WarmChild(int(link.recv(64)), written, read, status)


def share_root(folder: Path, *, imports_now: bool) -> None:
    """Start a root for all processes started from now on with this environment; it ends with this process.

    It imports when it gets its first order, because many runs of tests need none of it, or now.
    """
    os.environ[_PLACE] = str(folder / "root")
    _links[os.getpid()] = _start_root(os.environ[_PLACE], imports_now=imports_now)


def _link() -> socket.socket:
    if not os.access(_place, os.W_OK):  # there is none, or this is another user
        return _start_root()
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)
    link.connect(_place)
    atexit.register(link.close)
    return link


def _start_root(place: str = "", *, imports_now: bool = False) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)
    with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(place)  # an empty one is a name that nobody knows
        listener.listen()
        root = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "tests.warm_root"),
                *(str(theirs.fileno()), str(listener.fileno()), str(int(imports_now))),
            ],
            cwd=ROOT, pass_fds=[theirs.fileno(), listener.fileno()], stdin=subprocess.DEVNULL,
            # Titles must not cover the environment, and what has threads cannot fork.
            env={
                **os.environ, **_ROOM, "PYTHONPATH": str(ROOT), "SPT_NOENV": "1", "OMP_NUM_THREADS": "1",
                "PYTHONHASHSEED": HASH_SEED,
            },
        )  # fmt: skip
    root.returncode = 0  # it ends with its link, and nobody waits for it
    atexit.register(ours.close)
    return ours


# ---- the process itself, and its forks


def skip_absent_numpy() -> None:
    """Make imports of a missing NumPy fail fast: torch tries hundreds in every rank, each in all folders."""
    if importlib.util.find_spec("numpy") is None:
        sys.modules["numpy"] = None  # type: ignore[assignment]  # as `import` documents it


def as_program(main: Callable[[], object]) -> NoReturn:
    """Run `main` in a forked child as its main program."""
    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stderr.write("" if isinstance(end.code, int | None) else f"{end.code}\n")
    except BaseException:  # noqa: BLE001  # outermost edge: a forked child must end here, and say why
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def become(environ: Mapping[str, str] | None, streams: tuple[int, int, int], keep: Sequence[int] = ()) -> None:
    """Take on this environment and these standard streams; of all other descriptors, keep only `keep`.

    Without an environment it keeps its own.

    Descriptors are turned to nothing, not closed: what owns them here closes them one day, when they would be others.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, stream in enumerate([os.dup(stream) for stream in streams]):
        os.dup2(stream, number)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that the folder was read with
            if descriptor > 2 and descriptor not in (*keep, nothing):
                os.fstat(descriptor)
                os.dup2(nothing, descriptor, inheritable=False)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    if environ is not None:
        os.environ.clear()
        os.environ.update(environ)
        _show_environment(environ)
    random.seed()


def has_room(environ: Mapping[str, str]) -> bool:
    """Return whether this environment fits into the memory that /proc/PID/environ shows."""
    begin, end = _place_of_environment()
    return len(_block(environ)) <= end - begin


def _show_environment(environ: Mapping[str, str]) -> None:
    """Write the environment into the memory that /proc/PID/environ shows, by which processes of a job are found."""
    assert has_room(environ), "the environment has no room in that of the warm process"
    begin, end = _place_of_environment()
    ctypes.memmove(begin, _block(environ).ljust(end - begin, b"\0"), end - begin)


def _place_of_environment() -> tuple[int, int]:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[47]), int(fields[48])  # `env_start` and `env_end` of proc(5)


def _block(environ: Mapping[str, str]) -> bytes:
    return b"".join(f"{name}={value}".encode() + b"\0" for name, value in environ.items())


def _import_all() -> None:
    """Import everything that a rank, agent, job or verb may need, without torch's warning about a missing NumPy."""
    from trainer.protocol.config import JobConfig
    from trainer.worker.startup.preimport import import_lazy_parts, import_workload

    import_lazy_parts()
    import_workload(JobConfig())
    skip_absent_numpy()
    for package in ("orchestrator", "checkpointing", "trainer.protocol", "trainer.agent"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            importlib.import_module(module.name)
    from tests.forked_writers import fork_writers

    fork_writers()


def _begin(order: dict[str, Any], descriptors: list[int]) -> None:
    stdin, stdout, _, *others = descriptors
    become(order["environ"], (stdin, stdout, 2), others)
    os.chdir(order["cwd"])
    module, _, function = order["call"].partition(":")
    sys.argv = [module, *order["arguments"], *map(str, others)]
    getattr(importlib.import_module(module), function)()


def _import_all_and_freeze() -> None:
    gc.disable()
    _import_all()
    gc.freeze()
    gc.enable()


def main() -> None:
    first, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    getproctitle()  # it finds the place of titles by the environment, which forks replace
    links = {first.fileno(): first}
    forks: dict[int, tuple[int, int]] = {}  # handle of a fork -> its pid, and where its end is told
    if is_warm := sys.argv[3] == "1":
        _import_all_and_freeze()
    while first.fileno() in links:
        for ready in select.select([listener, *links, *forks], [], [])[0]:
            if ready is listener:
                link = listener.accept()[0]
                links[link.fileno()] = link
            elif ready in forks:
                pid, status = forks.pop(ready)
                os.waitpid(pid, 0)
                os.close(status)
                os.close(ready)
            else:
                message, descriptors, _, _ = socket.recv_fds(links[ready], MOST, 8)
                if not message:
                    links.pop(ready).close()
                    continue
                if not is_warm:
                    _import_all_and_freeze()
                    is_warm = True
                if (pid := os.fork()) == 0:
                    as_program(partial(_begin, json.loads(message), descriptors))
                for descriptor in (*descriptors[:2], *descriptors[3:]):
                    os.close(descriptor)
                forks[os.pidfd_open(pid)] = (pid, descriptors[2])
                links[ready].send(str(pid).encode())


if __name__ == "__main__":
    main()
