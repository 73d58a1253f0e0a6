"""Webhook, mail and command: the content that arrives, and the reason of a failure."""

import os
import pwd
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.notifications import channels
from orchestrator.notifications.channels import Command, Mail, NotifyConfig, Order, Webhook, channel
from tests.orchestrator.notifications.conftest import Hook
from trainer.protocol.plain_data import build

PAYLOAD = {"run": "tiny-1", "state": "FAILED", "text": "tiny-1 is FAILED: a bug — ä", "loss": float("nan")}
ORDER = Order(targets={}, payload=PAYLOAD, environ={**os.environ, "ORCH_STATE": "FAILED"}, folder="/not/there")


def test_a_channel_is_one_class_and_one_field_of_the_settings() -> None:
    class Pager:
        def check(self, number: str) -> None:
            if not number.isdigit():
                raise ValueError(f"notify.pager={number}: must be digits")

        def send(self, number: str, order: Order) -> str:
            return f"{number} is busy: {order.payload['run']}"

    @dataclass(frozen=True, kw_only=True)
    class WithPager(NotifyConfig):
        pager: str = channel(Pager(), "")

    settings = build(WithPager, {"pager": "110", "on": ["held"]})
    assert (settings.targets, settings.on) == ({"pager": "110"}, ("HELD",))
    assert WithPager.channels()["pager"].send("110", ORDER) == "110 is busy: tiny-1"
    with pytest.raises(ValueError, match="notify.pager=me: must be digits"):
        build(WithPager, {"pager": "me"})


def test_a_webhook_gets_the_payload_as_json(hook: Hook) -> None:
    assert Webhook().send(hook.url, ORDER) == ""
    (posted,) = hook.posted
    assert posted["text"] == "tiny-1 is FAILED: a bug — ä"


@pytest.mark.parametrize(("status", "why"), [(500, "HTTP 500"), (302, "HTTP 302"), (404, "HTTP 404")])
def test_another_answer_is_a_failure_and_leaks_no_secret(hook: Hook, status: int, why: str) -> None:
    hook.status, hook.answer = status, f"no service at {hook.url}".encode()
    reason = Webhook().send(hook.url, ORDER)
    assert reason.startswith(why)
    assert "SECRET" not in reason


def test_a_hanging_or_missing_server_costs_a_bounded_time(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "WEBHOOK_WITHIN", 0.2)
    hook.hangs.set()
    assert "timed out" in Webhook().send(hook.url, ORDER)
    reason = Webhook().send("http://{}:{}/SECRET".format(*free_address()), ORDER)
    assert "refused" in reason
    assert "SECRET" not in reason


def free_address() -> tuple[str, int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address: tuple[str, int] = free.getsockname()
    return address


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
        monkeypatch.setattr(channels, "SMTP", server.server_address)
        server.letters = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_without_sendmail_a_mail_goes_by_smtp(smtp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Mail().send("ann@here, bob@here", ORDER) == ""
    (letter,) = smtp.letters
    assert "To: ann@here, bob@here" in letter
    assert "Subject: tiny-1 is FAILED" in letter
    assert Mail().send("ann@here,nobody@here", ORDER) == "refused for nobody@here"
    monkeypatch.setattr(channels, "SMTP", free_address())
    assert "sendmail is not installed, and SMTP" in Mail().send("ann@here", ORDER)


def test_a_user_without_an_account_is_named_by_number(smtp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert Mail().send("ann@here", ORDER) == ""
    assert f"From: orch <{os.getuid()}@" in str(smtp.letters)


def test_sendmail_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sendmail"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/args\ncat > {tmp_path}/letter\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Mail().send("ann@here", ORDER) == ""
    assert (tmp_path / "args").read_text() == "-i ann@here\n"
    assert "Auto-Submitted: auto-generated" in (tmp_path / "letter").read_text()


# -- command


def test_a_command_gets_variables_and_json(tmp_path: Path) -> None:
    line = ["sh", "-c", 'echo "$ORCH_STATE $PWD" > got; cat >> got']
    assert Command().send(line, replace(ORDER, payload={"a": 1}, folder=str(tmp_path))) == ""
    assert (tmp_path / "got").read_text() == f'FAILED {tmp_path}\n{{"a": 1}}'


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
    assert Command().send(command, replace(ORDER, payload={"text": "x" * (1 << 20)})) == why


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "COMMAND_WITHIN", 1.0)
    line = ["sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/child; wait"]
    assert Command().send(line, ORDER) == "sh took longer than 1 s, and was killed"
    child = int((tmp_path / "child").read_text())
    give_up = time.monotonic() + 30.0  # a killed process dies when the machine gets round to it
    while _runs(child):
        assert time.monotonic() < give_up, "the child of the command still runs"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
