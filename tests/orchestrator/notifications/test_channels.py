"""Webhook, mail and command: what arrives, and why something does not."""

import os
import pwd
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.notifications import channels
from tests.orchestrator.notifications.conftest import Hook

PAYLOAD = {"run": "tiny-1", "state": "FAILED", "text": "tiny-1 is FAILED: a bug — ä", "loss": float("nan")}


def test_a_webhook_gets_the_payload_as_json(hook: Hook) -> None:
    assert channels.post(hook.url, PAYLOAD) == ""
    (posted,) = hook.posted
    assert posted["text"] == "tiny-1 is FAILED: a bug — ä"


@pytest.mark.parametrize(("status", "why"), [(500, "HTTP 500"), (302, "HTTP 302"), (404, "HTTP 404")])
def test_another_answer_is_no_delivery_and_names_no_secret(hook: Hook, status: int, why: str) -> None:
    hook.status, hook.said = status, f"no service at {hook.url}".encode()
    said = channels.post(hook.url, PAYLOAD)
    assert said.startswith(why)
    assert "SECRET" not in said


def test_a_server_that_hangs_or_is_not_there_costs_a_bounded_time(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "WEBHOOK_WITHIN", 0.2)
    hook.hangs.set()
    assert "timed out" in channels.post(hook.url, PAYLOAD)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/SECRET"
    said = channels.post(url, PAYLOAD)
    assert "refused" in said
    assert "SECRET" not in said


# -- mail


class Inbox(socketserver.StreamRequestHandler):
    """As much of SMTP as takes one mail."""

    def handle(self) -> None:
        self.wfile.write(b"220 here\r\n")
        while line := self.rfile.readline().decode().strip():
            word = line.split()[0].upper()
            if word == "DATA":
                self.wfile.write(b"354 go on\r\n")
                lines = iter(self.rfile.readline, b".\r\n")
                self.server.letters.append(b"".join(lines).decode())  # type: ignore[attr-defined]
            answers = {"QUIT": b"221 bye\r\n", "RCPT": b"550 no\r\n" if "nobody@" in line else b"250 ok\r\n"}
            self.wfile.write(answers.get(word, b"250 ok\r\n"))


@pytest.fixture
def smtp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A mail server, and no sendmail."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(channels, "_SENDMAIL_PLACES", str(tmp_path))
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Inbox) as server:
        server.letters = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_without_sendmail_a_mail_goes_by_smtp(smtp: Any) -> None:
    assert channels.mail(["ann@here", "bob@here"], PAYLOAD, smtp.server_address) == ""
    (letter,) = smtp.letters
    assert "To: ann@here, bob@here" in letter
    assert "Subject: tiny-1 is FAILED" in letter


def test_a_user_without_an_account_is_named_by_number(smtp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without_account(monkeypatch)
    assert channels.mail(["ann@here"], PAYLOAD, smtp.server_address) == ""
    assert f"From: orch <{os.getuid()}@" in str(smtp.letters)


def without_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_a_mail_that_is_refused_says_so(smtp: Any) -> None:
    assert channels.mail(["ann@here", "nobody@here"], PAYLOAD, smtp.server_address) == "refused for nobody@here"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = free.getsockname()
    assert "there is no sendmail, and SMTP" in channels.mail(["ann@here"], PAYLOAD, closed)


def test_sendmail_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sendmail"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/args\ncat > {tmp_path}/letter\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert channels.mail(["ann@here"], PAYLOAD) == ""
    assert (tmp_path / "args").read_text() == "-i ann@here\n"
    assert "Auto-Submitted: auto-generated" in (tmp_path / "letter").read_text()


# -- command


def test_a_command_gets_variables_and_json(tmp_path: Path) -> None:
    environ = {**os.environ, "ORCH_STATE": "FAILED"}
    line = ["sh", "-c", 'echo "$ORCH_STATE $PWD" > got; cat >> got']
    assert channels.run(line, b'{"a":1}', environ, str(tmp_path)) == ""
    assert (tmp_path / "got").read_text() == f'FAILED {tmp_path}\n{{"a":1}}'


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["sh", "-c", "echo no token >&2; exit 3"], "sh ended with 3: no token"),
        (["/not/there"], "/not/there cannot be run: No such file or directory"),
        (["sh", "-c", "kill -9 $$"], "sh ended with -9"),
        (["sh", "-c", "exec <&-; exit 0"], ""),
    ],
)
def test_a_command_that_fails_says_why(command: list[str], why: str) -> None:
    assert channels.run(command, b"x" * (1 << 20), os.environ, "/not/there") == why


def test_a_command_that_hangs_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    line = ["sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/child; wait"]
    assert channels.run(line, b"", os.environ, "/", 1.0) == "sh took longer than 1 s, and was killed"
    child = int((tmp_path / "child").read_text())
    give_up = time.monotonic() + 30.0  # it was killed, and dies when the machine gets round to it
    while _runs(child):
        assert time.monotonic() < give_up, "what the command has started runs on"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
