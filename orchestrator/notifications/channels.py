"""Notifications: message, channels, delivery process and delivery record.

Delivery runs in its own process: a hung name server or program must not delay the controller, which kills it.
"""

import http.client
import json
import os
import shutil
import signal
import smtplib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from checkpointing.storage.trusted_path import own_name
from orchestrator.config.redaction import redacted_url
from orchestrator.registry.records import Run, Transition
from orchestrator.scheduler.job_environment import package_root
from orchestrator.states import RunState
from trainer.protocol.config import build
from trainer.protocol.secrets.run_secrets import RunSecrets, SecretsRefused

SCHEMA = "orch.notification/1"
_LOOK = {
    RunState.HELD: "look: `orch show {run}`; go on: `orch resume {run}`",
    RunState.FAILED: "look: `orch logs {run} --rank first-error`; mended: `orch resume {run}`",
}


@dataclass(frozen=True, kw_only=True)
class Message:
    """Notification of one state change of a run; `id` is the same if it is sent again."""

    id: str
    text: str
    run: str
    state: str
    before: str
    reason: str
    time: str  # UTC, ISO 8601
    step: int
    total_steps: int
    loss: float | None
    tags: tuple[str, ...]
    run_dir: str

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    def variables(self) -> dict[str, str]:
        """Return the fields as environment variables: `ORCH_STATE` and so on."""
        fields = {**asdict(self), "tags": ",".join(self.tags), "loss": "" if self.loss is None else repr(self.loss)}
        names = {"id": "ORCH_NOTIFICATION_ID", "time": "ORCH_CHANGED_AT"}
        return {names.get(name, f"ORCH_{name.upper()}"): str(value).replace("\0", "") for name, value in fields.items()}


def message(run: Run, change: Transition) -> Message:
    """Build the message for a state change, with the present step and loss."""
    moment = datetime.fromtimestamp(change.time, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    return Message(
        id=f"{run.name}/{change.after}/{moment}",
        text=_sentence(run, change),
        run=run.name,
        state=change.after,
        before=change.before,
        reason=change.reason,
        time=moment,
        step=run.step,
        total_steps=run.total_steps,
        loss=run.loss,
        tags=run.tags,
        run_dir=run.run_dir,
    )


def _sentence(run: Run, change: Transition) -> str:
    place = f" at step {run.step} of {run.total_steps}" if run.total_steps else ""
    why = f": {change.reason}" if change.reason else ""
    look = _LOOK.get(RunState(change.after), "look: `orch show {run}`").format(run=run.name)
    return f"{run.name} is {change.after}{place}{why} ({look})"


MOST_WAITING = 8
"""Maximum messages per run that wait for another try; beyond that, the oldest is dropped."""


@dataclass(frozen=True, kw_only=True)
class DeliveryRecord:
    """Delivery record of one message: the run's state change number `index`, counted from its first."""

    index: int
    state: str
    at: float = 0.0  # last try, in seconds since the epoch
    tries: int = 0
    next_at: float = 0.0  # next try; 0 if there will be none
    delivered: tuple[str, ...] = ()  # channels
    failed: dict[str, str] = field(default_factory=dict)  # reason by channel

    @property
    def trouble(self) -> str:
        """Why some channels failed; empty if none did."""
        if not self.failed:
            return ""
        ways = "; ".join(f"{channel}: {why}" for channel, why in sorted(self.failed.items()))
        after = "it is tried again" if self.next_at else f"given up after {self.tries} tries"
        return f"that it is {self.state} could not be told by {ways} ({after})"


@dataclass(frozen=True, kw_only=True)
class NotificationState:
    """Delivery record of a run's state changes; changes before `settled` were sent or need no message."""

    settled: int = 0
    newest: DeliveryRecord | None = None
    waiting: tuple[DeliveryRecord, ...] = ()  # for another try, oldest first

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "NotificationState":
        """Parse the output of `to_json` from the run's row."""
        made = build(cls, fields)
        assert isinstance(made, cls)
        return made

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def after(self, told: DeliveryRecord) -> "NotificationState":
        """Return the record after a try of this message."""
        others = [one for one in self.waiting if one.index != told.index]
        waiting = sorted([*others, told] if told.next_at else others, key=lambda one: one.index)
        newest = told if self.newest is None or told.index >= self.newest.index else self.newest
        settled = max(self.settled, told.index + 1)
        return NotificationState(settled=settled, newest=newest, waiting=tuple(waiting[-MOST_WAITING:]))

    @property
    def trouble(self) -> str:
        """Why the newest message with failed channels was not delivered; empty if all were."""
        found = [one.trouble for one in (*self.waiting, self.newest) if one is not None and one.failed]
        return found[-1] if found else ""


WEBHOOK_WITHIN, MAIL_WITHIN, COMMAND_WITHIN = 10.0, 10.0, 20.0
"""Timeouts in seconds."""
SMTP = ("localhost", 25)
_SENDMAIL_PLACES = "/usr/sbin:/usr/lib:/usr/local/sbin"
_SAID = 300
"""Maximum characters of a program's last output."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that refuses redirects, since a redirected POST becomes a GET without its data."""

    def redirect_request(self, *arguments: Any, **more: Any) -> None:
        return None


def post(url: str, payload: Mapping[str, Any]) -> str:
    """POST the payload as JSON; return why that failed, or ""."""
    request = urllib.request.Request(
        url, json.dumps(payload, default=str).encode(), {"Content-Type": "application/json", "User-Agent": "orch"}
    )
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=WEBHOOK_WITHIN) as answer:
            answer.read(1)
        return ""
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(_SAID).decode(errors="replace").strip()
        why = f"HTTP {error.code} {error.reason}" + (f": {said}" if said else "")
    except urllib.error.URLError as error:
        why = str(error.reason)
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
    # Text that contains the URL must not reach a log.
    return redacted_url(why.replace(url, redacted_url(url))) or "no answer"


