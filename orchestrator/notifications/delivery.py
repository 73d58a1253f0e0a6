"""One notification: its message, its delivery record, and the process that delivers it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from orchestrator.notifications.channels import Order
from orchestrator.registry.records import Run, Transition
from orchestrator.scheduler.job_environment import package_root
from orchestrator.states import RunState
from trainer.protocol.plain_data import build

SCHEMA = "orch.notification/1"
MOST_WAITING = 8
"""Maximum number of messages per run that wait for a retry. If there are more, the oldest is dropped."""
WITHIN = 60.0
"""Seconds for all channels of one notification; each channel has a shorter timeout."""
_NEXT_COMMANDS = {
    RunState.HELD: "see: `orch show {run}`; to continue: `orch resume {run}`",
    RunState.FAILED: "see: `orch logs {run} --rank first-error`; once fixed: `orch resume {run}`",
}


def make_message(run: Run, change: Transition) -> dict[str, Any]:
    """Return the message for a state change, with the current step and loss. A resent message has the same `id`."""
    moment = datetime.fromtimestamp(change.time, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    place = f" at step {run.step} of {run.total_steps}" if run.total_steps else ""
    why = f": {change.reason}" if change.reason else ""
    commands = _NEXT_COMMANDS.get(RunState(change.after), "see: `orch show {run}`").format(run=run.name)
    return {
        "schema": SCHEMA, "id": f"{run.name}/{change.after}/{moment}",
        "text": f"{run.name} is {change.after}{place}{why} ({commands})", "run": run.name, "state": change.after,
        "before": change.before, "reason": change.reason, "time": moment, "step": run.step,
        "total_steps": run.total_steps, "loss": run.loss, "tags": run.tags, "run_dir": run.run_dir,
    }  # fmt: skip


def message_variables(message: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of a message as environment variables: `ORCH_STATE` and so on."""
    loss = message["loss"]
    values = {**message, "tags": ",".join(message["tags"]), "loss": "" if loss is None else repr(loss)}
    names = {"id": "ORCH_NOTIFICATION_ID", "time": "ORCH_CHANGED_AT"}
    return {
        names.get(name, f"ORCH_{name.upper()}"): str(value).replace("\0", "")
        for name, value in values.items()
        if name != "schema"
    }


@dataclass(frozen=True, kw_only=True)
class DeliveryRecord:
    """Delivery record for the run's `index`-th state change, counting from 0."""

    index: int
    state: str
    at: float = 0.0  # last try, in seconds since the epoch
    tries: int = 0
    next_at: float = 0.0  # next try; 0 if there is none
    delivered: tuple[str, ...] = ()  # names of channels
    failed: dict[str, str] = field(default_factory=dict)  # reasons, keyed by channel

    @property
    def trouble(self) -> str:
        """Why some channels failed; empty if all of them delivered the message."""
        if not self.failed:
            return ""
        ways = "; ".join(f"{channel}: {why}" for channel, why in sorted(self.failed.items()))
        after = "will be retried" if self.next_at else f"given up after {self.tries} tries"
        return f"the {self.state} notification could not be sent by {ways} ({after})"


@dataclass(frozen=True, kw_only=True)
class NotificationState:
    """Delivery state of a run's notifications; changes before `settled` were sent or need no message."""

    settled: int = 0
    newest: DeliveryRecord | None = None
    waiting: tuple[DeliveryRecord, ...] = ()  # messages to retry, oldest first

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "NotificationState":
        """Parse the dictionary in the run's row."""
        made: NotificationState = build(cls, values)
        return made

    def after(self, tried: DeliveryRecord) -> "NotificationState":
        """Return the state after this try."""
        others = [each for each in self.waiting if each.index != tried.index]
        waiting = sorted([*others, tried] if tried.next_at else others, key=lambda each: each.index)
        newest = tried if self.newest is None or tried.index >= self.newest.index else self.newest
        settled = max(self.settled, tried.index + 1)
        return NotificationState(settled=settled, newest=newest, waiting=tuple(waiting[-MOST_WAITING:]))

    @property
    def trouble(self) -> str:
        """Why the newest message with failed channels was not delivered; empty if all were."""
        found = [each.trouble for each in (*self.waiting, self.newest) if each is not None and each.failed]
        return found[-1] if found else ""


@dataclass
class Sender:
    """Delivery in progress."""

    process: "subprocess.Popen[bytes]"
    channels: tuple[str, ...]
    deadline: float

    @classmethod
    def begin(cls, order: Order) -> "Sender":
        """Start the process, and pass it the order in memory that other users cannot read. Raises OSError."""
        environment = dict(os.environ)
        if root := package_root():
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        command = [sys.executable, "-P", "-m", "orchestrator.notifications.channels"]
        # A pipe would block the controller until the process reads from it.
        with open(os.memfd_create("orch-notification"), "w+b") as given:
            given.write(json.dumps(asdict(order), default=str).encode())
            given.seek(0)
            process = subprocess.Popen(
                command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd="/",
                start_new_session=True,
            )  # fmt: skip
        return cls(process, tuple(order.targets), time.monotonic() + WITHIN)

    def result(self) -> Mapping[str, str] | None:
        """Return each channel's error, or "" if it succeeded; None while the delivery is in progress."""
        late = self.process.poll() is None
        if late and time.monotonic() < self.deadline:
            return None
        if late:  # kill the process and its children
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            answer = b"" if late else stream.read()
        try:
            found: dict[str, str] = json.loads(answer)
        except ValueError:
            why = f"no answer within {WITHIN:.0f} s" if late else f"the sender ended with {self.process.returncode}"
            return dict.fromkeys(self.channels, why)
        return found
