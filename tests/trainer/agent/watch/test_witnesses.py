"""Which witnesses agree on a hang in a user's program, on tables."""

import re
from typing import Any

import pytest

from trainer.agent.flight.wait_graph import BlockingRank, Finding
from trainer.agent.watch.hang_limits import Limits, RankSample
from trainer.agent.watch.witnesses import weigh
from trainer.protocol.config_sections.fault_detection_config import HangConfig


def rank(number: int, **fields: Any) -> RankSample:
    known = {"node": "n1", "step": 9, "phase": "optimizer", "first": False, "age": 400.0, "alive": 400.0, "state": "S"}
    return RankSample(rank=number, **{**known, "program": 1, **fields})


def blames(number: int, kind: Any = "never_came") -> Finding:
    root = BlockingRank(rank=number, kind=kind, group="0", sequence=5, reason="")
    return Finding(kind="missing", ranks=(number,), culprits=(root,), reason=f"rank {number} never called it")


CASES = [
    # Stopped: the kernel and the cell.
    (1, [rank(0), rank(1, state="T", age=5.0, alive=5.0)], None, True, "progress cell: .* 5.0 s; /proc: .* state T"),
    # A program without a cell is never killed because of one witness.
    (1, [rank(0, program=0), rank(1, state="T", program=0)], None, False, "1 of the 2 witnesses .* state T"),
    (1, [rank(0, program=0), rank(1, state="T", program=3)], None, False, "1 of the 2 witnesses"),
    # Asleep for all that time.
    (1, [rank(0), rank(1)], None, True, "no CPU time and no I/O for 400 s"),
    # Busy: the cell alone does not suffice, the records of its peers do.
    (1, [rank(0), rank(1, alive=0.1)], None, False, "1 of the 2 witnesses .* progress cell"),
    (1, [rank(0), rank(1, alive=0.1)], blames(1), True, "flight records: rank 1 never called it"),
    (1, [rank(0), rank(1)], blames(0), False, "flight records disagrees: rank 0 never called it"),
    # A rank without a server for its record is not blamed for that.
    (1, [rank(0), rank(1, alive=0.1)], blames(1, "no_answer"), False, "1 of the 2 witnesses"),
    # All have joined.
    (None, [rank(0), rank(1)], Finding(kind="stuck_together", ranks=(0, 1), reason="all wait"), True, "all wait"),
    (1, [rank(1, ended=True)], None, False, "no witness agrees"),
]  # fmt: skip


@pytest.mark.parametrize(("culprit", "seen", "finding", "enough", "reason"), CASES)
def test_a_kill_needs_two_witnesses_that_agree(culprit, seen, finding, enough, reason):
    weighed = weigh(culprit, seen, finding)
    assert weighed.enough == enough, weighed
    assert re.search(reason, weighed.reason), weighed.reason


def test_a_program_may_stand_still_for_longer_than_a_workload_of_orch():
    limits = Limits(HangConfig(), {"optimizer": 0.05}, program=True)
    assert limits.for_rank(rank(1)).seconds == 300
    assert limits.for_rank(rank(1, alive=0.0)).seconds == 700
    assert limits.for_rank(rank(1, age=9999.0, alive=0.0)).seconds == 3600
    assert limits.for_rank(rank(1, first=True)).seconds == 7200
    assert limits.for_rank(rank(1, state="T", age=9.0, alive=9.0)).seconds == 3
    slow = Limits(HangConfig(), {"optimizer": 60.0}, program=True)
    assert slow.for_rank(rank(1)).words == "the 1500 s that a program may take between two steps"
