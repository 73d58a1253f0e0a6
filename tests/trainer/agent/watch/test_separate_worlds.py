"""Programs whose ranks are numbered anew on each node."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.agent.job import LocalJob, until
from trainer.agent.watch.hang_limits import RankSample
from trainer.agent.watch.program_sample import ProgramSample
from trainer.agent.watch.separate_worlds import find_separate_worlds
from trainer.protocol.events import EventKind
from trainer.protocol.heartbeat import Heartbeat

ONE = RankSample(
    rank=0, node="n0", step=4, phase="forward", first=False, collective=0, age=0.0, alive=0.0, state="R", lock=0.0,
    ended=False, program=ProgramSample(own_rank=0),
)  # fmt: skip


def test_only_a_rank_that_trains_on_two_nodes_shows_separate_worlds() -> None:
    other = replace(ONE, rank=1, node="n1")
    assert find_separate_worlds([ONE, other]) == (0, ("n0", "n1"))
    assert find_separate_worlds([ONE, replace(other, program=ProgramSample(own_rank=1))]) is None
    assert find_separate_worlds([ONE, replace(other, program=ProgramSample())]) is None
    assert find_separate_worlds([ONE, replace(other, first=True)]) is None
    assert find_separate_worlds([ONE, replace(other, ended=True)]) is None
    assert find_separate_worlds([ONE, replace(other, node="n0")]) is None


# Each node makes a world of its own, as with an address of localhost on real nodes.
PROGRAM = """
import os, sys, torch, torch.distributed as dist
store = os.path.join(sys.argv[1], "store-" + os.environ["NODE_RANK"])
dist.init_process_group("gloo", init_method="file://" + store, rank=0, world_size=1)
weights = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weights], lr=0.1)
while not os.path.exists(os.path.join(sys.argv[1], "end")):
    weights.sum().backward()
    optimizer.step()
"""


@pytest.mark.multi
def test_it_is_reported_once_and_the_program_goes_on(job: Callable[..., LocalJob], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    work = job(nodes=2, ranks=1, command=[sys.executable, str(tmp_path / "train.py"), str(tmp_path)])
    work.start().go()
    (event,) = until(lambda: work.events(EventKind.PROGRAM_SEPARATE), 180, work.story)
    assert event.data["nodes"] == ["local-0", "local-1"]
    until(lambda: "separate models" in Heartbeat.read(work.attempt.heartbeat).waits, 60, work.story)
    (tmp_path / "end").touch()
    assert set(work.wait(60)) == {0}
    assert len(work.events(EventKind.PROGRAM_SEPARATE)) == 1
