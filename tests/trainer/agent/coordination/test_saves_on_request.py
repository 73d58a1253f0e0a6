"""`orch save`: a save that was asked for is told to ranks until one of theirs is the answer."""

import asyncio
from pathlib import Path

import pytest

from tests.trainer.agent.coordination.test_coordinator import Scene, hear
from trainer.agent.control.tcp_transport import CoordinatorPeer
from trainer.agent.coordination.requests import newest_begun_save, newest_own_save
from trainer.protocol.events import EventKind
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.messages import agents
from trainer.protocol.rank_progress.progress import StopReason
from trainer.protocol.requests import Request, RequestKind

SAVE = StopReason.SAVE_AND_GO_ON


def at(**fields: int) -> agents.ProgressReport:
    return agents.ProgressReport(generation=1, **fields)


def asked(scene: Scene) -> None:
    Request(kind=RequestKind.SAVE, attempt=1, reason="?").write(scene.run.requests)


def stands(peers: list[CoordinatorPeer], generation: int, step: int, saved: int, restored: int = 0) -> None:
    for peer in peers:
        peer.send(agents.ProgressReport(generation=generation, step=step, saved=saved, restored=restored, stepped=True))


async def answers(scene: Scene, peer: CoordinatorPeer, pings: int) -> list[str]:
    """What was answered, at the latest so many seconds from now."""
    for _ in range(pings):
        if scene.events(EventKind.REQUEST_ANSWERED):
            break
        await hear(peer, agents.Ping)
    return [event.data["answer"] for event in scene.events(EventKind.REQUEST_ANSWERED)]


async def known(scene: Scene, peer: CoordinatorPeer, step: int) -> None:
    while any(member.progress.step != step for member in scene.state.roster.members.values()):
        await hear(peer, agents.Ping)


def test_a_save_that_is_under_way_when_one_is_asked_for_is_not_the_answer(tmp_path: Path) -> None:
    async def script() -> None:
        async with Scene(tmp_path).led() as scene:
            peers = [await scene.join(node) for node in (0, 1)]
            await hear(peers[1], agents.StartGeneration)
            stands(peers, 1, step=1000, saved=800)
            await known(scene, peers[0], 1000)
            asked(scene)
            assert (await hear(peers[1], agents.AskStop)).reason == SAVE
            stands(peers, 1, step=1001, saved=900)
            assert await answers(scene, peers[0], 3) == []
            stands(peers, 1, step=1003, saved=1002)
            assert await answers(scene, peers[0], 5) == ["saved at step 1002"]

    asyncio.run(script())


def test_ranks_that_start_after_a_save_was_asked_for_hear_of_it(tmp_path: Path) -> None:
    """Asked for before any rank is there, and lost once more with those that had heard of it."""

    async def script() -> None:
        async with Scene(tmp_path).led() as scene:
            peers = [await scene.join(0), await scene.join(1, ready=False)]
            asked(scene)
            await hear(peers[0], agents.AskStop)
            peers[1].send(agents.Ready(warm=True))
            for generation in (1, 2):
                await hear(peers[1], agents.StartGeneration)
                assert (await hear(peers[1], agents.AskStop)).reason == SAVE
                # What an attempt begins with is no answer, nor is what was found after a restart.
                stands(peers, generation, step=900, saved=900, restored=900)
                assert await answers(scene, peers[0], 2) == []
                if generation == 1:
                    stands(peers, 1, step=1000, saved=900, restored=900)
                    peers[0].send(RankEnd(generation=1, rank=0, step=1000, exit_code=None, signal=9, reported=False))
                    for peer in peers:
                        peer.send(agents.GenerationGone(generation=1))
            stands(peers, 2, step=902, saved=901, restored=900)
            assert await answers(scene, peers[0], 5) == ["saved at step 901"]

    asyncio.run(script())


@pytest.mark.parametrize(
    ("reports", "total", "step"),
    [([], 0, 0), ([at(step=5), at(step=6, saved=4)], 0, 6), ([at(step=6)], 9, 6), ([at(step=9)], 9, 8)],
)
def test_the_step_that_the_run_stands_at_may_be_in_a_save_already_but_for_the_last(reports, total, step):
    assert newest_begun_save(reports, total) == step


def test_what_was_found_was_not_saved_anew():
    assert newest_own_save([at(saved=5), at(saved=0)], 5) == 0
    assert newest_own_save([at(saved=6), at()], 5) == 6
    assert newest_own_save([], 0) == 0
