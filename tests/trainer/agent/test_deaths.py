"""Who dies with whom: agents, fork servers and jobs that are killed leave nothing behind, and the rest knows."""

import os
import signal
from pathlib import Path

import pytest

from tests.trainer.agent.job import LocalJob, alive, kill, until
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import AttemptResult


def wait_for_notes(work: LocalJob, count: int, key: str = "started") -> list[dict]:
    return until(lambda: (found := [n for n in work.notes() if key in n])[count - 1 :] and found, 60, work.story)


def fork_server_of(agent: int) -> int:
    """The agent's child that forks its ranks; the other one is its watchdog."""
    children = map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split())
    (child,) = [pid for pid in children if "watchdog" not in Path(f"/proc/{pid}/cmdline").read_text()]
    return child


@pytest.mark.parametrize("node", [0, 1])
def test_kill_9_of_an_agent_leaves_none_of_its_processes(job, node):
    work = job("child@*@*").start()
    work.go()
    children = [pid for note in wait_for_notes(work, 4, "children") for pid in note["children"]]
    assert all(alive(pid) for pid in children)
    victim = work.agents[node].pid
    members = [pid for pid in work.processes() if os.getsid(pid) == victim]
    mine = [note["children"] for note in work.notes() if "children" in note and note["rank"] // 2 == node]
    gone = [*members, *(pid for pair in mine for pid in pair)]
    assert len(members) >= 4  # agent, fork server, ranks, their children
    kill(victim)
    until(lambda: not any(map(alive, gone)), 30, work.story)
    work.agents[node].wait(30)
    # The other agent ends the job: with an outcome when it leads, without one when it has lost its leader.
    assert work.agents[1 - node].wait(60) == 75, work.story()
    assert not [pid for pid in children if alive(pid)]
    if node == 1:
        failure = work.outcome().failure
        assert (failure.kind, failure.node, work.outcome().exit_code) == ("agent_lost", "local-1", 75)
    else:
        assert not work.attempt.outcome.exists()


def test_a_killed_fork_server_fails_the_generation_and_is_replaced(job):
    work = job("child@*@1").start()
    work.go()
    wait_for_notes(work, 4, "children")
    kill(fork_server_of(work.agents[1].pid))
    assert work.wait() == [0, 0], work.story()
    outcome = work.outcome()
    assert (outcome.result, outcome.generations) == (AttemptResult.FINISHED, 2)
    ended = work.events(EventKind.GENERATION_ENDED)[0]
    assert "fork server of local-1 died: killed by SIGKILL" in ended.data["reason"]
    left = [pid for note in work.notes() if "children" in note for pid in note["children"] if alive(pid)]
    # Those that had left their rank's group included.
    assert left == []


def test_a_stopped_fork_server_cannot_keep_its_ranks_alive(job):
    work = job("kill@0@1", "hang@*@1").start()
    work.go()
    wait_for_notes(work, 3)
    os.kill(fork_server_of(work.agents[1].pid), signal.SIGSTOP)
    assert work.wait() == [0, 0], work.story()
    assert work.outcome().generations == 2


def test_the_children_of_a_rank_end_with_its_generation(job):
    work = job("child@1@1", "hang@*@1").start()
    work.go()
    wait_for_notes(work, 1, "children")
    kill(next(note["pid"] for note in wait_for_notes(work, 4) if note["rank"] == 3))
    assert work.wait() == [0, 0], work.story()
    (note,) = [note for note in work.notes() if "children" in note]
    assert not any(alive(pid) for pid in note["children"])
    second = min(note["time"] for note in work.notes() if note["generation"] == 2)
    assert second > max(note["time"] for note in work.notes() if note["generation"] == 1)


def test_agents_end_when_the_local_job_is_gone(job):
    work = job("hang@*@*").start()
    work.go()
    wait_for_notes(work, 4)
    work.job.kill()
    assert work.wait(60) == [75, 75], work.story()


def test_ranks_are_deaf_to_slurm_but_a_command_hears_sigterm(job):
    work = job().ends(0, 0)
    for note in wait_for_notes(work, 4):
        assert {"SIGUSR1", "SIGUSR2"} <= set(note["ignored"])
        assert not {"SIGTERM", "SIGINT", "SIGCONT"} & set(note["ignored"])
        assert note["group"]
