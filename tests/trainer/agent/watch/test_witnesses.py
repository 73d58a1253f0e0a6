"""Which witnesses agree on a hang in a user's program, on tables."""

import re
from typing import Any

import pytest

from trainer.agent.flight.wait_graph import BlockingRank, Finding
from trainer.agent.watch.hang_limits import Limits, RankSample
from trainer.agent.watch.program_sample import LoopSearch, ProgramSample, main_thread_place
from trainer.agent.watch.witnesses import weigh
from trainer.protocol.config_sections.fault_detection_config import HangConfig

PROGRAM = {"flags", "longest", "log_age", "log_gap", "loop"}


def rank(number: int, **fields: Any) -> RankSample:
    known = {"node": "n1", "step": 9, "phase": "optimizer", "first": False, "age": 400.0, "alive": 400.0, "state": "S"}
    program = ProgramSample(**{"flags": 1, **{name: fields.pop(name) for name in PROGRAM & set(fields)}})
    return RankSample(rank=number, **{**known, "program": program, **fields})


def blames(number: int, kind: Any = "never_came") -> Finding:
    root = BlockingRank(rank=number, kind=kind, group="0", sequence=5, reason="")
    return Finding(kind="missing", ranks=(number,), culprits=(root,), reason=f"rank {number} never called it")


CASES = [
    # Stopped: the kernel and the cell.
    (1, [rank(0), rank(1, state="T", age=5.0, alive=5.0)], None, True, "progress cell: .* 5.0 s; /proc: .* state T"),
    # A program without a cell is never killed because of one witness.
    (1, [rank(0, flags=0), rank(1, state="T", flags=0)], None, False, "1 of the 2 witnesses .* state T"),
    (1, [rank(0, flags=0), rank(1, state="T", flags=3)], None, False, "1 of the 2 witnesses"),
    # Asleep for all that time.
    (1, [rank(0), rank(1)], None, True, "no CPU time and no I/O for 400 s"),
    # Busy: the cell alone does not suffice, the records of its peers do.
    (1, [rank(0), rank(1, alive=0.1)], None, False, "1 of the 2 witnesses .* progress cell"),
    (1, [rank(0), rank(1, alive=0.1)], blames(1), True, "flight records: rank 1 never called it"),
    (1, [rank(0), rank(1)], blames(0), False, "flight records disagrees: rank 0 never called it"),
    # A rank without a server for its record is not blamed for that.
    (1, [rank(0), rank(1, alive=0.1)], blames(1, "no_answer"), False, "1 of the 2 witnesses"),
    # Busy in one function of the program.
    (1, [rank(0), rank(1, alive=0.1, loop="spin (train.py)")], None, True, "stacks: 5 dumps in a row are in spin"),
    (1, [rank(0), rank(1, alive=0.1, lock=300.0)], None, True, "Python's lock: held for 300 s"),
    # Its log has a rhythm.
    (1, [rank(0), rank(1, alive=0.1, log_age=90.0, log_gap=2.0)], None, True, "log: no print for 90 s, at most 2.0 s"),
    (1, [rank(0), rank(1, log_age=5.0, log_gap=2.0)], None, False, "log disagrees: it printed 5.0 s ago"),
    (1, [rank(0), rank(1, alive=0.1, log_age=90.0, log_gap=60.0)], blames(1), False, "log disagrees"),
    (1, [rank(0), rank(1, alive=0.1, log_age=90.0)], None, False, "1 of the 2 witnesses"),
    # From outside only: the kernel and the log agree.
    (1, [rank(0), rank(1, state="T", flags=0, log_age=90.0, log_gap=2.0)], None, True, "/proc.*; log: no print"),
    (1, [rank(0, flags=0), rank(1, flags=0, log_age=90.0, log_gap=2.0)], None, False, "1 of the 2 witnesses"),
    (1, [rank(0), rank(1, state="T", age=5.0, log_age=1.0, log_gap=2.0)], None, True, "process state T"),
    # All have joined.
    (None, [rank(0), rank(1)], Finding(kind="stuck_together", ranks=(0, 1), reason="all wait"), True, "all wait"),
    (1, [rank(1, ended=True)], None, False, "no witness agrees"),
]  # fmt: skip


@pytest.mark.parametrize(("culprit", "seen", "finding", "enough", "reason"), CASES)
def test_a_kill_needs_two_witnesses_that_agree(culprit, seen, finding, enough, reason):
    weighed = weigh(culprit, seen, finding)
    assert weighed.enough == enough, weighed
    assert re.search(reason, weighed.reason), weighed.reason


RAS_CASES = [
    ((1, 40, 41, False), True, "NCCL RAS: 40 collectives launched, a peer 41"),
    ((1, 0, 41, True), True, "NCCL RAS: it does not answer its peers"),
    ((1, 41, 41, False), False, "1 of the 2 witnesses"),
]


@pytest.mark.parametrize(("row", "enough", "reason"), RAS_CASES)
def test_equal_counts_of_launched_collectives_prove_nothing(row, enough, reason):
    weighed = weigh(1, [rank(0), rank(1, alive=0.1)], None, {1: row})
    assert weighed.enough == enough, weighed
    assert reason in weighed.reason


def test_a_program_may_stand_still_for_longer_than_a_workload_of_orch():
    limits = Limits(HangConfig(), {"optimizer": 0.05}, program=True)
    assert limits.for_rank(rank(1)).seconds == 300
    assert limits.for_rank(rank(1, alive=0.0)).seconds == 700
    assert limits.for_rank(rank(1, age=9999.0, alive=0.0)).seconds == 3600
    assert limits.for_rank(rank(1, first=True)).seconds == 7200
    assert limits.for_rank(rank(1, state="T", age=9.0, alive=9.0)).seconds == 3
    slow = Limits(HangConfig(), {"optimizer": 60.0}, program=True)
    assert slow.for_rank(rank(1)).words == "the 1500 s that a program may take between two steps"
    learned = Limits(HangConfig(), {"optimizer": 0.05}, program=True)
    assert learned.for_rank(rank(1, longest=600.0)).seconds == 1800
    assert learned.for_rank(rank(1, longest=2000.0)).seconds == 6000
    looping = learned.for_rank(rank(1, alive=0.0, loop="spin (train.py)"))
    assert (looping.seconds, looping.words[-24:]) == (300, "steps, all in spin (train.py)"[-24:])


DUMP = """Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f0000000002 (most recent call first):
  File "{file}", line {line} in {function}
  File "/home/me/train.py", line 20 in <module>
"""


def test_a_loop_is_five_dumps_in_one_function_of_the_program_since_its_last_step():
    search = LoopSearch()
    for line in range(5):
        assert not search.place(7)
        search.add(DUMP.format(file="/home/me/train.py", line=line, function="spin"), 7)
    assert search.place(7) == "spin (/home/me/train.py)"
    assert not search.place(8)
    search.add(DUMP.format(file="/home/me/train.py", line=3, function="spin"), 8)
    assert not search.place(8)
    for function in ("spin", "spin", "spin", "evaluate", "spin"):
        search.add(DUMP.format(file="/home/me/train.py", line=3, function=function), 8)
    assert not search.place(8)


@pytest.mark.parametrize("file", ["/x/lib/python3.11/site-packages/torch/nn/functional.py", "/usr/lib/python3.11/a.py"])
def test_work_in_libraries_is_no_loop(file):
    assert not main_thread_place(DUMP.format(file=file, line=1, function="linear"))
    assert main_thread_place("") == ""
