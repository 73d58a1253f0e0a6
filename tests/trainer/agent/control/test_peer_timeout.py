"""Silence on a table, with a clock of the test's own."""

import pytest

from trainer.agent.control.control_server import LATE_SECONDS, POLL_SECONDS, PeerTimeout

LATEST = POLL_SECONDS + LATE_SECONDS


@pytest.mark.parametrize(
    ("looks", "lasted"),
    [
        ([102, 104, 106], 6),
        ([102 + at for at in range(0, 62, 2)], 62),
        # Late, but not so late that the process was stopped.
        ([100 + LATEST * at for at in range(1, 13)], 60),
        # Stopped for a minute, for a night, twice.
        ([102, 162], 0),
        ([40_000], 0),
        ([102, 162, 164, 224, 226], 2),
    ],
)
def test_time_in_which_the_listener_stood_still_is_no_silence(looks, lasted):
    silence = PeerTimeout(100.0)
    assert [silence.seconds_silent(float(now)) for now in looks][-1] == lasted


def test_a_word_ends_it():
    silence = PeerTimeout(100.0)
    assert silence.seconds_silent(102.0) == 2.0
    silence.record_message(103.0)
    assert silence.seconds_silent(105.0) == 2.0
