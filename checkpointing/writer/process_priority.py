"""How the writer behaves beside a training rank: behind it in every queue, no Slurm signals, gone with its owner."""

import contextlib
import ctypes
import os
import platform
import select
import signal
import threading

_NICE = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273}
_BEST_EFFORT_LAST = (2 << 13) | 7
_WHOLE_PROCESS = 1
_SET_PDEATHSIG = 1

_IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


def ignore_slurm_signals() -> None:
    """Ignore what Slurm and a terminal send to everybody: only the owner's end is the writer's."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)


def lower_priority() -> None:
    """Lowest place among the ordinary ones for the processor and for the disk; refusals are taken as they are."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        # Set before any thread is started: it is a property of threads, and they inherit it.
        ctypes.CDLL(None).syscall(number, _WHOLE_PROCESS, 0, _BEST_EFFORT_LAST)


def exit_with_parent(parent: int, *, by_signal: bool) -> None:
    """End this process when `parent` does.

    A thread watches the parent itself. `by_signal` has the kernel kill too, even when this process is stopped; that
    ties it to the parent's *thread* that started it, so it is only for parents whose starting thread lives on.
    """
    if by_signal:
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    try:
        handle = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(0)
    if os.getppid() != parent:  # it died before it could be watched
        os._exit(0)
    threading.Thread(target=_wait_and_exit, args=(handle,), name="parent", daemon=True).start()


def _wait_and_exit(handle: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()
    os._exit(0)
