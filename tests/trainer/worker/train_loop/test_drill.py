"""Drills fire in the rank, attempt, generation and step that they name, and are announced first."""

import math
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from trainer.protocol.config_sections.fault_detection_config import KINDS, DrillEvent
from trainer.protocol.rank_progress.progress import ProgressCell
from trainer.worker.train_loop import drill as drills
from trainer.worker.train_loop.drill import Drill, DrillError

PLACES = ("in_data", "in_forward", "in_send", "in_send", "loss_factor", "before_reduce", "in_save", "after_step")


class Played:
    def __init__(self, monkeypatch, *events: DrillEvent, orders=None, rank=0, attempt=1, generation=1) -> None:
        self.told: list[tuple[str, int]] = []
        self.fired: list[tuple[str, int, object]] = []
        self._at = ("", 0)
        self.drill = Drill(
            events, rank=rank, attempt=attempt, generation=generation, announce=lambda *what: self.told.append(what),
            orders=orders,
        )  # fmt: skip
        for name in ("_wait", "_spin", "_hold_lock", "_call_other_shape", "_call_other_order"):
            monkeypatch.setattr(drills, name, lambda value, name=name: self.note((name, value)))
        monkeypatch.setattr(drills.os, "kill", lambda _, number: self.note(signal.Signals(number).name))

    def note(self, what: object) -> None:
        self.fired.append((*self._at, what))

    def step(self, step: int) -> None:
        for place in PLACES:
            self._at = (place, step)
            try:
                found = getattr(self.drill, place)(step)
            except DrillError as error:
                found = str(error)
            if found is not True and found not in (None, 1.0):
                self.note(found)

    def play(self) -> "Played":
        for step in range(1, 6):
            self.step(step)
        return self


@pytest.fixture
def play(monkeypatch):
    return lambda *events, **place: Played(monkeypatch, *events, **place).play()


STRIKES = {
    "kill-rank": ("after_step", 3, "SIGKILL"),
    "stop-rank": ("after_step", 3, "SIGSTOP"),
    "raise": ("after_step", 3, "drill: raised on rank 0 after step 3"),
    "hang-in-data": ("in_data", 3, ("_wait", 0.5)),
    "hang-in-forward": ("in_forward", 3, ("_wait", 0.5)),
    "hang-in-save": ("in_save", 3, ("_wait", 0.5)),
    "hang-in-collective": ("before_reduce", 3, ("_wait", 0.5)),
    "hold-lock": ("in_forward", 3, ("_hold_lock", 0.5)),
    "desync-shape": ("before_reduce", 3, ("_call_other_shape", 0.5)),
    "desync-order": ("before_reduce", 3, ("_call_other_order", 0.5)),
    "spike": ("loss_factor", 3, 1000.0),
    "hang-in-send": ("in_send", 3, ("_wait", 0.5)),
    "skip-send": ("in_send", 3, False),
}


@pytest.mark.parametrize("kind", STRIKES)
def test_it_strikes_once_where_it_belongs_in_its_step(play, kind):
    played = play(DrillEvent(kind=kind, step=3, value=0.5))
    assert played.fired == [STRIKES[kind]]
    assert played.told == [(kind, 3)]


def test_every_kind_is_known_here():
    assert set(STRIKES) | {"nan", "slow-rank"} == set(KINDS)


def test_a_loss_becomes_no_number(play):
    (fired,) = play(DrillEvent(kind="nan", step=3)).fired
    assert fired[:2] == ("loss_factor", 3)
    assert math.isnan(fired[2])


@pytest.mark.parametrize("place", [{"rank": 1}, {"attempt": 2}, {"generation": 2}])
@pytest.mark.parametrize("kind", KINDS)
def test_it_spares_everybody_else(play, kind, place):
    played = play(DrillEvent(kind=kind, step=3), **place)
    assert (played.fired, played.told) == ([], [])


def test_zero_means_every_attempt_and_generation(play):
    event = DrillEvent(kind="raise", step=3, attempt=0, generation=0)
    assert play(event, attempt=4, generation=2).told == [("raise", 3)]


