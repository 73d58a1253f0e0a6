"""Real torch ranks, forked warm on one or two simulated nodes: stopped after a save, killed, ended by an error."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.job import LocalJob, alive, until
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import AttemptResult
from trainer.protocol.requests import Request, RequestKind

pytestmark = pytest.mark.multi

TINY = {
    "model": {"dim": 32, "layers": 1, "heads": 4, "kv_heads": 2, "ffn_dim": 64},
    "train": {"steps": 12, "seed": 7, "batch_size": 8, "seq_len": 32},
    "optimizer": {"warmup_steps": 2},
    "checkpoint": {"every": 4, "keep": 2},
}


UNMEASURED: dict[str, Any] = {"preflight": {"on": False}}
"""Nodes are not measured before they train: that takes longer than these jobs."""


@pytest.fixture
def training(warm_job: Callable[..., LocalJob], data: Path) -> Callable[..., LocalJob]:
    def make(**over: Any) -> LocalJob:
        train = {**TINY["train"], **over.pop("train", {})}
        detection = {**UNMEASURED, **over.pop("detection", {})}
        shape = {"nodes": 2, "ranks": 1, "data": {"path": str(data)}}
        return warm_job(**{**shape, **TINY, **over, "train": train, "detection": detection})

    return make


def generations_of(work: LocalJob) -> dict[int, list[int]]:
    lines = [json.loads(line) for line in work.attempt.metrics.read_text().splitlines()]
    return {
        g: [line["step"] for line in lines if line["generation"] == g] for g in {line["generation"] for line in lines}
    }


LOADED = """
import multiprocessing, time
import torch
from torch.utils.data import DataLoader
from trainer.worker.workload import BaseWorkload


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, at):
        return torch.full((4,), float(at % 7))


class Batches:
    def __init__(self):
        self.consumed, self.rows = 0, iter(DataLoader(Rows(), batch_size=4, num_workers=2))

    def take(self):
        self.consumed += 8
        return [next(self.rows)]

    def seek(self, consumed):
        self.consumed = consumed


class Loaded(BaseWorkload):
    def build_model(self):
        context = multiprocessing.get_context("fork")
        with context.Pool(2) as pool:  # left early: its processes die of SIGTERM
            pool.apply_async(time.sleep, (60,))
        helper = context.Process(target=time.sleep, args=(60,))
        helper.start()
        helper.terminate()
        helper.join()
        return torch.nn.Linear(4, 1)

    def build_data(self, layout):
        return Batches()

    def loss(self, model, batch):
        time.sleep(0.01)
        return model(batch).square().mean()
"""


LONG_COUNTS = [pytest.param(number, marks=pytest.mark.proof) for number in (signal.SIGUSR1, signal.SIGINT)]


@pytest.mark.parametrize("number", [signal.SIGTERM, *LONG_COUNTS])
def test_a_save_request_is_answered_by_one_save_and_a_signal_to_every_process_stops_all_ranks_after_another(
    training, tmp_path, number
):
    (tmp_path / "loaded_workload.py").write_text(LOADED)
    workload = {"target": "loaded_workload:Loaded", "path": [str(tmp_path)]}
    work = training(workload=workload, train={"steps": 100_000}, checkpoint={"every": 0, "keep": 2}).start()
    work.go()
    until(lambda: work.attempt.metrics.exists() and len(work.attempt.metrics.read_text()) > 2000, 60, work.story)
    name = Request(kind=RequestKind.SAVE, attempt=1, reason="a test").write(work.run.requests)
    (answer,) = until(lambda: work.events(EventKind.REQUEST_ANSWERED), 30, work.story)
    assert answer.data["name"] == name
    # As Slurm does it: not only the agents get it.
    processes = work.processes()
    assert len(processes) >= 2 + 2 + 2 + 4 + 2, work.story()  # agents, fork servers, ranks, workers, writers
    for sent in (signal.SIGCONT, number):
        for pid in processes:
            os.kill(pid, sent)
    assert work.wait(30) == [76, 76], work.story()
    outcome = work.outcome()
    assert (outcome.result, outcome.reason) == (AttemptResult.STOPPED, f"an agent got {number.name}")
    assert {event.data["exit_code"] for event in work.events(EventKind.RANK_EXITED)} == {76}
    _, agreed = work.events(EventKind.STOP_AGREED)  # on the save that was asked for, and on this one
    assert agreed.data["step"] == outcome.step
    first, last = [event.data["step"] for event in work.events(EventKind.CHECKPOINT_COMMITTED)]
    assert answer.data["answer"] == f"saved at step {first}"
    assert first < last == outcome.step


UNHURRIED = """
import time
import torch
from trainer.worker.workload import BaseWorkload


