"""Real agents, real processes: two nodes of two ranks, restarted in place."""

import os
import signal
import time

import pytest

from tests.trainer.agent.job import until
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import AttemptResult


def test_two_nodes_run_a_command_to_its_end(job):
    work = job().ends(0, 0)
    assert sorted(note["rank"] for note in work.notes()) == [0, 1, 2, 3]
    assert work.outcome().result is AttemptResult.FINISHED
    assert "hello from rank 3" in work.attempt.rank_log(3).read_text()


def test_a_killed_rank_is_followed_by_a_new_generation_on_the_same_nodes(job):
    work = job("kill@2@1", "hang@*@1").ends(0, 0)
    assert sorted(note["rank"] for note in work.notes() if note["generation"] == 2) == [0, 1, 2, 3]
    (ended, _) = work.events(EventKind.GENERATION_ENDED)
    assert ended.data["failure"]["kind"] == "rank_killed"
    assert ended.data["failure"]["rank"] == 2
    assert "SIGKILL; restart 1 of 5 in place" in ended.data["reason"]
    assert work.outcome().generations == 2
    until(lambda: work.job.poll() is None)


@pytest.mark.parametrize("file", ["held", "request"])
def test_agents_leave_although_a_thread_of_theirs_waits_for_a_file_for_ever(job, file):
    work = job("hang@*@1").start()
    work.go()
    until(lambda: len(work.notes()) == 4, 20, work.story)
    # Reading it blocks for ever: so does the coordinator's look at whether it is fenced off, or at what it is asked.
    blocks = {"held": work.attempt.go, "request": work.run.requests / "stop.json"}[file]
    os.mkfifo(work.run.path / "fifo")
    os.replace(work.run.path / "fifo", blocks)
    time.sleep(2.0)  # a look a second
    work.agents[0].send_signal(signal.SIGTERM)
    assert work.wait(20) == [76, 76], work.story()
