"""What is known of the current generation, and what the next one is told."""

import asyncio
import json
import time
from dataclasses import replace

from tests.trainer.agent.coordination.test_coordinator import Scene, hear
from trainer.agent.attempt_state.attempt_state import GenerationState
from trainer.agent.attempt_state.published_files import MOST, rank_readings
from trainer.agent.control.tcp_transport import CoordinatorPeer
from trainer.agent.watch.hang_limits import RankSample
from trainer.agent.watch.program_sample import ProgramSample
from trainer.agent.watch.sampling import JobSnapshot
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.messages import agents
from trainer.protocol.messages.agents import ProgressReport
from trainer.protocol.rank_readings import RankReadings

HANG = Failure(kind=FailureKind.HANG, reason="rank 1 stopped first")
KILLED = RankEnd(rank=0, node="n0", at=5.0, signal=9, reported=False)


def run(scene: Scene, script) -> None:
    async def whole() -> None:
        async with scene.led():
            await script(scene)

    asyncio.run(whole())


async def killed(peers: list[CoordinatorPeer], generation: int = 1) -> None:
    """Rank 0 is killed, and nothing is left of any rank."""
    peers[0].send(RankEnd(generation=generation, rank=0, step=3, exit_code=None, signal=9, reported=False))
    await hear(peers[0], agents.KillGeneration)
    for peer in peers:
        peer.send(agents.GenerationGone(generation=generation))


def test_ranks_that_wait_for_a_dead_peer_do_not_hang():
    alone, beside = GenerationState(), GenerationState()
    alone.fail(HANG, 9.0)
    assert (alone.broken, alone.first_failure) == (HANG, 9.0)
    beside.note(KILLED)
    beside.fail(HANG, 9.0)
    assert (beside.broken, beside.first_failure) == (None, 5.0)


def test_nodes_are_measured_again_when_some_of_them_are_new(tmp_path):
    async def script(scene: Scene) -> None:
        peers = [await scene.join(node) for node in (0, 1, 2)]
        assert (await hear(peers[0], agents.StartGeneration)).fit
        await killed(peers[:2])
        assert not (await hear(peers[0], agents.StartGeneration)).fit
        await peers[1].close()
        await hear(peers[0], agents.KillGeneration)
        peers[0].send(agents.GenerationGone(generation=2))
        start = await hear(peers[2], agents.StartGeneration)
        assert (start.generation, start.fit) == (3, True)
        assert scene.state.generation.broken is None

    run(Scene(tmp_path, spares=1, rejoin=0.1), script)


def test_reports_of_an_older_generation_are_no_reports_of_this_one(tmp_path):
    async def script(scene: Scene) -> None:
        peers = [await scene.join(node) for node in (0, 1)]
        await hear(peers[0], agents.StartGeneration)
        peers[0].send(agents.ProgressReport(generation=1, step=7, saved=0, total=9, phase="data"))
        while not scene.state.reports():
            await hear(peers[0], agents.Ping)
        scene.state.generation = GenerationState(number=2, started=time.monotonic())
        assert scene.state.reports() == []

    run(Scene(tmp_path), script)


def test_ranks_that_are_started_to_save_and_stop_get_the_whole_time(tmp_path):
    async def script(scene: Scene) -> None:
        peers = [await scene.join(node) for node in (0, 1)]
        await hear(peers[0], agents.StartGeneration)
        stop, now = scene.state.stopping, time.monotonic()
        stop.stop = replace(stop.on_request("enough", now), until=now + 40.0)
        await killed(peers)
        assert (await hear(peers[0], agents.StartGeneration)).generation == 2
        assert (await hear(peers[0], agents.AskStop)).seconds > 50.0

    run(Scene(tmp_path), script)


def reading(seen: list[RankSample], **ratios: float) -> RankReadings:
    """Of ranks that were heard of just now."""
    snapshot, slow = JobSnapshot(0.0, len(seen)), {int(key[1:]): ratio for key, ratio in ratios.items()}
    for sample in seen:
        snapshot.add_report(ProgressReport(generation=1, samples=(sample.to_row(),)), sample.node, 100.0)
    shown = snapshot.worst(100.0, MOST, slow)
    return rank_readings(shown, world=len(snapshot), time=5.0, generation=2, p99={"data": 0.1}, ratios=slow)


def test_every_rank_of_a_small_job_stands_there(tmp_path) -> None:
    seen = [RankSample(rank=rank, node="n1", step=7, phase="forward", age=0.04) for rank in range(3)]
    reading(seen, r1=1.3).write(tmp_path / "ranks.json")
    told = json.loads((tmp_path / "ranks.json").read_text())
    assert (told["world"], told["generation"], told["p99"]) == (3, 2, {"data": 0.1})
    assert [(row["rank"], row["ratio"]) for row in told["ranks"]] == [(0, None), (1, 1.3), (2, None)]


def test_of_a_large_job_the_slow_and_the_still_ones() -> None:
    seen = [RankSample(rank=rank, node="n1", age=0.1) for rank in range(1000)]
    seen[500] = RankSample(rank=500, node="n1", age=9.0)
    told = reading(seen, r900=1.2)
    ranks = [one.rank for one in told.ranks]
    assert told.world == 1000
    assert len(ranks) == MOST
    assert {500, 900} <= set(ranks)
    assert ranks == sorted(ranks)


def test_a_rank_that_was_not_heard_of_for_long_is_as_still_as_one_that_says_so() -> None:
    snapshot = JobSnapshot(0.0, 1000)
    for rank in range(1000):
        row = RankSample(rank=rank, node="n1", age=0.5 if rank == 7 else 0.1).to_row()
        snapshot.add_report(ProgressReport(generation=1, samples=(row,)), "n1", 90.0 if rank == 3 else 100.0)
    assert [one.rank for one in snapshot.worst(100.0, 2, {})] == [3, 7]
    assert snapshot.worst(100.0, 1, {})[0].age == 10.1


def test_of_a_users_own_program_nothing_is_made_up() -> None:
    seen = [RankSample(rank=0, node="n1", age=24.8, program=ProgramSample())]
    (one,) = rank_readings(seen, world=1, time=5.0, generation=1, p99={}, ratios={}).ranks
    assert (one.step, one.phase, one.age, one.node) == (None, "command", None, "n1")
    seen = [RankSample(rank=0, node="n1", age=24.8, step=7, phase="optimizer", program=ProgramSample(flags=1))]
    (one,) = rank_readings(seen, world=1, time=5.0, generation=1, p99={}, ratios={}).ranks
    assert (one.step, one.phase, one.age) == (7, "optimizer", 24.8)
