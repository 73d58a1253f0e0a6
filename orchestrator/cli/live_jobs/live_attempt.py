"""Requests to a live attempt: `orch save`, and checks of rank and node numbers."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import click

from orchestrator.cli.access.run_folder import existing_folder
from orchestrator.cli.runs.run_reader import newest_heartbeat
from orchestrator.cli.terminal.argument_types import timeout_option
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import ConfigError, Precondition, WaitTimeout
from orchestrator.interrupts import interrupts_held
from orchestrator.run_view import find_run
from trainer.protocol.config import JobConfig, load
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.protocol.events import EventKind, read_events
from trainer.protocol.failures.outcome import AttemptOutcome
from trainer.protocol.heartbeat import Heartbeat
from trainer.protocol.requests import REFUSED, Request, RequestKind
from trainer.protocol.run_dir import AttemptDir, RunDir

LOOK_EVERY = 0.2
STOPPED = 5.0
"""Seconds without a heartbeat after which a killed agent counts as dead."""
SILENT = 90.0
"""Seconds without a heartbeat after which a request would not be answered; allows for clock skew between nodes."""
_SAVED = re.compile(r"^saved at step (\d+)")


@click.command(cls=Verb, json_data="{run, attempt, answer, step}")
@click.argument("run")
@click.option("--wait/--no-wait", "wait_", default=True, help="Wait until the checkpoint is committed (default).")
@timeout_option(600.0)
@click.pass_obj
def save(screen: Screen, run: str, wait_: bool, timeout: float) -> None:
    """Save a checkpoint now, at the next step boundary; training continues.

    A save that is already in progress does not count. The request survives restarts within the attempt, and stays valid
    after a timeout (exit code 124). The exit code is 4 if nothing is running, or if the ranks run your `command:`.
    """
    screen.if_interrupted = lambda: "interrupted: nothing was requested"
    found = find_live_attempt(run)
    stands = f"interrupted: the request stands, and {found.run} saves at its next step boundary"
    with interrupts_held():
        request = found.send_request(RequestKind.SAVE, "orch save")
        screen.if_interrupted = lambda: stands
    answer = await_answer(found, request, timeout) if wait_ else None
    saved = _SAVED.match(answer or "")
    step = int(saved[1]) if saved else None
    data = {"run": found.run, "attempt": found.attempt_dir.number, "answer": answer, "step": step}
    note = "" if wait_ else f"  see:  orch ckpt ls {found.run}"
    screen.answer("save", data, f"{found.run}: {answer or 'save requested; training continues'}", note=note)


def require_rank_and_node(cluster: ClusterShape, rank: int | None, node: int | None) -> None:
    """Raise ConfigError for a rank or node that a job of this shape does not have. Spare nodes are included."""
    there = (("rank", rank, cluster.world_size), ("node", node, cluster.nodes + cluster.spare_nodes))
    for what, given, count in there:
        if given is not None and given >= count:
            known = f"only 0 to {count - 1}" if count > 1 else "only 0"
            where, hint = f"command line: --{what}", f"--{what} {count - 1}"
            raise ConfigError(f"there is no {what} {given}, {known}", where=where, hint=hint)


@dataclass(frozen=True, kw_only=True)
class LiveAttempt:
    """Newest attempt of a run, which is training or soon will be."""

    run: str
    folder: RunDir
    attempt_dir: AttemptDir
    heartbeat: Heartbeat  # the newest

    def send_request(self, kind: RequestKind, reason: str, *, value: float | None = None, detail: str = "") -> str:
        """Write a request to the folder that agent 0 polls once a second; return the request's name."""
        self.folder.requests.mkdir(mode=0o700, exist_ok=True)
        request = Request(kind=kind, attempt=self.attempt_dir.number, reason=reason, value=value, detail=detail)
        return request.write(self.folder.requests)

    @property
    def config(self) -> JobConfig:
        """Configuration of the attempt. Raises Precondition if it cannot be read."""
        try:
            return load(self.folder, self.attempt_dir.number)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            where = str(self.folder.path)
            what = f"the configuration of {self.run} cannot be read: {error}"
            raise Precondition(what, where=where, hint=f"orch show {self.run}") from error

    @property
    def end_reason(self) -> str | None:
        """Reason in the attempt's outcome; None before there is an outcome."""
        try:
            return AttemptOutcome.read(self.attempt_dir.outcome).reason
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError):
            return "its outcome cannot be read"

    def answer(self, request: str) -> str | None:
        """Return the attempt's answer to the request; None before there is one. Raises Precondition on a refusal."""
        events, _ = read_events(self.attempt_dir.event_file("coordinator"))
        answers = (event.data for event in events if event.kind == EventKind.REQUEST_ANSWERED)
        answer = next((str(data.get("answer", "")) for data in answers if data.get("name") == request), None)
        if answer is not None and answer.startswith(REFUSED):
            raise Precondition(f"{self.run}: {answer}", where=str(self.folder.path), hint=f"orch show {self.run}")
        return answer