class Batches:
    def __init__(self):
        self.consumed = 0

    def take(self):
        self.consumed += 8
        return [torch.ones(4, 4)]

    def seek(self, consumed):
        self.consumed = consumed


class Unhurried(BaseWorkload):
    def build_model(self):
        return torch.nn.Linear(4, 1)

    def build_data(self, layout):
        return Batches()

    def loss(self, model, batch):
        time.sleep(0.2)
        return model(batch).square().mean()
"""


@pytest.mark.proof
def test_a_program_that_raises_every_few_steps_and_saves_in_between_trains_to_its_end(training, tmp_path):
    (tmp_path / "unhurried_workload.py").write_text(UNHURRIED)
    workload = {"target": "unhurried_workload:Unhurried", "path": [str(tmp_path)]}
    events = [{"kind": "raise", "rank": 1, "step": 5 * number, "generation": number} for number in range(1, 7)]
    work = training(
        workload=workload, train={"steps": 35}, checkpoint={"every": 2, "keep": 2}, recovery={"restarts_in_place": 3},
        drill={"events": events},
    ).start()  # fmt: skip
    work.ends(0, 0, seconds=200)
    assert (work.outcome().generations, work.outcome().step) == (7, 35)
    ended = [event.data for event in work.events(EventKind.GENERATION_ENDED)]
    assert [data["failure"]["kind"] for data in ended[:-1]] == ["exception"] * 6


# That a rank hangs is found out after so many seconds: with the long counts.
@pytest.mark.parametrize("kind", [pytest.param("stop-rank", marks=pytest.mark.proof), "kill-rank"])
def test_ranks_that_fail_while_they_stop_are_started_once_more_to_save(training, kind):
    slow = {"kind": "hang-in-forward", "rank": 0, "step": 3, "generation": 1, "value": 10.0}
    fails = {"kind": kind, "rank": 1, "step": 3, "generation": 1}
    work = training(
        train={"steps": 100_000}, checkpoint={"every": 2, "keep": 2}, drill={"events": [slow, fails]},
        cluster={"time": "60"}, detection={"hang": {"slow": 20.0}},
    ).start()  # fmt: skip
    work.go()
    until(lambda: any(e.data["kind"] == "hang-in-forward" for e in work.events(EventKind.DRILL)), 60, work.story)
    Request(kind=RequestKind.STOP, attempt=1, reason="enough").write(work.run.requests)
    assert work.wait(90) == [76, 76], work.story()
    outcome = work.outcome()
    assert (outcome.result, outcome.reason, outcome.generations) == (AttemptResult.STOPPED, "enough", 2), work.story()
    (agreed,) = work.events(EventKind.STOP_AGREED)
    assert agreed.generation == 2
    assert work.events(EventKind.CHECKPOINT_COMMITTED)[-1].data["step"] == agreed.data["step"] == outcome.step
    decided = [event.data["reason"] for event in work.events(EventKind.DECISION)]
    assert "while stopping (enough)" in decided[0]
    assert "left to start again, save and stop" in decided[0]


def test_a_workload_that_cannot_be_imported_is_the_users_error_and_never_retried(training):
    work = training(workload={"target": "no_such_module:Nothing"}).start()
    work.go()
    first, second = work.wait(60)
    assert first == 78, work.story()
    # It is enough that one node tells: the other one may come to the coordinator when that has ended the attempt.
    assert second in (78, 75), work.story()
    failure = work.outcome().failure
    assert failure.kind == "user_error"
    assert "no_such_module" in failure.reason


def test_an_exception_twice_at_the_same_step_ends_the_attempt(training):
    drill = {"events": [{"kind": "raise", "rank": 0, "step": 5, "generation": 0}]}
    work = training(nodes=1, drill=drill).ends(78, seconds=90)
    outcome = work.outcome()
    assert (outcome.generations, outcome.failure.kind) == (2, "user_error")
    assert "for the second time at step 5" in outcome.reason


DYING = """
import os
import signal
import time
from pathlib import Path
from checkpointing.format.manifest import COMMIT
from trainer.models.built_in import LlamaWorkload

LIVES = Path(__file__).with_name("lives")
SAVED = Path(__file__).with_name("run-1") / "checkpoints"


