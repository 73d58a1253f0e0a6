"""What an agent reads from its ranks' cells, and what it puts there."""

import asyncio
import os
import signal
import struct
import subprocess
from collections.abc import Iterator

import pytest

from trainer.agent.rank_processes import local_ranks
from trainer.agent.rank_processes.local_ranks import LocalRanks
from trainer.protocol.config_sections.fault_detection_config import KINDS
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.protocol.messages.agents import InjectFault
from trainer.protocol.rank_progress.program_record import PROGRAM_AT, ProgramFlags
from trainer.protocol.rank_progress.progress import Phase, StopReason
from trainer.protocol.requests import REFUSED, Request, RequestKind


@pytest.fixture
def ranks() -> Iterator[LocalRanks]:
    made = LocalRanks(1, range(2))
    yield made
    made.close()


def test_a_restored_step_is_not_a_trained_one_whenever_it_is_looked_at(ranks):
    cells = [local.cell for local in ranks.by_rank.values()]
    for cell in cells:
        cell.update(phase=Phase.RESTORE, step=500, saved_step=500, restored_step=500)
        # Nobody looked before the rank had gone on to its first step.
        cell.update(phase=Phase.FORWARD)
    assert (ranks.summary().stepped, ranks.summary().loss) == (False, None)
    cells[0].update(step=501, loss=0.5)
    assert ranks.summary().loss == 0.5
    assert not ranks.summary().stepped
    cells[1].update(step=501)
    assert ranks.summary().stepped


def test_a_program_answers_requests_once_all_its_ranks_do(ranks):
    def write(rank, flags):
        record = struct.pack("<IIi4x", os.getpid(), flags, rank)
        os.pwrite(ranks.by_rank[rank].cell.descriptor, record, PROGRAM_AT)

    both = ProgramFlags.INSTRUMENTED | ProgramFlags.ANSWERS
    for rank, flags in [(0, ProgramFlags.INSTRUMENTED), (1, ProgramFlags.INSTRUMENTED), (0, both)]:
        write(rank, flags)
        assert not ranks.summary().answers
    write(1, both)
    assert ranks.summary().answers
    write(1, both | ProgramFlags.DISABLED)
    assert not ranks.summary().answers


def test_a_stop_is_not_lost_when_a_save_is_asked_for_after_it(ranks):
    ranks.ask(StopReason.SAVE_AND_GO_ON, 5.0)
    ranks.ask(StopReason.PREEMPTION, 60.0)
    ranks.ask(StopReason.SAVE_AND_GO_ON, 3600.0)
    ranks.ask(StopReason.CANCEL, 3600.0)
    asked = [local.cell.read_stop_request() for local in ranks.by_rank.values()]
    assert asked == [(StopReason.PREEMPTION, 60.0)] * 2


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
def live_ranks(rank) -> Iterator[LocalRanks]:
    made = LocalRanks(1, range(1))
    made.by_rank[0].pid, made.by_rank[0].handle = rank.pid, os.pidfd_open(rank.pid)
    yield made
    made.close()


async def told_later(live_ranks: LocalRanks, link: Idle) -> None:
    """The rank is gone only after many looks."""
    task = asyncio.create_task(local_ranks.kill_generation(live_ranks, link, politely=False, term=0.05, obey=0.05))
    await asyncio.sleep(0.4)
    assert not task.done()
    live_ranks.mark_never_started()
    await asyncio.wait_for(task, 5)


def test_ranks_that_outlive_the_order_are_killed_by_their_agent_and_the_fork_server_stays(live_ranks, rank):
    link = Idle()
    asyncio.run(told_later(live_ranks, link))
    assert rank.wait(30) == -9
    assert (link.told, link.killed) == ([9], "")


def test_a_rank_that_was_collected_is_not_killed_again_by_its_number(live_ranks, rank, monkeypatch):
    rank.kill()
    rank.wait(30)
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("whose group is it now?"))
    live_ranks.kill_uncollected()


async def killed_politely(live_ranks: LocalRanks, link: Idle) -> None:
    """The order to kill comes long before the patience with a program ends."""
    task = asyncio.create_task(local_ranks.kill_generation(live_ranks, link, politely=True, term=600.0, obey=0.05))
    while signal.SIGKILL not in link.told:
        await asyncio.sleep(0.01)
    live_ranks.mark_never_started()
    await task


def test_a_stopped_rank_gets_no_time_to_act_on_sigterm(live_ranks, rank):
    rank.send_signal(signal.SIGSTOP)
    link = Idle()
    asyncio.run(asyncio.wait_for(killed_politely(live_ranks, link), 60))
    assert link.told == [signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize(("stopped", "known", "reason"), [(True, True, "it was stopped"), (False, False, "it did not")])
def test_a_fork_server_that_cannot_do_it_goes_first(live_ranks, stopped, known, reason):
    link = Idle(stopped=stopped)
    if not known:
        live_ranks.by_rank[0].pid = None
    asyncio.run(asyncio.wait_for(local_ranks.kill_generation(live_ranks, link, politely=True, term=0.05, obey=0.05), 5))
    assert link.told == [15, 9]
    assert link.killed.startswith(reason)


SHAPE = ClusterShape(nodes=2, ranks_per_node=2)


def asked(kind: str, at: float | None = None) -> Request:
    return Request(kind=RequestKind.DRILL, attempt=1, reason="test", detail=kind, value=at)


@pytest.mark.parametrize(("kind", "at", "words"), [
    ("stop-rank", 3, "stop-rank strikes rank 3"),
    ("nan", None, "nan strikes rank 0"),
    ("kill-node", 1, "kill-node strikes node 1"),
])  # fmt: skip
def test_what_there_is_to_hit_is_hit(kind, at, words) -> None:
    order, answer = local_ranks.drill_order(asked(kind, at), SHAPE)
    assert (order.kind, order.at) == (kind, at or 0)
    assert answer == words


@pytest.mark.parametrize(("kind", "at", "words"), [
    ("stop-rank", 4, "there is no rank 4, only 0 to 3"),
    ("kill-agent", 2, "there is no node 2, only 0 to 1"),
    ("meteor", None, "no such drill: meteor; available drills: kill-rank"),
])  # fmt: skip
def test_what_there_is_not_is_refused(kind, at, words) -> None:
    order, answer = local_ranks.drill_order(asked(kind, at), SHAPE)
    assert order is None
    assert answer.startswith(REFUSED)
    assert words in answer


def test_only_the_node_that_is_meant_obeys() -> None:
    ranks = LocalRanks(1, range(2, 4))
    assert local_ranks.is_here(InjectFault(kind="nan", at=3), ranks, 1)
    assert not local_ranks.is_here(InjectFault(kind="nan", at=1), ranks, 1)
    assert local_ranks.is_here(InjectFault(kind="kill-agent", at=1), ranks, 1)
    assert not local_ranks.is_here(InjectFault(kind="kill-agent", at=0), ranks, 1)
    local_ranks.inject(InjectFault(kind="nan", at=3, serial=5), ranks)
    serial, kind, _ = ranks.by_rank[3].cell.read_drill_order()
    assert (serial, list(KINDS)[kind]) == (5, "nan")
    for local in ranks.by_rank.values():
        local.theirs.close()
    ranks.close()
