"""How long a rank may stay where it is, on tables; the reason is what people will read."""

from typing import Any

import pytest

from trainer.agent.attempt_state.attempt_state import AttemptHistory
from trainer.agent.watch.hang_limits import FAST, Limits, RankSample, after_hangs, format_seconds
from trainer.protocol.config_sections.fault_detection_config import HangConfig
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.rank_progress.progress import SECTIONS, Phase

P99 = {"data": 0.05, "forward": 0.31, "backward": 0.9, "checkpoint": 11.0}


def still(age: float, phase: str = "forward", **fields: Any) -> RankSample:
    known = {
        "rank": 5,
        "node": "n3",
        "phase": phase,
        "step": 120,
        "first": False,
        "age": age,
        "alive": age,
        "state": "S",
    }
    return RankSample(**{**known, **fields})


LIMITS = [
    # A phase of a step: a factor over its own history, and never less than what any phase may take.
    (still(60, "data"), 8.0, "the 8.0 s that data may take"),
    (still(60, "backward"), 22.5, "the 22 s (25 times its usual 0.90 s) that backward may take"),
    (still(60, "optimizer"), 8.0, "the 8.0 s that optimizer may take"),
    # With signs of life it is counted from the last of them, up to four times as long.
    (
        still(10, "data", alive=4.0),
        14.0,
        "the 8.0 s that data may take without a sign of life (the last was 4.0 s ago)",
    ),
    (still(10, "data", alive=9.5), 8.5, "the 8.0 s that data may take"),
    (still(60, "data", alive=0.2), 32.0, "the 32 s that data may take with signs of life"),
    (still(600, "backward", alive=0.0), 90.0, "the 90 s that backward may take with signs of life"),
    # Whatever is slow by nature may be silent for two minutes, and alive for an hour.
    (still(60, "eval"), 120.0, "the 120 s that eval may take"),
    (still(60, "checkpoint"), 275.0, "the 275 s (25 times its usual 11 s) that checkpoint may take"),
    (
        still(1000, "restore", alive=1.0),
        1119.0,
        "the 120 s that restore may take without a sign of life (the last was 1.0 s ago)",
    ),
    (still(9000, "compile", alive=0.0), 3600.0, "the 3600 s that compile may take with signs of life"),
    (still(60, "forward", first=True), 120.0, "the 120 s that any part of a first step may take"),
    (
        still(1000, "forward", first=True, alive=1.0),
        1119.0,
        "the 120 s that any part of a first step may take without a sign of life (the last was 1.0 s ago)",
    ),
    (still(60, "nap"), 120.0, "the 120 s that nap may take"),
    # Waiting for a disk is a sign of life where disks are waited for.
    (still(60, "checkpoint", state="D"), 3600.0, "the 3600 s that checkpoint may wait for a disk"),
    (still(60, "data", state="D"), 120.0, "the 120 s that data may wait for a disk"),
    (
        still(100, "data", state="D", alive=60.0),
        160.0,
        "the 120 s that data may wait for a disk without a sign of life (the last was 60 s ago)",
    ),
    # A process that was halted does nothing of its own accord; one in a debugger has somebody with it.
    (still(60, "data", state="T"), 3.0, "the 3.0 s that a halted process may take"),
    (still(60, "eval", state="T", alive=1.0), 62.0, "the 3.0 s that a halted process may take"),
    (still(60, "eval", state="Z"), 3.0, "the 3.0 s that a halted process may take"),
    (still(60, "data", state="t"), 3600.0, "the 3600 s for which a debugger may hold it"),
]


@pytest.mark.parametrize(("one", "seconds", "words"), LIMITS)
def test_a_limit_and_its_reason(one, seconds, words):
    allowed = Limits(HangConfig(), P99).for_rank(one)
    assert allowed.seconds == pytest.approx(seconds)
    assert allowed.words == words


def test_a_stopped_process_that_nobody_waits_for_has_the_time_of_its_phase():
    limits = Limits(HangConfig(), P99)
    assert limits.for_rank(still(60, "data", state="T"), waited_for=False).seconds == 8.0
    assert limits.for_rank(still(60, "eval", state="T"), waited_for=False).seconds == 120.0


def test_no_limit_is_above_the_longest():
    config = HangConfig(least=30, slow=50, most=40, stopped=60)
    limits = Limits(config, {phase.name.lower(): 1000.0 for phase in Phase})
    for phase in Phase:
        for state in "RSDTtZX":
            for alive in (0.0, 90.0):
                for first in (True, False):
                    one = still(90, phase.name.lower(), state=state, alive=alive, first=first)
                    assert limits.for_rank(one).seconds <= 40


@pytest.mark.parametrize(
    ("p99", "seconds"),
    [
        ({}, 4.0),  # half of what any phase may take
        ({"forward": 0.3}, 4.0),
        ({"forward": 0.3, "backward": 2.0}, 6.0),
        ({"forward": 0.3, "checkpoint": 200.0}, 4.0),  # not part of every step
    ],
)
def test_when_a_closer_look_is_due(p99, seconds):
    assert Limits(HangConfig(), p99).look_after == pytest.approx(seconds)


def test_a_closer_look_is_never_due_at_once():
    assert Limits(HangConfig(least=1.0), {}).look_after == 2.0


def test_the_fast_phases_are_those_that_are_measured():
    assert {phase.name.lower() for phase in SECTIONS} == FAST


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.0, "0.00 s"), (0.314, "0.31 s"), (4.06, "4.1 s"), (12.3, "12 s"), (3600, "3600 s")]
)
def test_durations_in_words(seconds, words):
    assert format_seconds(seconds) == words


@pytest.mark.parametrize("phase", ["init", "restore", "forward"])
def test_who_spins_for_a_gpu_shows_signs_of_life_for_four_times_its_limit_only(phase):
    one = still(2000, phase, first=True, alive=0.1)
    limits = Limits(HangConfig(), {})
    assert limits.for_rank(one).seconds > 2000
    assert limits.for_rank(one, spins=True).seconds == 480.0


def test_what_was_taken_for_a_hang_may_last_longer_in_the_next_generation() -> None:
    """An epoch that begins with 12 s of loading stands still at every epoch, and is no hang."""
    past, config = AttemptHistory(), HangConfig()
    allowed = []
    for _ in range(3):
        allowed.append(Limits(after_hangs(config, past.hangs), P99).for_rank(still(12, "data")).seconds)
        past.record_failure(Failure(kind=FailureKind.HANG, reason="rank 5 stands in data"), "broken", 0, None)
    assert allowed == [8.0, 32.0, 128.0]
    assert Limits(after_hangs(config, 50), P99).for_rank(still(12, "data")).seconds == config.most
    drilled = Failure(kind=FailureKind.HANG, reason="stopped by a drill", drill="hang")
    past.record_failure(drilled, "broken", 0, None)
    assert past.hangs == 3
