"""Requests to a live attempt, and checks of rank and node numbers."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.cli.access.run_folder import existing_folder
from orchestrator.cli.runs.run_reader import newest_heartbeat
from orchestrator.cli.runs.status import after_end, one_row
from orchestrator.errors import ConfigError, Precondition, WaitTimeout
from orchestrator.states import ENDED_RUNS, RunState
from trainer.protocol.config import JobConfig, load
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.protocol.events import EventKind, read_events
from trainer.protocol.failures.outcome import AttemptOutcome
from trainer.protocol.heartbeat import Heartbeat
from trainer.protocol.rank_readings import RankReadings
from trainer.protocol.requests import REFUSED, Request, RequestKind
from trainer.protocol.run_dir import AttemptDir, RunDir


def require_rank_and_node(cluster: ClusterShape, rank: int | None, node: int | None) -> None:
    """Raise ConfigError for a rank or node that a job of this shape does not have. Spare nodes are included."""
    there = (("rank", rank, cluster.world_size), ("node", node, cluster.nodes + cluster.spare_nodes))
    for what, given, count in there:
        if given is not None and given >= count:
            known = f"only 0 to {count - 1}" if count > 1 else "only 0"
            raise ConfigError(
                f"there is no {what} {given}, {known}", where=f"command line: --{what}", hint=f"--{what} {count - 1}"
            )


LOOK_EVERY = 0.2
STOPPED = 5.0
"""Seconds without a heartbeat after which a killed agent is considered dead."""
SILENT = 90.0
"""Seconds without a heartbeat after which a request would not be answered; allows for clock skew between nodes."""


@dataclass(frozen=True, kw_only=True)
class LiveAttempt:
    """The newest attempt of a run, training or about to."""

    run: str
    folder: RunDir
    attempt_dir: AttemptDir
    heartbeat: Heartbeat  # the newest one

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
    def cluster(self) -> ClusterShape:
        """Nodes and ranks of the attempt. Raises Precondition if its configuration cannot be read."""
        return self.config.cluster

    def raise_if_refused(self, request: str) -> None:
        """Raise Precondition if the attempt has refused the request."""
        answer = self.answer(request)
        if answer is not None and answer.startswith(REFUSED):
            raise Precondition(f"{self.run}: {answer}", where=str(self.folder.path), hint=f"orch show {self.run}")

    def answer(self, request: str) -> str | None:
        """Return the attempt's answer to the request; None before it has answered."""
        events, _ = read_events(self.attempt_dir.event_file("coordinator"))
        answers = (event.data for event in events if event.kind == EventKind.REQUEST_ANSWERED)
        return next((str(data.get("answer", "")) for data in answers if data.get("name") == request), None)


def find_live_attempt(name: str, now: float | None = None) -> LiveAttempt:
    """Return the live attempt of a run. Raises NotFound, or Precondition if no job could answer."""
    row = one_row(name)
    run, state = row["run"], row["state"]
    if state in ENDED_RUNS or state == RunState.HELD:
        raise Precondition(f"{run} is {state}: nothing runs", where=row["reason"], hint=after_end(row))
    folder = existing_folder(run, row["run_dir"])
    attempts = folder.all_attempts()
    heartbeat = newest_heartbeat(attempts[-1]) if attempts else None
    if heartbeat is None:
        raise Precondition(
            f"{run} is {state}: its job has not begun", where=row["reason"], hint=f"wait for it:  orch status {run} -w"
        )
    attempt_dir = attempts[-1]
    over = _end_reason(attempt_dir)
    if over is not None:
        raise Precondition(
            f"attempt {attempt_dir.number} of {run} has ended, the next one has not begun", where=over,
            hint=f"wait for it:  orch status {run} -w",
        )  # fmt: skip
    silent = (time.time() if now is None else now) - heartbeat.time
    if silent > SILENT:
        raise Precondition(
            f"attempt {attempt_dir.number} of {run} has been silent for {silent:.0f} s: it would not answer",
            where=str(attempt_dir.heartbeat), hint=f"orch logs {run} --node 0",
        )  # fmt: skip
    return LiveAttempt(run=run, folder=folder, attempt_dir=attempt_dir, heartbeat=heartbeat)


def await_answer(found: LiveAttempt, request: str, timeout: float, clock: Callable[[], float] = time.monotonic) -> str:
    """Wait for the answer to a request. Raises Precondition on refusal or if the attempt ends first, WaitTimeout."""
    give_up = clock() + timeout
    while True:
        over = _end_reason(found.attempt_dir)
        found.raise_if_refused(request)
        answer = found.answer(request)
        if answer is not None:
            return answer
        if over is not None:
            raise Precondition(
                f"attempt {found.attempt_dir.number} of {found.run} ended before it answered",
                where=over, hint=f"orch show {found.run}",
            )  # fmt: skip
        if clock() >= give_up:
            raise WaitTimeout(
                f"{found.run} has not answered within {timeout:g} s", where=str(found.folder.requests / request),
                hint=f"the request stands; look:  orch status {found.run}   orch logs {found.run} --node 0",
            )  # fmt: skip
        time.sleep(LOOK_EVERY)


def await_end(found: LiveAttempt, request: str, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
    """Wait until the attempt has written its outcome, or its heartbeat has stopped.

    Raises Precondition if it refuses the request that should end it, and WaitTimeout.
    """
    began = clock()
    heartbeat, still = newest_heartbeat(found.attempt_dir), began
    while _end_reason(found.attempt_dir) is None:
        found.raise_if_refused(request)
        now, newest = clock(), newest_heartbeat(found.attempt_dir)
        if newest != heartbeat:
            heartbeat, still = newest, now
        elif now - still >= STOPPED:
            return
        if now - began >= timeout:
            raise WaitTimeout(
                f"attempt {found.attempt_dir.number} of {found.run} goes on", where=str(found.attempt_dir.path),
                hint=f"orch show {found.run}",
            )  # fmt: skip
        time.sleep(LOOK_EVERY)


def newest_ranks(attempt_dir: AttemptDir) -> RankReadings | None:
    """Return the coordinator's newest readings of its ranks; None if none can be read."""
    try:
        return RankReadings.read(attempt_dir.ranks)
    except (OSError, ValueError):
        return None


def _end_reason(attempt_dir: AttemptDir) -> str | None:
    """Return the reason in the attempt's outcome; None before it has one."""
    try:
        return AttemptOutcome.read(attempt_dir.outcome).reason
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        return "its outcome cannot be read"