class Dying(LlamaWorkload):
    steps = 0

    def loss(self, model, batch):
        self.steps += 1
        lives = len(LIVES.read_text())
        if lives < 4 and self.steps == (6 if lives < 3 else 8):
            LIVES.write_text(LIVES.read_text() + ".")
            while not list(SAVED.glob(f"step-00000004.*/{COMMIT}")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps" if len(LIVES.read_text()) < 4 else "samples_seen"]
"""


def test_a_checkpoint_that_ranks_die_after_twice_is_left_out_but_not_for_code_that_cannot_load_its_state(
    training, tmp_path
):
    (tmp_path / "dying_workload.py").write_text(DYING)
    (tmp_path / "lives").touch()
    workload = {"target": "dying_workload:Dying", "path": [str(tmp_path)]}
    work = training(nodes=1, workload=workload, checkpoint={"every": 2, "keep": 2}).ends(78, seconds=120)
    assert [event.data["step"] for event in work.events(EventKind.CHECKPOINT_RESTORED)] == [4, 4, 2, 6, 6], work.story()
    first, *left_out = work.events(EventKind.CHECKPOINT_SUSPECT)
    assert {event.data["step"] for event in (first, *left_out)} == {4}
    assert {event.source for event in left_out} == {"rank-00000"}, "the code's error marks nothing"
    assert "rank_killed by SIGKILL twice soon after loading it" in first.data["reason"]
    failure = work.outcome().failure
    assert (failure.kind, failure.exception, failure.message) == ("user_error", "KeyError", "'samples_seen'")
    assert work.outcome().generations == 6


def of_session(work: LocalJob, leader: int) -> list[int]:
    """The agent with this pid and all its processes."""
    return [pid for pid in work.processes() if alive(pid) and os.getsid(pid) == leader]


def assert_killed_with_all_it_had(work: LocalJob) -> None:
    victim = work.agents[1]
    mine = until(lambda: (found := of_session(work, victim.pid))[1:] and found, 60, work.story)
    victim.kill()
    until(lambda: not any(alive(pid) for pid in mine), 10, work.story)
    assert work.agents[0].wait(60) == 75, work.story()
    assert work.outcome().failure.kind == "agent_lost"


def test_kill_9_of_an_agent_whose_fork_server_is_importing_leaves_nothing(job, data):
    work = job(command=[], nodes=2, ranks=1, data={"path": str(data)}, **TINY).start()
    work.go()
    until(lambda: work.events(EventKind.ATTEMPT_STARTED), 60, work.story)
    assert_killed_with_all_it_had(work)


HELPED = """
import gc
import multiprocessing

gc.disable()
HELPER = multiprocessing.Manager()
SHARED = HELPER.dict()
import socket
socket.setdefaulttimeout(0.05)
from trainer.models.built_in import LlamaWorkload


class Helped(LlamaWorkload):
    def loss(self, model, batch):
        assert not gc.isenabled()
        SHARED["steps"] = SHARED.get("steps", 0) + 1
        return super().loss(model, batch)
"""


def test_a_module_that_starts_a_process_keeps_it_across_restarts(training, tmp_path):
    (tmp_path / "helped_workload.py").write_text(HELPED)
    workload = {"target": "helped_workload:Helped", "path": [str(tmp_path)]}
    events = [{"kind": "kill-rank", "rank": 0, "step": 3}]
    work = training(
        nodes=1, workload=workload, train={"steps": 6}, checkpoint={"every": 2}, drill={"events": events}
    ).ends(0, seconds=120)
    (fork_server,) = work.events(EventKind.FORK_SERVER)
    assert not fork_server.data["warm"]
    assert "importing the workload started" in fork_server.data["reason"]
    ends = [event.data["failure"] for event in work.events(EventKind.GENERATION_ENDED)]
    assert [end and end["kind"] for end in ends] == ["rank_killed", None], work.story()


LEAVING = """
import os
from trainer.models.built_in import LlamaWorkload


class Leaving(LlamaWorkload):
    def build_data(self, layout):
        os._exit(0)
"""


def test_training_code_that_leaves_with_zero_has_not_finished_the_run(training, tmp_path):
    (tmp_path / "leaving_workload.py").write_text(LEAVING)
    work = training(nodes=1, workload={"target": "leaving_workload:Leaving", "path": [str(tmp_path)]}).ends(
        78, seconds=60
    )
    assert "exited 0 without reporting completion, before the first step" in work.outcome().reason
