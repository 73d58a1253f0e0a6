"""A torch DDP script as a command: its steps are shown, and a stopped rank is named and started again."""

import os
import re
import signal
import time

import pytest

from tests.trainer.agent.job import until
from trainer.agent.fork_server.instrumentation import STARTUP
from trainer.protocol.events import EventKind
from trainer.protocol.heartbeat import Heartbeat
from trainer.protocol.rank_readings import RankReadings

pytestmark = pytest.mark.multi

CELL = """
import os, struct
from trainer.protocol.rank_progress.progress import Phase, ProgressCell
place = int(os.environ["LOCAL_RANK"])
cell = ProgressCell(os.open(os.environ["ORCH_CELLS"].split(",")[place], os.O_RDWR))
struct.pack_into("<IIi", cell._map, 3072, os.getpid(), 1, int(os.environ["RANK"]))
cell.update(phase=Phase.INIT)
"""

DDP = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 100000):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    cell.update(step=step, phase=Phase.OPTIMIZER)
    time.sleep(0.02)
"""


@pytest.fixture
def program(job, tmp_path):
    def make(text, **config):
        (tmp_path / "train.py").write_text(text)
        root = str(STARTUP.parents[3])
        env = {"ORCH_SUBMIT_DIR": str(tmp_path), "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
        detection = {"preflight": {"on": False}, **config.pop("detection", {})}
        return job(command=["python", "train.py"], env=env, detection=detection, **config)

    return make


def trained(work, generation):
    """Whether the heartbeat shows a step of this generation."""
    beat = Heartbeat.read(work.attempt.heartbeat) if work.attempt.heartbeat.exists() else None
    return beat is not None and beat.generation == generation and (beat.step or 0) > 3


def pid_of(work, rank):
    for pid in work.processes():
        with open(f"/proc/{pid}/environ") as file:
            variables = file.read().split("\0")
        if f"RANK={rank}" in variables:
            return pid
    raise AssertionError(work.story())


def test_the_steps_of_a_program_are_shown_and_a_stopped_rank_is_named_and_trains_again(program):
    work = program(CELL + DDP, ranks=1).start()
    work.go()
    until(lambda: trained(work, 1), 60, work.story)
    ranks = until(lambda: work.attempt.ranks.exists() and RankReadings.read(work.attempt.ranks).ranks, 10, work.story)
    assert [one.rank for one in ranks] == [0, 1]
    assert all(one.step > 0 and one.age < 5 for one in ranks), ranks
    stopped = time.monotonic()
    os.kill(pid_of(work, 1), signal.SIGSTOP)
    (incident,) = until(lambda: work.events(EventKind.INCIDENT), 30, work.story)
    assert time.monotonic() - stopped < 20
    assert (incident.data["rank"], incident.data["kind"], incident.data["withdrawn"]) == (1, "stopped", False)
    assert re.search("witnesses: progress cell: no progress for .*; /proc: process state T", incident.data["reason"])
    until(lambda: trained(work, 2), 30, work.story)
    (ended,) = work.events(EventKind.GENERATION_ENDED)
    assert (ended.data["failure"]["kind"], ended.data["failure"]["rank"]) == ("hang", 1)
    assert ended.data["step"] > 3


@pytest.mark.proof
def test_an_observed_hang_is_reported_once_and_nothing_is_killed(program):
    work = program(CELL + DDP, ranks=1, watch={"action": "observe"}).start()
    work.go()
    until(lambda: trained(work, 1), 60, work.story)
    pid = pid_of(work, 1)
    os.kill(pid, signal.SIGSTOP)
    (incident,) = until(lambda: work.events(EventKind.INCIDENT), 30, work.story)
    assert (incident.data["rank"], incident.data["observed"]) == (1, True)
    before = Heartbeat.read(work.attempt.heartbeat).seq
    until(lambda: Heartbeat.read(work.attempt.heartbeat).seq > before + 5, 20, work.story)
    assert len(work.events(EventKind.INCIDENT)) == 1
    step = Heartbeat.read(work.attempt.heartbeat).step
    os.kill(pid, signal.SIGCONT)
    until(lambda: (Heartbeat.read(work.attempt.heartbeat).step or 0) > step + 3, 20, work.story)
    assert not work.events(EventKind.GENERATION_ENDED)
