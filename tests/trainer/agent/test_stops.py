"""Stops: signals, requests, the end of the job; commands that comply and commands that do not."""

import os
import signal
import time

import pytest

from tests.trainer.agent.job import until
from tests.trainer.agent.warm_agents import FIRST
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import AttemptResult
from trainer.protocol.requests import Request, RequestKind


def wait_for(work, key: str) -> None:
    until(lambda: len([note for note in work.notes() if key in note]) == 4, 20, work.story)


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGUSR1])
def test_a_signal_to_one_agent_stops_the_whole_job_and_nothing_more_is_claimed(job, number):
    work = job("trap@*@*").start()
    work.go()
    wait_for(work, "trapped")
    work.agents[1].send_signal(number)
    assert work.wait() == [76, 76], work.story()
    assert (work.outcome().result, work.outcome().reason) == (AttemptResult.STOPPED, f"an agent got {number.name}")
    assert work.events(EventKind.STOP_REQUESTED)[0].data["reason"] == f"an agent got {number.name}"
    assert len([note for note in work.notes() if "saved" in note]) == 4


def test_a_command_that_saves_on_another_signal_gets_that_one(job):
    work = job("trap:SIGUSR1@*@*", watch={"stop_signal": "USR1"}).start()
    work.go()
    wait_for(work, "trapped")
    name = Request(kind=RequestKind.STOP, attempt=1, reason="enough").write(work.run.requests)
    assert work.wait() == [76, 76], work.story()
    assert len([note for note in work.notes() if "saved" in note]) == 4
    answers = [event.data for event in work.events(EventKind.REQUEST_ANSWERED)]
    assert [(one["name"], one["answer"]) for one in answers] == [(name, "the command gets SIGUSR1")]


def test_a_stop_request_is_answered_and_a_command_that_dies_of_sigterm_has_stopped(job):
    work = job("hang@*@*").start()
    work.go()
    wait_for(work, "started")
    Request(kind=RequestKind.SAVE, attempt=1, reason="?").write(work.run.requests)
    Request(kind=RequestKind.STOP, attempt=2, reason="for another attempt").write(work.run.requests)
    name = Request(kind=RequestKind.STOP, attempt=1, reason="enough").write(work.run.requests)
    assert work.wait() == [76, 76], work.story()
    assert work.outcome().reason == "enough"
    answers = {event.data["name"]: event.data["answer"] for event in work.events(EventKind.REQUEST_ANSWERED)}
    assert len(answers) == 2
    assert answers.pop(name) == "the command gets SIGTERM"
    assert next(iter(answers.values())).startswith("refused")


def test_ranks_that_do_not_stop_before_the_job_ends_are_killed_and_it_is_said(job):
    work = job("deaf@*@*", cluster={"time": "60"}).start()
    work.go()
    wait_for(work, "deaf")
    # The scheduler knows better when the job ends: in eight seconds, five of which are for the outcome.
    Request(kind=RequestKind.DEADLINE, attempt=1, reason="", value=time.time() + 8).write(work.run.requests)
    assert work.wait(20) == [75, 75], work.story()
    outcome = work.outcome()
    assert (outcome.result, outcome.failure.kind) == (AttemptResult.FAILED, "time_limit")
    assert "killed" in outcome.reason
    assert work.events(EventKind.STOP_REQUESTED)[0].data["reason"] == "the time limit is near"


def test_a_signal_before_go_ends_the_agents_and_starts_nothing(job):
    work = job().start()
    until(lambda: all(work.attempt.agent_log(node).exists() for node in (0, 1)), 10, work.story)
    for agent in work.agents:
        os.kill(agent.pid, signal.SIGTERM)
    assert work.wait(10) == [75, 75]
    assert work.notes() == []


def test_a_failure_while_stopping_does_not_start_a_new_generation(job):
    work = job("deaf@0@1", "trap@1@1", "hang@2@1", "hang@3@1").start()
    work.go()
    until(lambda: len(work.notes()) == 6, 20, work.story)
    work.agents[0].send_signal(signal.SIGUSR2)
    until(lambda: work.events(EventKind.STOP_REQUESTED), 30, work.story)
    os.kill(next(note["pid"] for note in work.notes() if "deaf" in note), signal.SIGKILL)
    assert work.wait() == [76, 76], work.story()
    assert work.outcome().generations == 1


HASTY = """
from trainer.agent import node_agent
from trainer.agent.control import control_server
from trainer.agent.nodes import roster
node_agent.AGENT_TIMEOUT_SECONDS = roster.AGENT_TIMEOUT_SECONDS = 5.0
node_agent.POLL_SECONDS = control_server.POLL_SECONDS = 0.2
control_server.LATE_SECONDS = 0.5
"""
"""What every agent runs first: a minute of silence takes five seconds, the pause of the test more."""


def test_a_pause_of_the_whole_job_ends_nothing_and_no_agent(job):
    work = job("trap@*@*", detection={"hang": {"agent": 5.0}}).start(environ={FIRST: HASTY})
    work.go()
    wait_for(work, "trapped")
    paused = work.processes()
    assert len(paused) >= 10  # agents, watchdogs, fork servers, ranks
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in paused:
            os.kill(pid, number)
        time.sleep(6.5 if number is signal.SIGSTOP else 1.5)
    work.agents[1].send_signal(signal.SIGUSR2)
    assert work.wait(60) == [76, 76], work.story()
    assert work.outcome().generations == 1
    assert not work.attempt.agent_reports()
