"""An agent that stands still is ended by its own node; whoever was paused itself ends nobody."""

import signal
from pathlib import Path

import pytest

from tests.trainer.agent.job import alive, until
from trainer.agent.processes.watchdog import LATE_SECONDS, add_silence
from trainer.protocol.failures.outcome import AgentEnd, AgentReport


def test_only_time_that_the_watchdog_could_see_counts() -> None:
    assert (add_silence(2.0, 1.0, False), add_silence(2.0, 1.0, True)) == (3.0, 0.0)
    assert add_silence(2.0, 1.0 + LATE_SECONDS + 0.1, False) == 0.0, "the whole job was suspended"


def report_of(path: Path) -> AgentReport | None:
    return AgentReport.read(path) if path.exists() else None


@pytest.mark.parametrize("node", [0, 1])
def test_an_agent_that_is_stopped_for_ever_is_ended_with_a_report(job, node):
    work = job("hang@*@*", detection={"hang": {"agent": 2.0, "on": False}}).start()
    work.go()
    until(lambda: len(work.notes()) == 4, 60, work.story)
    started = work.processes()
    work.agents[node].send_signal(signal.SIGSTOP)
    codes = work.wait(60)
    assert codes[node] == -signal.SIGKILL
    assert codes[1 - node] == 75, work.story()
    told = report_of(work.attempt.agent_report(node))
    assert (told.node, told.end) == (node, AgentEnd.FROZEN)
    assert "stood still for 2 s (stopped by a signal" in told.reason
    if node:
        outcome = work.outcome()
        assert (str(outcome.failure.kind), outcome.failure.node) == ("agent_lost", "local-1")
    else:
        other = report_of(work.attempt.agent_report(1))
        assert other.end is AgentEnd.GONE
    until(lambda: not any(alive(pid) for pid in started), 20, work.story)
