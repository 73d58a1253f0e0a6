"""Notifications as people see them: what was told, what was not, and never the secret in a webhook."""

from dataclasses import asdict
from pathlib import Path

import pytest

from orchestrator.cli.main import redact_command_line
from orchestrator.config.compose import compose
from orchestrator.config.redaction import redacted_url
from orchestrator.errors import ConfigError
from orchestrator.notifications.delivery import DeliveryRecord, NotificationState
from tests.orchestrator.cli.conftest import Seeds, Type

WEBHOOK = "https://hooks.example.org/services/T0/SECRET"
SHOWN = "https://hooks.example.org/***"


@pytest.fixture
def mine(tmp_path: Path, home: Path) -> str:
    file = tmp_path / "mine.yaml"
    file.write_text(f"includes: [tiny-gpt]\nnotify: {{webhook: '{WEBHOOK}', on: [HELD]}}\n")
    return str(file)


def test_undelivered_messages(orch: Type, seeds: Seeds) -> None:
    run, other = seeds.run(), seeds.run()
    told = DeliveryRecord(
        index=0, state="HELD", at=1.0, tries=2, next_at=9.0, delivered=("mail",), failed={"webhook": "HTTP 500"}
    )
    failed = NotificationState().after(told)
    seeds.store.note_notified(run, asdict(failed), epoch=seeds.epoch)
    words = f"{run}: the HELD notification could not be sent by webhook: HTTP 500 (will be retried)"
    assert f"warning: {words}" in orch("status").err
    assert orch("status", "--json").answer["warnings"] == [{"code": "not_notified", "message": words}]
    assert orch("show", run, "--json").data["notified"] == {
        "state": "HELD", "delivered": ["mail"], "failed": {"webhook": "HTTP 500"}, "tries": 2,
        "at": "1970-01-01T00:00:01.000Z", "next_at": "1970-01-01T00:00:09.000Z",
    }  # fmt: skip
    assert "message  HELD sent by mail\n" in orch("show", run).out
    assert orch("show", other, "--json").data["notified"] is None
    seeds.store.note_notified(other, asdict(failed), epoch=seeds.epoch)
    assert f"some notifications of 2 runs were not delivered: {other}, {run}" in orch("status").err


def test_webhook_secret_is_hidden(orch: Type, seeds: Seeds, mine: str) -> None:
    override = f"notify.webhook={WEBHOOK}2"
    said = [
        orch("config", "show", mine), orch("config", "show", mine, "--json"), orch("config", "show", "demo", override),
        orch("config", "diff", mine, "tiny-gpt"), orch("config", "diff", mine, "tiny-gpt", "--json"),
        orch("submit", mine, override, "--dry-run", "--cluster", "local"),
        orch("submit", mine, override, "--dry-run", "--cluster", "local", "--json"),
    ]  # fmt: skip
    for one in said:
        assert one.code == 0, one.err
        assert "SECRET" not in one.out + one.err
        assert SHOWN in one.out
    assert "SECRET" not in redact_command_line(["submit", "demo", override])
    assert "SECRET" not in redact_command_line(["submit", "demo", f"notify={{webhook: {WEBHOOK}}}"])


def test_changed_webhook(orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    seeds.store.note_run(
        run, epoch=seeds.epoch, now=1.0,
        config_digest=seeds.store.put_config({"name": "tiny", "train": {"steps": 200}, "notify": {"webhook": WEBHOOK}}),
    )  # fmt: skip
    shown = orch("show", run)
    assert f'notify.webhook null -> "{SHOWN}"' in shown.out
    other = seeds.run()
    compared = orch("compare", run, other)
    assert SHOWN in compared.out
    assert "SECRET" not in shown.out + compared.out + orch("show", run, "--json").out


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (WEBHOOK, SHOWN),
        ("https://host:8443/a?token=b#c", "https://host:8443/***"),
        ("https://host?token=b", "https://host/***"),
        ("http://user:word@host/a", "http://host/***"),
        (f'why: <urlopen "{WEBHOOK}"> failed', f'why: <urlopen "{SHOWN}"> failed'),
    ],
)
def test_redacted_url(url: str, shown: str) -> None:
    assert redacted_url(url) == shown


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("notify.webhook=ftp://host/a", "notify.webhook: must be a http:// or https:// URL"),
        ("notify.webhook=https://user:word@host/a", "without spaces, user or password"),
        ("notify.mail=ann@here; rm -rf", "notify.mail=ann@here; rm -rf: must be addresses"),
        ("notify.mail=-oQ/tmp", "must be addresses"),
        ("notify.on=[DONE]", "notify.on: DONE: must be one of CREATED, QUEUED"),
    ],
)
def test_invalid_notify_settings(override: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("tiny-gpt", [override])
    assert why in caught.value.what
    assert "word@" not in caught.value.what


def test_notify_command(tmp_path: Path) -> None:
    def command(*overrides: str) -> object:
        return compose("tiny-gpt", overrides).data["notify"]["command"]

    assert command("notify.command=echo $ORCH_RUN | wall") == ["sh", "-c", "echo $ORCH_RUN | wall"]
    assert command("notify.command=[wall, a run has ended]") == ["wall", "a run has ended"]
    assert command("notify.command=x", "~notify.command") == []
    file = tmp_path / "mine.yaml"
    file.write_text("includes: [tiny-gpt]\nnotify:\n  command: tell me\n  on: [HELD]\n")
    data = compose(str(file)).data["notify"]
    assert (data["command"], data["on"]) == (["sh", "-c", "tell me"], ["HELD"])
