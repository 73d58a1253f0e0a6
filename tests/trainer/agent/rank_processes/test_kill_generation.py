"""Ranks that must end: what their agent does itself, and when the fork server has to go."""

import asyncio
import os
import subprocess
from collections.abc import Iterator

import pytest

from trainer.agent.rank_processes import local_ranks
from trainer.agent.rank_processes.local_ranks import LocalRanks


class Idle:
    """Stands for the link to a fork server that does nothing it is told, and lives."""

    def __init__(self, *, stopped: bool = False) -> None:
        self.lost, self.killed = False, ""
        self.told: list[int] = []
        self._stopped = stopped

    def signal_ranks(self, number: int) -> None:
        self.told.append(number)

    def stopped(self) -> bool:
        return self._stopped

    def kill(self, reason: str) -> None:
        self.killed, self.lost = reason, True


@pytest.fixture
def rank() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "60"], process_group=0)
    yield process
    process.kill()
    process.wait(30)


@pytest.fixture
def ranks(rank) -> Iterator[LocalRanks]:
    made = LocalRanks(1, range(1))
    made.by_rank[0].pid, made.by_rank[0].handle = rank.pid, os.pidfd_open(rank.pid)
    yield made
    made.close()


async def told_later(ranks: LocalRanks, link: Idle) -> None:
    """The rank is gone only after many looks."""
    task = asyncio.create_task(local_ranks.kill_generation(ranks, link, politely=False, term=0.05, obey=0.05))
    await asyncio.sleep(0.4)
    assert not task.done()
    ranks.mark_never_started()
    await asyncio.wait_for(task, 5)


def test_ranks_that_outlive_the_order_are_killed_by_their_agent_and_the_fork_server_stays(ranks, rank):
    link = Idle()
    asyncio.run(told_later(ranks, link))
    assert rank.wait(30) == -9
    assert (link.told, link.killed) == ([9], "")


def test_a_rank_that_was_collected_is_not_killed_again_by_its_number(ranks, rank, monkeypatch):
    rank.kill()
    rank.wait(30)
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("whose group is it now?"))
    ranks.kill_uncollected()


@pytest.mark.parametrize(("stopped", "known", "reason"), [(True, True, "it was stopped"), (False, False, "it did not")])
def test_a_fork_server_that_cannot_do_it_goes_first(ranks, stopped, known, reason):
    link = Idle(stopped=stopped)
    if not known:
        ranks.by_rank[0].pid = None
    asyncio.run(asyncio.wait_for(local_ranks.kill_generation(ranks, link, politely=True, term=0.05, obey=0.05), 5))
    assert link.told == [15, 9]
    assert link.killed.startswith(reason)