def mail(addresses: Sequence[str], payload: Mapping[str, Any], smtp: tuple[str, int] = SMTP) -> str:
    """Send a mail by `sendmail` if installed, else by SMTP; return why that failed, or ""."""
    letter = EmailMessage()
    letter["From"] = f"orch <{own_name()}@{socket.getfqdn()}>"
    letter["To"] = ", ".join(addresses)
    letter["Subject"] = f"{payload['run']} is {payload['state']}"
    letter["Auto-Submitted"] = "auto-generated"
    letter.set_content(f"{payload['text']}\n\n{json.dumps(payload, indent=1, default=str)}\n")
    program = shutil.which("sendmail") or shutil.which("sendmail", path=_SENDMAIL_PLACES)
    if program is not None:
        return run([program, "-i", *addresses], letter.as_bytes(), os.environ, "/", MAIL_WITHIN)
    try:
        with smtplib.SMTP(*smtp, timeout=MAIL_WITHIN) as server:
            refused = server.send_message(letter)
    except (OSError, smtplib.SMTPException) as error:
        return f"there is no sendmail, and SMTP on {smtp[0]}:{smtp[1]} fails: {error}"
    return f"refused for {', '.join(refused)}" if refused else ""


def run(
    command: Sequence[str], given: bytes, environ: Mapping[str, str], folder: str, within: float = COMMAND_WITHIN
) -> str:
    """Run a program with this on stdin; on timeout, kill it and its children. Return why it failed, or ""."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(environ),
            cwd=folder if Path(folder).is_dir() else "/", start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return f"{command[0]} cannot be run: {getattr(error, 'strerror', None) or error}"
    try:
        said, _ = process.communicate(given, timeout=within)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"{command[0]} took longer than {within:.0f} s, and was killed"
    if process.returncode == 0:
        return ""
    last = said[-_SAID:].decode(errors="replace").strip()
    return f"{command[0]} ended with {process.returncode}" + (f": {last}" if last else "")


WEBHOOK, MAIL, COMMAND = "webhook", "mail", "command"


@dataclass(frozen=True, kw_only=True)
class Order:
    """Content and targets by channel: a URL, a list of addresses, a list of arguments."""

    targets: dict[str, Any]
    payload: dict[str, Any]
    environ: dict[str, str]
    folder: str
    secrets: str = ""
    """The run's file with the whole webhook URL; a config has only its host."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self), default=str).encode()


def deliver(order: Order) -> dict[str, str]:
    """Send through every channel in sequence; return by channel why it failed, or ""."""
    given = json.dumps(order.payload, default=str).encode()
    ways: Mapping[str, Callable[[Any], str]] = {
        WEBHOOK: lambda url: _post(url, order),
        MAIL: lambda addresses: mail(addresses, order.payload),
        COMMAND: lambda command: run(command, given, order.environ, order.folder),
    }
    return {name: ways[name](target) for name, target in order.targets.items()}


def _post(url: str, order: Order) -> str:
    """POST to the whole URL, read in this process so that a hanging file system delays only this delivery."""
    if redacted_url(url) == url:
        try:
            url = RunSecrets.read(Path(order.secrets)).webhooks.get(url, "")
        except SecretsRefused as refused:
            return str(refused)
        except OSError as error:
            return f"{order.secrets} cannot be read: {error.strerror or error}"
    if not url:
        hint = f"`orch resume {Path(order.secrets).parent.name} notify.webhook=URL`"
        return f"{order.secrets} has no URL of it; once the run has stopped: {hint}"
    return post(url, order.payload)


def main() -> None:
    """Deliver the order on stdin; the controller starts this process."""
    result = deliver(Order(**json.load(sys.stdin)))
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()


WITHIN = 60.0
"""Seconds for all channels of one notification; each channel has a shorter timeout."""


@dataclass
class Sender:
    """Delivery in progress."""

    process: "subprocess.Popen[bytes]"
    channels: tuple[str, ...]
    deadline: float

    @classmethod
    def begin(cls, order: Order) -> "Sender":
        """Start the process. Raises OSError. The order is in memory that other users cannot read."""
        environment = dict(os.environ)
        if root := package_root():
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        command = [sys.executable, "-P", "-m", "orchestrator.notifications.channels"]
        # A pipe would block the controller until the process reads from it.
        with open(os.memfd_create("orch-notification"), "w+b") as given:
            given.write(order.encode())
            given.seek(0)
            process = subprocess.Popen(
                command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd="/",
                start_new_session=True,
            )  # fmt: skip
        return cls(process, tuple(order.targets), time.monotonic() + WITHIN)

    def result(self) -> Mapping[str, str] | None:
        """Return by channel why it failed, or ""; None while the delivery is in progress."""
        if self.process.poll() is None and time.monotonic() < self.deadline:
            return None
        late = self.process.poll() is None
        if late:
            self.end()
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            said = b"" if late else stream.read()
        try:
            found: dict[str, str] = json.loads(said)
        except ValueError:
            why = f"no answer within {WITHIN:.0f} s" if late else f"the sender ended with {self.process.returncode}"
            return dict.fromkeys(self.channels, why)
        return found

    def end(self) -> None:
        """Kill the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
