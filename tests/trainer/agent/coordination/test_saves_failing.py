"""Saves that fail: told by ranks, shown by the heartbeat, and named by the outcome, on a disk that is really full."""

import asyncio
from pathlib import Path

from checkpointing.storage.durable import read_json
from tests.checkpointing.proofs.mounts import fill, small_tmpfs
from tests.trainer.agent.coordination.test_coordinator import Scene, hear
from trainer.agent.control.tcp_transport import CoordinatorPeer
from trainer.protocol.failures.outcome import AttemptOutcome, ExitCode, FailureKind
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.messages import agents
from trainer.protocol.messages.ranks import Saves

HANGS, FULL = "saves failing since step 7: it hangs", "saves failing since step 5: disk full (/r)"


async def begun(scene: Scene) -> list[CoordinatorPeer]:
    peers = [await scene.join(node) for node in (0, 1)]
    await hear(peers[1], agents.StartGeneration)
    await heard(scene, "")
    return peers


async def heard(scene: Scene, words: str) -> None:
    """Until the heartbeat says this of the saves."""
    async with asyncio.timeout(10):
        while not scene.attempt.heartbeat.exists() or read_json(scene.attempt.heartbeat)["saves_failing"] != words:
            await asyncio.sleep(0.02)


def test_saves_that_fail_stand_in_the_heartbeat_until_one_works(tmp_path: Path) -> None:
    async def script() -> None:
        async with Scene(tmp_path).led() as scene:
            peers = await begun(scene)
            peers[1].send(agents.RankSaves(generation=1, rank=3, saves=Saves(reason=HANGS, size=0)))
            await heard(scene, HANGS)
            peers[0].send(agents.RankSaves(generation=1, rank=0, saves=Saves(reason=FULL, size=2048)))
            await heard(scene, FULL)
            peers[0].send(agents.RankSaves(generation=1, rank=0, saves=Saves(reason="", size=2048)))
            await heard(scene, "")

    asyncio.run(script())


def test_an_attempt_that_ends_on_a_full_disk_keeps_its_outcome(tmp_path: Path) -> None:
    """Its heartbeat goes on in place, its outcome in the room that was taken for it."""

    async def script(folder: Path) -> None:
        async with Scene(folder).led() as scene:
            peers = await begun(scene)
            fill(folder)
            peers[0].send(agents.RankSaves(generation=1, rank=0, saves=Saves(reason=FULL, size=4096)))
            await heard(scene, FULL)
            said = {"exception": "SaveFailed", "message": "the last checkpoint was not saved", "secondary": False}
            for rank, peer in enumerate(peers):
                end = {"step": 9, "exit_code": 1, "signal": None, "reported": True, **said}
                peer.send(RankEnd(generation=1, rank=rank, **end))
                peer.send(agents.GenerationGone(generation=1))
            assert (await hear(peers[1], agents.End)).code == ExitCode.STORAGE
            failure = AttemptOutcome.read(scene.attempt.outcome).failure
            assert failure is not None
            assert (failure.kind, failure.room) == (FailureKind.STORAGE, 4096)

    with small_tmpfs(tmp_path / "disk", "1m") as folder:
        asyncio.run(script(folder))
