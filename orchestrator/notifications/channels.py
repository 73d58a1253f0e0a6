"""Notification settings and channels, and the process that delivers one notification.

To add a channel, write a class with `check` and `send`, and give it a field of `NotifyConfig`:

    class Pager:
        def check(self, number: str) -> None: ...  # raises ValueError, naming the key
        def send(self, number: str, order: Order) -> str: ...  # why it failed, or ""

    pager: str = channel(Pager(), "")

The field is all that validation, delivery, delivery records, `orch resume` and docs/reference.py need.

Delivery runs in a separate process, which the controller kills if a name server or a program hangs.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from checkpointing.storage.trusted_path import own_name
from orchestrator.config.redaction import redacted_url
from orchestrator.states import RunState
from trainer.protocol.secrets.run_secrets import RunSecrets, SecretsRefused

WEBHOOK_WITHIN, MAIL_WITHIN, COMMAND_WITHIN = 10.0, 10.0, 20.0
"""Timeouts in seconds."""
SMTP = ("localhost", 25)
_SENDMAIL_PLACES = "/usr/sbin:/usr/lib:/usr/local/sbin"
_ADDRESS = re.compile(r"(?!-)[^\s<>,;:\"'\\]+")
_EXCERPT = 300
"""Maximum number of characters that a message quotes from a server or a program."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One notification: its content, and the setting of each channel that delivers it."""

    targets: dict[str, Any]
    payload: dict[str, Any]
    environ: dict[str, str]
    folder: str
    secrets: str = ""
    """Path of the run's secrets file, which has the full webhook URL; the config has only its host."""

    @property
    def json(self) -> bytes:
        return json.dumps(self.payload, default=str).encode()


class Channel(Protocol):
    """A way to send notifications. `value` is its setting."""

    def check(self, value: Any) -> None:
        """Raise a ValueError that names the key if no message can be sent to `value`."""

    def send(self, value: Any, order: Order) -> str:
        """Deliver the order; return why it failed, or ""."""


class Webhook:
    """Channel that POSTs to a URL from the run's secrets."""

    def check(self, url: str) -> None:
        if not re.fullmatch(r"https?://[^\s/?#@]+([/?#]\S*)?", url, re.ASCII):
            raise ValueError("notify.webhook: must be a http:// or https:// URL without spaces, user or password")

    def send(self, url: str, order: Order) -> str:
        """POST to the full URL. It is read in this process, so that a hung file system delays only this delivery."""
        if redacted_url(url) == url:
            try:
                url = RunSecrets.read(Path(order.secrets)).webhooks.get(url, "")
            except SecretsRefused as refused:
                return str(refused)
            except OSError as error:
                return f"{order.secrets} cannot be read: {error.strerror or error}"
        if not url:
            hint = f"`orch resume {Path(order.secrets).parent.name} notify.webhook=URL`"
            return f"{order.secrets} does not contain its URL; once the run has stopped: {hint}"
        return self._post(url, order.json)

    def _post(self, url: str, content: bytes) -> str:
        import http.client  # these take 20 ms to import, and every command reads the settings
        import urllib.error
        import urllib.request

        class NoRedirects(urllib.request.HTTPRedirectHandler):
            """Handler that refuses redirects, since a redirected POST becomes a GET without its data."""

            def redirect_request(self, *_: Any, **__: Any) -> None:
                return None

        request = urllib.request.Request(url, content, {"Content-Type": "application/json", "User-Agent": "orch"})
        try:
            with urllib.request.build_opener(NoRedirects).open(request, timeout=WEBHOOK_WITHIN) as answer:
                answer.read(1)
            return ""
        except urllib.error.HTTPError as error:
            with error:
                body = error.read(_EXCERPT).decode(errors="replace").strip()
            why = f"HTTP {error.code} {error.reason}" + (f": {body}" if body else "")
        except urllib.error.URLError as error:
            why = str(error.reason)
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
        # Text with the URL must not reach a log.
        return redacted_url(why.replace(url, redacted_url(url))) or "no answer"


