"""The ways by which a notification leaves: each returns why it was not delivered, or nothing, within a bound."""

import http.client
import json
import os
import shutil
import signal
import smtplib
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from email.message import EmailMessage
from getpass import getuser
from pathlib import Path
from typing import Any

from orchestrator.config.redaction import redacted_url

WEBHOOK_WITHIN, MAIL_WITHIN, COMMAND_WITHIN = 10.0, 10.0, 20.0
"""Seconds."""
SMTP = ("localhost", 25)
_SENDMAIL_PLACES = "/usr/sbin:/usr/lib:/usr/local/sbin"
_SAID = 300
"""Characters of what a program has said last."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A POST that is redirected comes back as a GET without its data: that is no delivery."""

    def redirect_request(self, *arguments: Any, **more: Any) -> None:
        return None


def post(url: str, payload: Mapping[str, Any]) -> str:
    """POST the payload as JSON."""
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
    # Whatever names the URL in it must not get into a log.
    return redacted_url(why.replace(url, redacted_url(url))) or "no answer"


def mail(addresses: Sequence[str], payload: Mapping[str, Any], smtp: tuple[str, int] = SMTP) -> str:
    """Send a mail by `sendmail` where there is one, else by SMTP."""
    letter = EmailMessage()
    letter["From"] = f"orch <{getuser()}@{socket.getfqdn()}>"
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
    """Run a program with this on stdin; it and what it has started are killed when they take too long."""
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
