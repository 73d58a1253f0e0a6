"""What is known of the current generation, and what the next one is told."""

import asyncio
import time
from dataclasses import replace

from tests.trainer.agent.coordination.test_coordinator import Scene, hear
from trainer.agent.attempt_state.attempt_state import GenerationState
from trainer.agent.control.tcp_transport import CoordinatorPeer
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.messages import agents

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
