"""SIGSTOP of the controller, the coordinator or another agent: results are unchanged, no other process is blamed."""

import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.end_to_end.user import CALM, SMALL, User, assert_exact, assert_gone, assert_no_step_twice_at_once, compare

pytestmark = [pytest.mark.multi, pytest.mark.timeout(1500)]
HASTY = "detection.hang.agent=4"
"""Seconds after which a node ends a stopped agent; the default is longer than an agent's patience."""


def agent(user: User, node: int) -> psutil.Process:
    """Return the agent of a simulated node; node 0's is the coordinator."""

    def found() -> list[psutil.Process]:
        return [one for one in user.processes("orch-agent") if one.environ()["SUBMITIT_LOCAL_GLOBALID"] == str(node)]

    return user.until(found, 60, f"the agent of node {node}")[0]


def trains(user: User, run: str, attempt: int, step: int) -> None:
    def far() -> bool:
        return any(line["attempt"] == attempt and line["step"] >= step for line in user.work(run))

    user.until(far, 180, f"step {step} in attempt {attempt}")


def stop_agent(user: User, run: str, node: int, attempt: int) -> psutil.Process:
    """Stop a node's agent permanently; its node must end it."""
    victim = agent(user, node)
    family = [victim, *victim.children(recursive=True)]
    victim.send_signal(signal.SIGSTOP)
    user.until(lambda: len(user.show(run)["attempts"]) > attempt, 240, "a new attempt")
    assert_gone(family)
    return victim


def blamed(user: User, run: str) -> list[tuple[str, str | None, int | None]]:
    failures = [attempt["failure"] for attempt in user.show(run)["attempts"] if attempt["failure"]]
    return [(failure["kind"], failure["node"], failure["rank"]) for failure in failures]


def warnings(user: User, run: str) -> str:
    return user.run("status", run).stderr


@pytest.mark.proof
def test_controller_agent_and_coordinator_are_stopped_in_one_run(user: User, calm: tuple[User, str]) -> None:
    run = user.submit("tiny-gpt", *CALM, *user.slowly(2.0), HASTY)["run"]
    trains(user, run, 1, 6)

    (controller,) = user.processes("orch-controller")
    controller.send_signal(signal.SIGSTOP)
    user.until(lambda: f"pid {controller.pid}" in warnings(user, run), 30, "word of the stopped controller")
    assert "controller stalled for" in warnings(user, run)
    assert "stopped by a signal" in warnings(user, run)
    assert user.status(run)["state"] == "RUNNING"
    controller.send_signal(signal.SIGCONT)
    user.until(lambda: "stalled" not in warnings(user, run), 60, "a controller that goes on")

    stop_agent(user, run, 1, 1)
    trains(user, run, 2, 0)
    stop_agent(user, run, 0, 2)
    assert user.wait(run, 600) == 0
    assert user.status(run)["state"] == "SUCCEEDED"
    compare(user, run, calm)
    assert_no_step_twice_at_once(user, run)
    assert blamed(user, run) == [("agent_lost", "local-1", None), ("agent_lost", "local-0", None)]
    last = user.show(run)["attempts"][1]["failure"]["reason"]
    assert last.startswith("the agent of local-0 stood still for 4 s (stopped by a signal")


def pause(victim: psutil.Process, seconds: float, meanwhile: Callable[[], Any]) -> None:
    """Stop a process for this many seconds; 0: permanently."""
    victim.send_signal(signal.SIGSTOP)
    give_up = time.monotonic() + (seconds or 200.0)
    while time.monotonic() < give_up:
        meanwhile()
        time.sleep(10.0)
    if seconds and victim.is_running():
        victim.send_signal(signal.SIGCONT)


@pytest.mark.proof
@pytest.mark.parametrize("seconds", [180.0, 0.0])
@pytest.mark.parametrize("who", ["controller", "coordinator", "agent"])
def test_stopped_for_three_minutes_and_for_ever(user: User, who: str, seconds: float) -> None:
    steps = [*SMALL, "train.steps=200", "checkpoint.every=10"]
    calm = user.submit("tiny-gpt", *steps)["run"]
    assert user.wait(calm, 600) == 0
    run = user.submit("tiny-gpt", *steps, *user.slowly(0.8))["run"]
    trains(user, run, 1, 6)
    victim = (
        user.processes("orch-controller")[0] if who == "controller" else agent(user, 0 if who == "coordinator" else 1)
    )
    said: list[str] = []
    pause(victim, seconds, lambda: said.append(warnings(user, run) + user.status(run)["reason"]))
    if who == "controller":
        assert all("controller stalled for" in words for words in said[1:])
        assert any("takes over once its lease has expired" in words for words in said)
    assert user.wait(run, 900) == 0
    assert user.status(run)["state"] == "SUCCEEDED"
    assert_exact(user, run, calm)
    assert_no_step_twice_at_once(user, run)
    node = {"controller": [], "coordinator": ["local-0"], "agent": ["local-1"]}[who]
    assert [name for _, name, _ in blamed(user, run)] == node, blamed(user, run)
    if who == "controller":
        assert len(user.show(run)["attempts"]) == 1