def test_a_slow_rank_works_more_in_every_later_step(play):
    played = play(DrillEvent(kind="slow-rank", step=3, value=0.5))
    assert played.fired == [("in_forward", step, ("_spin", 0.5)) for step in (3, 4, 5)]
    assert played.told == [("slow-rank", 3)]


def test_a_hang_in_a_save_waits_for_the_next_save(monkeypatch):
    played = Played(monkeypatch, DrillEvent(kind="hang-in-save", step=3))
    for step in (2, 6, 9):
        played.drill.in_save(step)
    assert played.told == [("hang-in-save", 6)]
    assert len(played.fired) == 1


@pytest.fixture
def cell():
    made = ProgressCell.create()
    yield made
    made.close()


def test_an_order_strikes_once_at_the_next_step_boundary_or_in_the_step_after_it(monkeypatch, cell):
    played = Played(monkeypatch, orders=cell)
    played.step(1)
    cell.order_drill(list(KINDS).index("kill-rank"), serial=1)
    played.step(2)
    cell.order_drill(list(KINDS).index("hang-in-forward"), serial=2, value=0.25)
    played.step(3)
    cell.order_drill(len(KINDS), serial=3)  # of a newer version
    played.step(4)
    played.step(5)
    assert played.fired == [("after_step", 2, "SIGKILL"), ("in_forward", 4, ("_wait", 0.25))]
    assert played.told == [("kill-rank", 2), ("hang-in-forward", 4)]


def test_an_order_from_before_this_loop_is_not_carried_out_again(monkeypatch, cell):
    cell.order_drill(0, serial=4)
    assert Played(monkeypatch, orders=cell).play().fired == []


def test_work_that_is_added_shows_in_the_threads_own_time():
    began = time.thread_time()
    drills._spin(0.02)
    assert time.thread_time() - began >= 0.02


def test_a_held_lock_lets_no_other_thread_run_and_no_signal_free_it():
    counted: list[float] = []
    over = threading.Event()

    def count() -> None:
        while not over.wait(0.005):
            counted.append(time.monotonic())

    thread = threading.Thread(target=count)
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    thread.start()
    time.sleep(0.05)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    began = time.monotonic()
    drills._hold_lock(0.4)
    held = time.monotonic()
    over.set()
    thread.join()
    signal.signal(signal.SIGALRM, previous)
    assert held - began >= 0.39
    assert not [at for at in counted if began + 0.05 < at < held - 0.05]


def test_a_wait_is_as_long_as_asked_for_and_without_a_number_it_never_ends(monkeypatch):
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 4:
            raise InterruptedError

    monkeypatch.setattr(drills.time, "sleep", sleep)
    drills._wait(0.25)
    assert slept == [0.25]
    with pytest.raises(InterruptedError):
        drills._wait(0.0)
    assert all(seconds > 0 for seconds in slept[2:]), "it does not spin"


def test_a_lock_that_is_held_for_ever_waits_for_itself_before_any_time_limit(monkeypatch):
    calls = []
    library = SimpleNamespace(
        pthread_mutex_lock=lambda mutex: calls.append(mutex), pthread_mutex_timedlock=lambda *_: calls.append("limit")
    )
    monkeypatch.setattr(drills.ctypes, "PyDLL", lambda _: library)
    drills._hold_lock(0.0)
    first, second, limit = calls
    assert first is second
    assert limit == "limit", "not reached in earnest"


@pytest.mark.parametrize(("size", "due"), [(0.0, 1), (5.0, 5)])
def test_calls_that_no_peer_makes(monkeypatch, size, due):
    calls = []

    class Sums:
        def __init__(self, row, *, step):
            self.row, self.step = row, step

        def wait(self):
            calls.append((len(self.row), self.step, self.row.dtype, self.row.device.type))

    monkeypatch.setattr(drills, "StepSums", Sums)
    drills._call_other_shape(size)
    assert calls == [(due, 0, torch.float64, "cpu")], "of a step that no peer is in"
    group = SimpleNamespace(
        get_rank=lambda: due - 1, get_world_size=lambda: 5, broadcast=lambda row, src: calls.append((len(row), src))
    )
    monkeypatch.setattr(drills, "dist", group)
    drills._call_other_order(0.0)
    assert calls[1:] == [(1, due % 5)]