def find_live_attempt(name: str) -> LiveAttempt:
    """Return the live attempt of a run. Raises NotFound, or Precondition if no job can answer."""
    view = find_run(name)
    run, later = view.run, f"wait for it:  orch status {view.run} -w"
    if view.is_over:
        raise Precondition(f"{run} is {view.state}: nothing is running", where=view.reason, hint=view.after_end)
    folder = existing_folder(run, view.run_dir)
    attempts = folder.all_attempts()
    heartbeat = newest_heartbeat(attempts[-1]) if attempts else None
    if heartbeat is None:
        raise Precondition(f"{run} is {view.state}: its job has not begun", where=view.reason, hint=later)
    found = LiveAttempt(run=run, folder=folder, attempt_dir=attempts[-1], heartbeat=heartbeat)
    number = found.attempt_dir.number
    if (over := found.end_reason) is not None:
        what = f"attempt {number} of {run} has ended, the next one has not begun"
        raise Precondition(what, where=over, hint=later)
    silent = time.time() - heartbeat.time
    if silent > SILENT:
        what = f"attempt {number} of {run} has been silent for {silent:.0f} s: it would not answer"
        raise Precondition(what, where=str(found.attempt_dir.heartbeat), hint=f"orch logs {run} --node 0")
    return found


def await_answer(found: LiveAttempt, request: str, timeout: float, clock: Callable[[], float] = time.monotonic) -> str:
    """Wait for the answer to a request. Raises WaitTimeout, or Precondition on refusal or if the attempt ends first."""
    give_up = clock() + timeout
    while True:
        over = found.end_reason
        answer = found.answer(request)
        if answer is not None:
            return answer
        if over is not None:
            what = f"attempt {found.attempt_dir.number} of {found.run} ended before it answered"
            raise Precondition(what, where=over, hint=f"orch show {found.run}")
        if clock() >= give_up:
            raise WaitTimeout(
                f"{found.run} has not answered within {timeout:g} s", where=str(found.folder.requests / request),
                hint=f"the request stands; see:  orch status {found.run}   orch logs {found.run} --node 0",
            )  # fmt: skip
        time.sleep(LOOK_EVERY)


def await_end(found: LiveAttempt, request: str, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Wait until the attempt has written its outcome, or its heartbeat has stopped.

    Raises WaitTimeout, or Precondition if the attempt refuses the request that should end it.
    """
    began = clock()
    heartbeat, still = newest_heartbeat(found.attempt_dir), began
    while found.end_reason is None:
        found.answer(request)
        now, newest = clock(), newest_heartbeat(found.attempt_dir)
        if newest != heartbeat:
            heartbeat, still = newest, now
        elif now - still >= STOPPED:
            return
        if now - began >= timeout:
            what, place = f"attempt {found.attempt_dir.number} of {found.run} continues", str(found.attempt_dir.path)
            raise WaitTimeout(what, where=place, hint=f"orch show {found.run}")
        time.sleep(LOOK_EVERY)
