"""The progress cell: consistent readings from another process, and a stop flag the other way."""

import os
import select
import signal
import struct
import subprocess
import sys
import textwrap
import threading

import pytest

from trainer.protocol.rank_progress.progress import (
    Activity,
    Phase,
    ProgressCell,
    SentMessages,
    StageActivity,
    StopReason,
    decode_activity,
)


@pytest.fixture
def cell():
    cell = ProgressCell.create()
    yield cell
    cell.close()


def other_side(cell: ProgressCell) -> ProgressCell:
    """The same page as another process sees it."""
    return ProgressCell(os.dup(cell.descriptor))


def test_the_other_side_reads_what_was_written_and_asks_to_stop(cell):
    reader = other_side(cell)
    assert (reader.read().step, reader.read().phase, reader.read().loss) == (0, Phase.INIT, 0.0)
    assert cell.read_stop_request() == (StopReason.NONE, 0.0)
    reader.ask_stop(StopReason.TIME_LIMIT, deadline=12.5)
    assert cell.read_stop_request() == (StopReason.TIME_LIMIT, 12.5)
    cell.update(step=7, phase=Phase.BACKWARD, loss=0.1 + 0.2, saved_step=5, total_steps=9, generation=2)
    reading = reader.read()
    assert (reading.step, reading.phase, reading.loss) == (7, Phase.BACKWARD, 0.1 + 0.2)
    assert (reading.saved_step, reading.total_steps, reading.generation) == (5, 9, 2)
    reader.close()


def test_a_rank_of_a_pipeline_says_what_it_does_with_which_micro_batch(cell):
    cell.enter(Phase.FORWARD, 4, StageActivity(Activity.FORWARD, 1, 3))
    before = cell.read()
    assert (before.moment, str(before.moment)) == (StageActivity(Activity.FORWARD, 1, 3), "micro-batch 3, stage 1")
    cell.begin_moment(StageActivity(Activity.WAIT_FOR_GRADIENT, 1, 0))
    waits = cell.read()
    assert (waits.phase, waits.phase_at, waits.collective) == (Phase.FORWARD, before.phase_at, 4)
    assert waits.moved_at > before.moved_at
    assert str(waits.moment) == "waits for the gradient of micro-batch 0, stage 1"
    cell.begin_moment(StageActivity(Activity.REDUCE, 1, -1))
    assert str(cell.read().moment) == "reduces gradients, stage 1"
    cell.enter(Phase.OPTIMIZER)
    assert cell.read().moment is None


def test_a_rank_counts_what_its_stages_have_sent_from_the_begin_of_its_passes_on(cell):
    assert cell.sent() is None
    for step in (6, 7):
        cell.update(step=step)
        cell.begin_passes(2)
        assert cell.sent() == SentMessages(after_step=step, activations=(0, 0), gradients=(0, 0))
        cell.record_sent(0, False, 3)
        cell.record_sent(1, True, 0)
        told = cell.sent()
        assert told == SentMessages(after_step=step, activations=(4, 0), gradients=(0, 1))
        assert SentMessages.from_row(told.to_row()) == told
    assert SentMessages.from_row(()) is None
    assert SentMessages.from_row((1, 2)) is None


@pytest.mark.parametrize("activity", Activity)
def test_every_activity_has_a_number_that_older_readers_pass_over(activity):
    moment = StageActivity(activity, 2, 5)
    assert decode_activity(moment.code, 2, 5) == moment
    assert decode_activity(0, 2, 5) is None
    assert decode_activity(len(Activity) + 1, 2, 5) is None


def test_only_what_changed_stamps_its_time(cell):
    cell.update(step=1, phase=Phase.DATA)
    before = cell.read()
    cell.update(phase=Phase.FORWARD)
    after = cell.read()
    assert after.step_at == before.step_at
    assert after.phase_at > before.phase_at
    assert after.step == 1


def test_a_writer_that_died_in_the_middle_gives_no_reading(cell):
    page = os.fdopen(os.dup(cell.descriptor), "r+b", buffering=0)
    page.write(struct.pack("<Q", 3))
    page.close()
    assert cell.read(tries=3) is None


def test_readings_are_consistent_while_another_process_writes(cell):
    stop_reading, stop_writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(stop_writing)
        step = 0
        while not select.select([stop_reading], [], [], 0)[0]:
            step += 1
            cell.update(step=step, saved_step=step, total_steps=step)
        os._exit(0)
    seen = {}
    while len(seen) <= 1000:
        if (reading := cell.read()) is not None:
            seen[reading.step] = {reading.saved_step, reading.total_steps}
    os.close(stop_writing)
    assert os.waitpid(pid, 0)[1] == 0
    assert seen == {step: {step} for step in seen}
    os.close(stop_reading)


def test_a_drill_is_ordered_without_disturbing_anything_else(cell):
    assert cell.read_drill_order()[0] == 0
    agent = other_side(cell)
    cell.tick()
    cell.record_work(3, [1, 2, 3, 4])
    ticked = agent.last_tick_ns()
    agent.order_drill(11, serial=1, value=0.25)
    assert cell.read_drill_order() == (1, 11, 0.25)
    agent.order_drill(2, serial=2)
    assert cell.read_drill_order() == (2, 2, 0.0)
    assert (agent.work().steps, agent.work().sections, agent.last_tick_ns()) == (3, (1, 2, 3, 4), ticked)
    agent.close()


def test_bytes_are_added_up_and_told_with_the_next_change(cell):
    cell.add_input_bytes(100)
    cell.add_input_bytes(23)
    cell.enter(Phase.FORWARD)
    assert cell.read().io_bytes == 123


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
