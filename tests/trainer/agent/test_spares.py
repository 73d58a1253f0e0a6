"""Spare nodes: an agent is killed, and a node that waited takes its seat in the same job."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.coordination.test_coordinator import Scene, hear
from tests.trainer.agent.job import LocalJob, alive, until
from trainer.agent.control.tcp_transport import CoordinatorPeer
from trainer.agent.nodes.preflight import PreflightFault
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import AttemptOutcome, AttemptResult
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.messages import agents

TINY = {
    "model": {"dim": 32, "layers": 1, "heads": 4, "kv_heads": 2, "ffn_dim": 64},
    "train": {"steps": 60, "seed": 7, "batch_size": 8, "seq_len": 32},
    "optimizer": {"warmup_steps": 2},
    "checkpoint": {"every": 4, "keep": 2},
    "detection": {"preflight": {"on": False}},
}


def started(job: LocalJob, generation: int) -> list[dict[str, Any]]:
    return [note for note in job.notes() if note.get("started") and note["generation"] == generation]


def test_a_spare_takes_the_seat_of_a_killed_agent_with_its_ranks(job):
    work = job("hang@*@1", nodes=2, ranks=2, spares=1).start()
    work.go()
    until(lambda: len(started(work, 1)) == 4, 30, work.story)
    assert {note["rank"] for note in started(work, 1)} == {0, 1, 2, 3}
    work.agents[1].kill()
    assert work.wait(40) == [0, -signal.SIGKILL, 0], work.story()

    outcome = work.outcome()
    assert (outcome.result, outcome.generations) == (AttemptResult.FINISHED, 2)
    (used,) = work.events(EventKind.SPARE_USED)
    assert (used.data["node"], used.data["name"], used.data["instead"]) == (2, "local-2", "local-1")
    assert used.data["reason"] == "the agent of local-1 is lost: its connection ended"
    notes = {note["rank"]: note["env"] for note in started(work, 2)}
    assert {rank: env["GROUP_RANK"] for rank, env in notes.items()} == {0: "0", 1: "0", 2: "1", 3: "1"}
    assert {env["WORLD_SIZE"] for env in notes.values()} == {"4"}


def test_a_spare_that_is_lost_is_told_and_ends_nothing(job):
    work = job("hang@0@1", nodes=1, ranks=1, spares=1).start()
    work.go()
    until(lambda: started(work, 1), 30, work.story)
    work.agents[1].kill()
    until(lambda: work.events(EventKind.AGENT_LOST), 10, work.story)
    os.kill(started(work, 1)[0]["pid"], signal.SIGKILL)
    assert work.wait(30) == [0, -signal.SIGKILL], work.story()
    assert work.outcome().generations == 2
    assert not work.events(EventKind.SPARE_USED)


def test_with_all_spares_used_the_next_loss_ends_the_attempt(job):
    work = job("hang@*@*", nodes=2, ranks=1, spares=1).start()
    work.go()
    until(lambda: len(started(work, 1)) == 2, 30, work.story)
    work.agents[1].kill()
    until(lambda: len(started(work, 2)) == 2, 30, work.story)
    work.agents[2].kill()
    assert work.wait(30) == [75, -signal.SIGKILL, -signal.SIGKILL], work.story()
    failure = work.outcome().failure
    assert (failure.kind, failure.node) == ("agent_lost", "local-2")


def led(folder: Path, spares: int = 1, **timeouts: float) -> Any:
    """A coordinator of two seats and spares, whose agents the test plays."""
    return Scene(folder, spares=spares, **timeouts).led()


SICK = PreflightFault(check="open files", reason="open-files limit is 64, below 1024", shared=False)


async def test_a_node_that_is_not_fit_is_left_out_and_the_spare_begins_in_its_place(tmp_path):
    async with led(tmp_path) as scene:
        peers = [await scene.join(0), await scene.join(1, fit=False), await scene.join(2)]
        peers[1].send(agents.PreflightReport(faults=(SICK,)))
        assert [(await hear(peers[node], agents.StartGeneration)).node_rank for node in (0, 2)] == [0, 1]
        peers[2].send(RankEnd(generation=1, rank=1, step=3, exit_code=None, signal=9, reported=False))
        # Who has no seat is not waited for.
        for node in (0, 2):
            peers[node].send(agents.GenerationGone(generation=1))
        assert (await hear(peers[2], agents.StartGeneration)).generation == 2


async def test_a_job_starts_without_a_node_that_does_not_come_and_takes_it_as_a_spare_when_it_does(tmp_path):
    async with led(tmp_path, more_nodes=0.5) as scene:
        peers = [await scene.join(0), await scene.join(2)]
        assert [(await hear(peer, agents.StartGeneration)).node_rank for peer in peers] == [0, 1]
        late = await scene.join(1)
        while len(scene.events(EventKind.AGENT_JOINED)) < 3:
            await hear(late, agents.Ping)
        await peers[1].close()
        peers[0].send(agents.GenerationGone(generation=1))
        start = await hear(late, agents.StartGeneration)
        assert (start.node_rank, start.generation) == (1, 2)


async def test_too_few_fit_nodes_end_the_attempt_with_the_node_named(tmp_path):
    async with led(tmp_path) as scene:
        for node in (0, 1, 2):
            peer = await scene.join(node, fit=node == 0)
            if node:
                peer.send(agents.PreflightReport(faults=(SICK,)))
        assert await asyncio.wait_for(scene.leading, 15) == 77
        failure = AttemptOutcome.read(scene.attempt.outcome).failure
        assert (failure.kind, failure.node) == ("node_suspect", "n1")


async def test_a_node_that_is_lost_while_the_others_warm_up_is_replaced(tmp_path):
    async with led(tmp_path) as scene:
        peers = [await scene.join(node, ready=node != 1) for node in (0, 1, 2)]
        assert (await hear(peers[1], agents.NodeRank)).node_rank == 1
        await peers[1].close()
        assert (await hear(peers[2], agents.StartGeneration)).node_rank == 1
        (used,) = scene.events(EventKind.SPARE_USED)
        assert (used.data["name"], used.data["instead"]) == ("n2", "n1")


@pytest.mark.parametrize("how", ["fork_server_failed", "silent"])
async def test_a_node_that_cannot_start_ranks_is_replaced(tmp_path, how):
    async with led(tmp_path, ready=1.5) as scene:
        peers = [await scene.join(node, ready=node != 1) for node in (0, 1, 2)]
        assert (await hear(peers[1], agents.NodeRank)).node_rank == 1
        if how == "fork_server_failed":
            peers[1].send(agents.AgentFailed(reason="its fork server died 3 times in a row"))
        assert (await hear(peers[2], agents.StartGeneration)).node_rank == 1
        (used,) = scene.events(EventKind.SPARE_USED)
        assert (used.data["name"], used.data["instead"]) == ("n2", "n1")
        assert ("died 3 times" if how == "fork_server_failed" else "had no fork server ready") in used.data["reason"]


UNLOADABLE = {"exception": "OSError", "message": "[Errno 5] model.py"}


async def test_a_spare_that_cannot_import_the_workload_ends_nothing_and_takes_no_seat(tmp_path):
    async with led(tmp_path) as scene:
        peers = [await scene.join(node) for node in (0, 1, 2)]
        await hear(peers[1], agents.StartGeneration)
        peers[2].send(agents.Unloadable(**UNLOADABLE))
        while not scene.state.roster.members[2].excluded:
            await hear(peers[0], agents.Ping)
        for _ in range(2):
            await hear(peers[0], agents.Ping)
        assert not scene.events(EventKind.GENERATION_ENDED)
        await peers[1].close()
        peers[0].send(agents.GenerationGone(generation=1))
        assert await asyncio.wait_for(scene.leading, 15) == 75
        assert not scene.events(EventKind.SPARE_USED)


async def test_a_node_alone_that_cannot_import_the_workload_is_replaced(tmp_path):
    async with led(tmp_path) as scene:
        peers = [await scene.join(node, ready=node != 1) for node in (0, 1, 2)]
        await hear(peers[1], agents.NodeRank)
        while not all(scene.state.roster.members[node].ready for node in (0, 2)):
            await hear(peers[1], agents.Ping)
        peers[1].send(agents.Unloadable(**UNLOADABLE))
        assert (await hear(peers[2], agents.StartGeneration)).node_rank == 1
        (used,) = scene.events(EventKind.SPARE_USED)
        assert (used.data["name"], used.data["instead"]) == ("n2", "n1")
        assert used.data["reason"].startswith("n1: the workload cannot be imported: OSError: [Errno 5] model.py, while")


async def test_a_workload_that_nobody_could_import_is_the_users_error_and_uses_no_spare(tmp_path):
    async with led(tmp_path) as scene:
        peers = [await scene.join(node, ready=False) for node in (0, 1, 2)]
        await hear(peers[1], agents.NodeRank)
        peers[1].send(agents.Unloadable(**UNLOADABLE))
        assert await asyncio.wait_for(scene.leading, 15) == 78
        assert AttemptOutcome.read(scene.attempt.outcome).failure.kind == "user_error"
        assert not scene.events(EventKind.SPARE_USED)


@pytest.mark.parametrize(("trained", "kind", "code"), [(True, "storage", 74), (False, "user_error", 78)])
async def test_torch_that_is_away_from_every_node_is_no_error_of_a_run_that_has_trained(tmp_path, trained, kind, code):
    words = "No module named 'torch'; part of the installation is missing (environment /venv, orch in /)"
    async with led(tmp_path) as scene:
        scene.state.history.trained = trained
        peers = [await scene.join(node, ready=False) for node in (0, 1, 2)]
        await hear(peers[1], agents.NodeRank)
        for node in (2, 1):
            peers[node].send(agents.Unloadable(exception="ModuleNotFoundError", message=words))
            while node == 2 and not scene.state.roster.members[2].excluded:
                await hear(peers[0], agents.Ping)
        assert await asyncio.wait_for(scene.leading, 15) == code
        assert AttemptOutcome.read(scene.attempt.outcome).failure.kind == kind


async def test_a_workload_that_needs_more_threads_than_the_node_starts_is_no_error_of_the_user(tmp_path):
    async with led(tmp_path) as scene:
        peers = [await scene.join(node, ready=False) for node in (0, 1, 2)]
        await hear(peers[1], agents.NodeRank)
        for node in (2, 1):
            peers[node].send(agents.Unloadable(exception="RuntimeError", message="can't start new thread"))
            while node == 2 and not scene.state.roster.members[2].excluded:
                await hear(peers[0], agents.Ping)
        assert await asyncio.wait_for(scene.leading, 15) == 75
        failure = AttemptOutcome.read(scene.attempt.outcome).failure
        assert failure.kind == "unknown"
        assert "pids.max" in failure.reason


async def test_a_node_whose_clock_is_off_is_left_out_and_that_is_told(tmp_path):
    async with led(tmp_path) as scene:
        peers = [await scene.join(node, fit=False) for node in (0, 1, 2)]
        for node, ahead in enumerate((0.0, 3600.0, 0.0)):
            peers[node].send(agents.PreflightReport(faults=(), wall=time.time() + ahead))
        assert [(await hear(peers[node], agents.StartGeneration)).node_rank for node in (0, 2)] == [0, 1]
        (told,) = scene.events(EventKind.PREFLIGHT)
        assert (told.data["name"], told.data["ok"]) == ("n1", False)
        assert "its clock is 3600 s ahead" in told.data["reason"]


async def examined(scene: Scene, *ahead: float | None) -> list[CoordinatorPeer]:
    """Nodes whose clocks are so many seconds ahead; None: one that is not fit."""
    peers = [await scene.join(node, fit=False) for node in range(len(ahead))]
    for peer, seconds in zip(peers, ahead, strict=True):
        peer.send(
            agents.PreflightReport(faults=(SICK,) if seconds is None else (), wall=time.time() + (seconds or 0.0))
        )
    return peers


@pytest.mark.parametrize("ahead", [(0.0, None, 3600.0, 0.0), (0.0, 3600.0, -7200.0, 0.0)])
async def test_clocks_are_looked_at_although_another_node_is_not_fit_either(tmp_path, ahead):
    async with led(tmp_path, spares=2) as scene:
        peers = await examined(scene, *ahead)
        assert [(await hear(peers[node], agents.StartGeneration)).node_rank for node in (0, 3)] == [0, 1]


async def test_of_two_fit_nodes_whose_clocks_differ_nobody_knows_which_is_right(tmp_path):
    async with led(tmp_path) as scene:
        await examined(scene, 0.0, None, 3600.0)
        assert await asyncio.wait_for(scene.leading, 15) == 77
        outcome = AttemptOutcome.read(scene.attempt.outcome)
        assert outcome.failure.node == "n1"
        assert "open-files limit" in outcome.reason
        assert "the clocks of n0 and n2 are 3600 s apart" in outcome.reason


async def test_no_spare_is_used_once_a_stop_was_asked_for(tmp_path):
    async with led(tmp_path) as scene:
        peers = [await scene.join(node) for node in (0, 1, 2)]
        await hear(peers[1], agents.StartGeneration)
        peers[0].send(agents.SignalReceived(name="SIGUSR2"))
        await hear(peers[1], agents.AskStop)
        await peers[1].close()
        for node in (0, 2):
            peers[node].send(agents.GenerationGone(generation=1))
        assert await asyncio.wait_for(scene.leading, 15) == 75
        assert not scene.events(EventKind.SPARE_USED)


@pytest.fixture
def training(warm_job: Callable[..., LocalJob], data: Path) -> Callable[..., LocalJob]:
    def make(folder: str, spares: int) -> LocalJob:
        shape = {"nodes": 2, "ranks": 1, "spares": spares, "folder": folder}
        work = warm_job(**shape, data={"path": str(data)}, **TINY)
        work.start().go()
        return work

    return make


def assert_went_on(work: LocalJob, codes: list[int]) -> None:
    """In the same attempt, on the spare, to the end."""
    assert work.wait(90) == codes, work.story()
    outcome = work.outcome()
    assert (outcome.result, outcome.generations, outcome.step) == (AttemptResult.FINISHED, 2, 60)
    (used,) = work.events(EventKind.SPARE_USED)
    assert (used.data["name"], used.data["instead"]) == ("local-2", "local-1")


@pytest.mark.proof  # an agent may be silent for a minute
@pytest.mark.multi
def test_a_node_that_falls_silent_is_replaced_and_ends_its_ranks_when_it_is_back(training):
    work = training("away", 1)
    until(lambda: work.events(EventKind.CHECKPOINT_COMMITTED), 60, work.story)
    family = [pid for pid in work.processes() if os.getsid(pid) == work.agents[1].pid]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: work.events(EventKind.SPARE_USED), 120, work.story)
    until(lambda: len(work.events(EventKind.GENERATION_FIRST_STEP)) == 2, 60, work.story)
    assert any(alive(pid) for pid in family)  # out of reach, and the others went on
    (lost,) = work.events(EventKind.AGENT_LOST)
    assert "silent" in lost.data["reason"]
    for pid in family:
        os.kill(pid, signal.SIGCONT)
    assert_went_on(work, [0, 75, 0])
    until(lambda: not [pid for pid in family if alive(pid)], 10, work.story)
