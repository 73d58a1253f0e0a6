"""The writers that an agent owns: over generations, over their own deaths, and gone with the agent."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpointing.writer.link import WriterLink
from checkpointing.writer.write_orders import WriteOrder
from tests.trainer.agent.job import LocalJob, alive, until
from tests.trainer.agent.test_node_agent import Alone
from trainer.agent.rank_processes.checkpoint_writers import CheckpointWriter, CheckpointWriters
from trainer.protocol.messages.agents import StartGeneration

SIZE = 1 << 20


def opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@pytest.fixture
def checkpoint_writer(tmp_path: Path) -> Iterator[CheckpointWriter]:
    made = CheckpointWriter(3, os.environ, opened(tmp_path / "log"))
    yield made
    made.dismiss()
    made.close()
    assert (tmp_path / "log").read_text() == ""


def attached(checkpoint_writer: CheckpointWriter) -> WriterLink:
    """The link of a rank that was just started."""
    with checkpoint_writer.connection() as (memory, writer):
        return WriterLink.attach(os.dup(writer), os.dup(memory))


def saved(link: WriterLink, root: Path, name: str) -> None:
    order = WriteOrder(place=str(root), folder=name, buffer=0, files=(("f", 0, SIZE),), step=1, plan="p")
    assert link.write(order).result(20).files[0].size == SIZE


def test_the_memory_and_its_record_go_on_from_generation_to_generation(checkpoint_writer, tmp_path):
    first = attached(checkpoint_writer)
    first.arena.shape(SIZE, 1, "p")
    first.arena.buffer(0)[:] = b"1" * SIZE
    saved(first, tmp_path, "s1")
    pid = checkpoint_writer.pid
    second = attached(checkpoint_writer)
    assert checkpoint_writer.pid == pid
    assert second.arena.record(0).name == "s1"
    assert bytes(second.arena.buffer(0)) == b"1" * SIZE
    saved(second, tmp_path, "s2")
    first.close()
    second.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_writer_that_is_dead_or_stopped_is_replaced_over_the_same_memory(checkpoint_writer, tmp_path, number):
    first = attached(checkpoint_writer)
    first.arena.shape(SIZE, 1, "p")
    saved(first, tmp_path, "s1")
    old = checkpoint_writer.pid
    os.kill(old, number)
    if number == signal.SIGKILL:
        until(lambda: checkpoint_writer.pid is None, 30)
    else:
        with checkpoint_writer.connection() as ends:  # for a generation that it never takes on
            assert len(ends) == 2
    second = attached(checkpoint_writer)
    assert checkpoint_writer.pid not in (old, None)
    assert not alive(old)
    assert second.arena.record(0).name == "s1"
    saved(second, tmp_path, "s2")
    first.close()
    second.close()


def test_a_writer_that_dies_as_its_rank_is_started_costs_no_memory(checkpoint_writer, tmp_path):
    first = attached(checkpoint_writer)
    first.arena.shape(SIZE, 1, "p")
    saved(first, tmp_path, "s1")
    os.kill(checkpoint_writer.pid, signal.SIGSTOP)
    with checkpoint_writer.connection() as (memory, writer):
        os.kill(checkpoint_writer.pid, signal.SIGKILL)
        second = WriterLink.attach(os.dup(writer), os.dup(memory))
    assert second.arena.record(0).name == "s1"
    saved(second, tmp_path, "s2")
    first.close()
    second.close()


def test_without_a_writer_a_rank_gets_nothing_and_makes_its_own(checkpoint_writer, monkeypatch):
    os.kill(checkpoint_writer.pid, signal.SIGKILL)
    until(lambda: checkpoint_writer.pid is None, 30)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with checkpoint_writer.connection() as ends:
        assert ends == []


def test_writers_leave_when_they_are_dismissed(tmp_path):
    output = opened(tmp_path / "log")
    before = len(os.listdir("/proc/self/fd"))
    made = CheckpointWriters(range(2, 4), os.environ, output)
    with made.connection(1) as ends:
        assert len(ends) == 2
    pids = made.pids()
    assert len(pids) == 2
    asyncio.run(made.close())
    assert not any(alive(pid) for pid in pids)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_sampler_of_a_generation_knows_the_writer_of_every_rank(tmp_path):
    alone = Alone(tmp_path)
    alone.agent._node_rank = 1
    checkpoint_writers = alone.agent._writers = CheckpointWriters(range(2, 4), os.environ, opened(tmp_path / "log"))
    alone.ranks.mark_never_started()

    async def begin() -> None:
        alone.agent._start_generation(
            StartGeneration(generation=1, node_rank=1)
        )  # no fork server: no rank is started, but they would be looked at

    asyncio.run(begin())
    writer = alone.agent._sampler._writer
    assert [writer(2), writer(3)] == [checkpoint_writer.pid for checkpoint_writer in checkpoint_writers._writers]
    assert {writer(2), writer(3)} == checkpoint_writers.pids()
    os.kill(writer(2), signal.SIGKILL)
    until(lambda: writer(2) is None, 30)
    asyncio.run(checkpoint_writers.close())
    alone.close()


def test_killing_the_ranks_of_a_dead_fork_server_spares_the_writers(tmp_path):
    alone = Alone(tmp_path)
    rank = alone.ranks.by_rank[0]
    orphan = subprocess.Popen(["sleep", "60"], process_group=0)
    rank.pid = orphan.pid
    checkpoint_writers = alone.agent._writers = CheckpointWriters(range(2), os.environ, opened(tmp_path / "log"))
    pids = checkpoint_writers.pids()
    alone.agent._startup_failures = 9  # no other fork server
    asyncio.run(alone.agent._replace_fork_server("it was killed"))
    assert alone.ranks.all_gone()
    orphan.wait(30)
    assert checkpoint_writers.pids() == pids
    asyncio.run(checkpoint_writers.close())
    alone.close()


_AGENT = """
import os, sys, time
from pathlib import Path
from trainer.agent.rank_processes.checkpoint_writers import CheckpointWriter
scribe = CheckpointWriter(0, os.environ, os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT))
if sys.argv[2] == "serving":
    with scribe.connection():
        pass
    scribe._control.setblocking(True)
    scribe._control.recv(1)
