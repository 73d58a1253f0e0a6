"""A process that outlives Slurm's signals, and its children, which have the defaults."""

import signal
import subprocess
import sys
import textwrap
import threading

import pytest

PROLOGUE = """
import multiprocessing, os, signal, subprocess, sys, threading, time
from trainer.protocol.rank_progress.progress import STEP_SIGNALS, outlive_step_signals

def status(text):
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    masks = [int(fields[name], 16) for name in ("SigBlk", "SigIgn")]
    return [name for name in ("USR1", "USR2", "TERM", "INT", "CONT")
            if any(mask >> (getattr(signal, "SIG" + name) - 1) & 1 for mask in masks)]

def sleep():
    time.sleep(60)

def own_status(_):
    return status(open("/proc/self/status").read())

outlive_step_signals()
"""
"""What every program of this file begins with."""

PROGRAMS = {
    "the process itself goes on": """
        for number in STEP_SIGNALS:
            os.kill(os.getpid(), number)
        time.sleep(0.05)
    """,
    "a process of multiprocessing that is terminated at once, or later": """
        for pause in [0] * 20 + [0.2]:
            child = multiprocessing.get_context("fork").Process(target=sleep)
            child.start()
            time.sleep(pause)
            child.terminate()
            child.join(20)
            assert child.exitcode == -signal.SIGTERM, child.exitcode
    """,
    "a pool that is left early": """
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.apply_async(time.sleep, (60,))
            assert pool.map(own_status, [0]) == [[]]
    """,
    "a pool of a process of a thread": """
        def work():
            with multiprocessing.get_context("fork").Pool(1) as pool:
                assert pool.map(own_status, [0]) == [[]]
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """,
    "programs": """
        text = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
        assert status(text) == [], status(text)
        assert subprocess.run(["timeout", "0.1", "sleep", "60"]).returncode == 124
        with subprocess.Popen(["sleep", "60"]) as child:
            child.terminate()
            assert child.wait(20) == -signal.SIGTERM
    """,
    "a child that handles SIGTERM itself": """
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        if (child := os.fork()) == 0:
            for _ in range(600):  # a signal just before one sleep runs its handler after it
                time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    """,
    "a grandchild that outlives them has children with the defaults": """
        if (child := os.fork()) == 0:
            outlive_step_signals()
            os.kill(os.getpid(), signal.SIGTERM)
            with multiprocessing.get_context("fork").Pool(1) as pool:
                os._exit(0 if pool.map(own_status, [0]) == [[]] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """,
}


def run(body: str) -> subprocess.CompletedProcess[str]:
    program = PROLOGUE + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", PROGRAMS)
def test_children_have_the_defaults(name):
    ended = run(PROGRAMS[name])
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_signal_that_comes_during_a_fork_reaches_parent_and_child():
    from trainer.protocol.rank_progress.progress import block_step_signals

    handled: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: handled.append(number))
    try:
        with block_step_signals():
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # the mask is the thread's
            assert handled == []
        assert handled == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