class Mail:
    """Channel that sends mail with `sendmail` if installed, else by SMTP."""

    def check(self, addresses: str) -> None:
        if not all(map(_ADDRESS.fullmatch, self._split(addresses))):
            raise ValueError(f"notify.mail={addresses}: must be addresses, separated by commas")

    @staticmethod
    def _split(addresses: str) -> list[str]:
        return [address.strip() for address in addresses.split(",")]

    def send(self, addresses: str, order: Order) -> str:
        import smtplib  # as slow to import as http.client
        from email.message import EmailMessage

        payload, letter = order.payload, EmailMessage()
        letter["From"] = f"orch <{own_name()}@{socket.getfqdn()}>"
        letter["To"] = ", ".join(self._split(addresses))
        letter["Subject"] = f"{payload['run']} is {payload['state']}"
        letter["Auto-Submitted"] = "auto-generated"
        letter.set_content(f"{payload['text']}\n\n{json.dumps(payload, indent=1, default=str)}\n")
        program = shutil.which("sendmail") or shutil.which("sendmail", path=_SENDMAIL_PLACES)
        if program is not None:
            command = [program, "-i", *self._split(addresses)]
            return run_program(command, letter.as_bytes(), os.environ, "/", MAIL_WITHIN)
        try:
            with smtplib.SMTP(*SMTP, timeout=MAIL_WITHIN) as server:
                refused = server.send_message(letter)
        except (OSError, smtplib.SMTPException) as error:
            return f"sendmail is not installed, and SMTP to {SMTP[0]}:{SMTP[1]} failed: {error}"
        return f"refused for {', '.join(refused)}" if refused else ""


class Command:
    """Channel that runs a user's program in the environment and folder of `orch submit`."""

    def check(self, command: Sequence[str]) -> None:
        """Accept every command; a missing program is reported when it runs."""

    def send(self, command: Sequence[str], order: Order) -> str:
        return run_program(command, order.json, order.environ, order.folder, COMMAND_WITHIN)


def run_program(
    command: Sequence[str], content: bytes, environ: Mapping[str, str], folder: str, within: float
) -> str:  # fmt: skip
    """Run a program with `content` on stdin; on timeout, kill it and its children. Return why it failed, or ""."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(environ),
            cwd=folder if Path(folder).is_dir() else "/", start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return f"{command[0]} cannot be run: {getattr(error, 'strerror', None) or error}"
    try:
        output, _ = process.communicate(content, timeout=within)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"{command[0]} took longer than {within:.0f} s, and was killed"
    if process.returncode == 0:
        return ""
    last = output[-_EXCERPT:].decode(errors="replace").strip()
    return f"{command[0]} ended with {process.returncode}" + (f": {last}" if last else "")


def channel(way: Channel, unset: Any) -> Any:
    """Return the config field of a channel; its default `unset` means that the channel is not used."""
    return field(default=unset, metadata={"channel": way})


@dataclass(frozen=True, kw_only=True)
class NotifyConfig:
    """Notifications about this run, sent by the controller once for each state change."""

    webhook: str = channel(Webhook(), "")
    """URL that receives a JSON POST; its `text` field is a sentence, as Slack and Mattermost expect."""

    mail: str = channel(Mail(), "")
    """Mail addresses, separated by commas. orch uses `sendmail`, or SMTP on localhost if that is missing."""

    command: tuple[str, ...] = channel(Command(), ())
    """A program with arguments, or one line for `sh`; it receives `ORCH_*` variables, and the JSON on stdin."""

    on: tuple[str, ...] = ("HELD", "FAILED", "SUCCEEDED")
    """Run states that trigger a notification."""

    def __post_init__(self) -> None:
        for name, value in self.targets.items():
            self.channels()[name].check(value)
        object.__setattr__(self, "on", tuple(state.upper() for state in self.on))
        for state in self.on:
            if state not in list(RunState):
                raise ValueError(f"notify.on: {state}: must be one of {', '.join(RunState)}")

    @classmethod
    def channels(cls) -> dict[str, Channel]:
        """Return all channels, keyed by the names of their settings."""
        return {each.name: each.metadata["channel"] for each in fields(cls) if "channel" in each.metadata}

    @property
    def targets(self) -> dict[str, Any]:
        """Settings of the configured channels, keyed by name."""
        return {name: value for name in self.channels() if (value := getattr(self, name))}


def main() -> None:
    """Deliver the order on stdin through each of its channels; print the error of each channel, or ""."""
    order, channels = Order(**json.load(sys.stdin)), NotifyConfig.channels()
    sys.stdout.write(json.dumps({name: channels[name].send(value, order) for name, value in order.targets.items()}))


if __name__ == "__main__":
    main()