print(scribe.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("state", ["starting", "serving", "stopped"])
def test_a_writer_dies_with_its_agent(tmp_path, state):
    doing = "starting" if state == "starting" else "serving"
    command = [sys.executable, "-c", _AGENT, str(tmp_path / "log"), doing]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as agent:
        pid = int(agent.stdout.readline())
        if state == "stopped":
            os.kill(pid, signal.SIGSTOP)
        assert alive(pid)
        agent.kill()
    until(lambda: not alive(pid), 30)


def writers_of(work: LocalJob) -> dict[int, str]:
    def comm(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            return ""

    return {pid: comm(pid) for pid in work.processes() if comm(pid).startswith("orch-writer")}


def test_a_users_own_script_has_no_writers(job: Callable[..., LocalJob]):
    work = job("hang@*@*", nodes=1).start()
    work.go()
    until(lambda: len(work.notes()) == 2, 20, work.story)
    assert writers_of(work) == {}


@pytest.mark.multi
def test_writers_outlive_a_fork_server_and_not_an_agent(job: Callable[..., LocalJob]):
    work = job(command=[], nodes=1, ranks=2).start()
    work.go()
    writers = until(lambda: len(found := writers_of(work)) == 2 and found, 20, work.story)
    assert sorted(writers.values()) == ["orch-writer-0", "orch-writer-1"]
    agent = work.agents[0].pid
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    others = {int(pid) for pid in children} - set(writers)
    (fork_server,) = [pid for pid in others if "watchdog" not in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(fork_server, signal.SIGKILL)
    until(lambda: not alive(fork_server), 30)
    until(lambda: "died" in str([e.data for e in work.events()]), 10, work.story)
    assert all(alive(pid) for pid in writers)
    work.agents[0].kill()
    until(lambda: not any(alive(pid) for pid in writers), 30, work.story)
