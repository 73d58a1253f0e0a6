"""Signals that Slurm sends to every process of a step: which processes outlive them, and what their children inherit.

Only agents act on them. An ignored signal would stay ignored in every program that a rank starts, and a blocked one
blocked, so a process outlives them by handlers that do nothing: `exec` resets those, and hooks reset them in forks.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType

STEP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
"""Warnings before a time limit (orch asks for USR2, other tools for USR1), the end of a step, and `scancel -s INT`."""

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def block_step_signals() -> Iterator[None]:
    """Hold the signals back while a child is started: it inherits the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STEP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_step_signals() -> None:
    """End what `block_step_signals` began, in the child."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STEP_SIGNALS)


def outlive_step_signals() -> None:
    """Do nothing on these signals from now on, in this process only: its children have the defaults."""
    _reset_in_children()
    for number in STEP_SIGNALS:
        signal.signal(number, _do_nothing)
        signal.siginterrupt(number, False)  # libraries that do not expect EINTR
    unblock_step_signals()


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The handler of a process that outlives the signal."""


@cache
def _reset_in_children() -> None:
    """Have every fork begin with the defaults; a signal that comes in between waits for them."""
    own = threading.local()

    def hold() -> None:
        own.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STEP_SIGNALS)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, own.mask)

    def reset() -> None:
        for number in STEP_SIGNALS:
            if signal.getsignal(number) is _do_nothing:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=reset)
