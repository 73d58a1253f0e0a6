"""What a controller does about notifications: each change once, whatever dies or fails."""

import json
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.redaction import redacted_url
from orchestrator.errors import Fenced
from orchestrator.notifications import delivery
from orchestrator.notifications.controller_pass import AGAIN, STALE, TOGETHER, Notifications
from orchestrator.notifications.delivery import MOST_WAITING, DeliveryRecord, NotificationState, Sender
from orchestrator.registry.records import NewRun, Run
from orchestrator.registry.store import Store
from orchestrator.states import AttemptState, RunState
from tests.fakes.new_runs import take_lease
from tests.orchestrator.notifications.conftest import Hook
from tests.orchestrator.notifications.forked_sender import FORKING
from trainer.protocol.run_dir import RunDir
from trainer.protocol.secrets.run_secrets import RunSecrets

NOW = 1_000_000.0


class Desk:
    """A registry, and the notifications of its controller."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, NOW
        self.store = Store.open(folder / "registry.db")
        lease = take_lease(self.store, "here", 0.0, 1e9)
        self.epoch = lease.epoch
        self.restart()

    def restart(self) -> None:
        """Another controller process, which remembers nothing."""
        self.notifications = Notifications(
            self.store, lambda run: run.scheduler != "elsewhere", wall=lambda: self.now
        )  # fmt: skip

    def run(self, notify: dict[str, Any], **more: Any) -> str:
        digest = self.store.put_config({"name": "r", "notify": notify})
        fields = {"identity": {"submit_dir": str(self.folder)}, "cluster": "local", "scheduler": "here", **more}
        new = NewRun(slug="r", root=self.folder, config_digest=digest, total_steps=200, **fields)
        return self.store.create_run(new, now=NOW - 50, nonce="0123abcd")[0].name

    def move(self, run: str, state: RunState, reason: str = "", at: float = NOW) -> None:
        self.store.move_run(run, state, reason, epoch=self.epoch, now=at, step=120, loss=2.5)

    def passes(self, now: float = NOW, patience: float = 60.0) -> list[str]:
        """One pass, and what it has sent is awaited."""
        self.now = now
        done = self.notifications.run(self.epoch, now)
        done += self.notifications.finish(self.epoch, patience)
        return done

    def notified(self, run: str) -> NotificationState:
        return NotificationState.from_json(self.store.run(run).notified)

    def newest(self, run: str) -> DeliveryRecord:
        told = self.notified(run).newest
        assert told is not None
        return told


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr(delivery, "subprocess", FORKING)
    made = Desk(tmp_path)
    yield made
    made.store.close()


def test_a_change_is_told_once_by_every_channel(desk: Desk, hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "subprocess", subprocess)
    run = desk.run(
        {"webhook": hook.url, "command": ["sh", "-c", 'echo "$ORCH_RUN $ORCH_STATE $ORCH_STEP" >> told; cat >> told']}
    )
    desk.move(run, RunState.RUNNING)
    desk.move(run, RunState.FAILED, "a bug in train.py")
    before = desk.store.run(run)
    assert desk.passes() == [f"{run}: sent the FAILED notification by command, webhook"]
    (posted,) = hook.posted
    assert posted["text"] == (
        f"{run} is FAILED at step 120 of 200: a bug in train.py "
        f"(see: `orch logs {run} --rank first-error`; once fixed: `orch resume {run}`)"
    )
    assert (posted["schema"], posted["before"], posted["loss"]) == ("orch.notification/1", "RUNNING", 2.5)
    head, _, given = (desk.folder / "told").read_text().partition("\n")
    assert (head, json.loads(given)) == (f"{run} FAILED 120", posted)
    assert desk.passes() == []
    desk.restart()
    assert desk.passes(NOW + 60) == []
    assert len(hook.posted) == 1
    after = desk.store.run(run)
    assert (after.state, after.reason, after.updated_at) == (before.state, before.reason, before.updated_at)
    assert not desk.notifications.pending


def test_the_url_of_a_webhook_is_read_from_the_runs_secrets(desk: Desk, hook: Hook) -> None:
    shown = redacted_url(hook.url)
    run = desk.run({"webhook": shown})
    folder = RunDir(desk.folder / run)
    folder.path.mkdir()
    desk.move(run, RunState.HELD)
    desk.passes()
    assert hook.posted == []
    assert f"webhook: {folder.secrets} does not contain its URL" in desk.newest(run).trouble
    RunSecrets(webhooks={shown: hook.url}).create(folder.secrets)
    assert desk.passes(NOW + AGAIN[0] + 1) == [f"{run}: sent the HELD notification by webhook"]
    assert len(hook.posted) == 1
    folder.secrets.chmod(0o640)
    desk.move(run, RunState.RECOVERING)
    desk.move(run, RunState.HELD, at=NOW + 90)
    desk.passes(NOW + 100)
    assert f"can be read by others (mode 0640); chmod 600 {folder.secrets}" in desk.newest(run).trouble
    assert "SECRET" not in str(desk.notified(run))


def test_only_the_states_that_are_asked_for_are_told(desk: Desk, hook: Hook) -> None:
    run = desk.run({"webhook": hook.url, "on": ["RUNNING", "SUCCEEDED"]})
    for state in (RunState.RUNNING, RunState.HELD, RunState.RECOVERING, RunState.SUCCEEDED):
        desk.move(run, state)
    desk.passes()
    desk.passes()
    assert [posted["state"] for posted in hook.posted] == ["RUNNING", "SUCCEEDED"]


def test_every_change_is_told_also_one_that_is_over_by_now(desk: Desk, hook: Hook) -> None:
    run = desk.run({"webhook": hook.url})
    desk.move(run, RunState.HELD, "disk full", NOW - 3)
    desk.move(run, RunState.RECOVERING, "", NOW - 2)
    desk.move(run, RunState.HELD, "disk full", NOW - 1)
    desk.passes()
    desk.passes()
    assert [posted["id"].partition("T")[0] for posted in hook.posted] == [f"{run}/HELD/1970-01-12"] * 2
    assert len({posted["id"] for posted in hook.posted}) == 2


def test_a_controller_that_dies_after_sending_is_followed_by_one_that_sends_the_same_again(
    desk: Desk, hook: Hook
) -> None:
    run = desk.run({"webhook": hook.url})
    desk.move(run, RunState.HELD)
    desk.notifications.run(desk.epoch, NOW)
    ((sender, _),) = desk.notifications._sending.values()
    sender.process.wait(60)
    assert sender.result() == {"webhook": ""}
    desk.restart()
    desk.passes()
    desk.restart()
    desk.passes()
    first, second = hook.posted
    assert first == second


def test_what_fails_is_tried_again_and_what_was_delivered_is_not(
    desk: Desk, hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    run = desk.run({"webhook": hook.url, "command": ["sh", "-c", "echo once >> told"]})
    desk.move(run, RunState.SUCCEEDED)
    hook.status = 500
    with caplog.at_level(logging.WARNING):
        assert desk.passes() == [f"{run}: sent the SUCCEEDED notification by command"]
    assert f"{run}: the SUCCEEDED notification could not be sent by webhook: HTTP 500" in caplog.text
    assert "SECRET" not in caplog.text
    assert desk.notified(run).trouble.endswith("(will be retried)")
    sent = desk.newest(run).at
    assert desk.passes(sent + AGAIN[0] - 1) == []
    desk.restart()
    hook.status = 200
    assert desk.notifications.run(desk.epoch, sent + AGAIN[0]) == []
    assert desk.notifications.pending
    assert desk.notifications.finish(desk.epoch, 60) == [f"{run}: sent the SUCCEEDED notification by webhook"]
    assert (desk.folder / "told").read_text() == "once\n"
    assert [posted["state"] for posted in hook.posted] == ["SUCCEEDED"] * 2
    assert desk.notified(run).trouble == ""


def test_after_the_last_try_it_is_given_up_and_the_next_change_is_told_afresh(desk: Desk, hook: Hook) -> None:
    run = desk.run({"webhook": hook.url})
    desk.move(run, RunState.HELD)
    hook.status = 500
    now = NOW
    for pause in (*AGAIN, 0.0):
        assert desk.passes(now) == []
        now = desk.newest(run).at + pause
    assert desk.notified(run).trouble.endswith(f"(given up after {len(AGAIN) + 1} tries)")
    assert desk.passes(now + STALE / 10) == []
    assert len(hook.posted) == len(AGAIN) + 1
    hook.status = 200
    desk.move(run, RunState.RECOVERING, "", now)
    desk.move(run, RunState.HELD, "", now + 1)
    assert desk.passes(now + 2) == [f"{run}: sent the HELD notification by webhook"]
    assert (desk.newest(run).tries, desk.notified(run).trouble) == (1, "")


def test_a_message_that_fails_does_not_hold_up_the_next_one(desk: Desk, hook: Hook) -> None:
    run = desk.run({"webhook": hook.url, "on": ["RUNNING", "HELD"]})
    desk.move(run, RunState.RUNNING)
    hook.status = 500
    desk.passes()
    hook.status = 200
    desk.move(run, RunState.HELD)
    assert desk.passes(NOW + 1) == [f"{run}: sent the HELD notification by webhook"]
    assert "the RUNNING notification could not be sent" in desk.notified(run).trouble
    desk.restart()
    assert desk.passes(NOW + AGAIN[0] + 1) == [f"{run}: sent the RUNNING notification by webhook"]
    assert [posted["state"] for posted in hook.posted] == ["RUNNING", "HELD", "RUNNING"]
    assert (desk.notified(run).trouble, desk.newest(run).state, desk.notified(run).waiting) == ("", "HELD", ())


def test_so_many_messages_of_a_run_wait_at_most() -> None:
    notified = NotificationState()
    for index in range(MOST_WAITING + 3):
        notified = notified.after(
            DeliveryRecord(index=index, state="HELD", tries=1, next_at=9.0, failed={"mail": "no"})
        )
    assert [told.index for told in notified.waiting] == list(range(3, MOST_WAITING + 3))
    assert notified.settled == MOST_WAITING + 3


def test_nobody_waits_for_a_server_that_hangs(desk: Desk, hook: Hook) -> None:
    slow, quick = desk.run({"webhook": hook.url}), desk.run({"command": ["true"]})
    hook.hangs.set()
    for run in (slow, quick):
        desk.move(run, RunState.HELD)
    assert desk.notifications.run(desk.epoch, NOW) == []
    while not (done := desk.notifications.run(desk.epoch, NOW)):
        pass
    assert done == [f"{quick}: sent the HELD notification by command"]
    assert list(desk.notifications._sending) == [slow]
    for sender, _ in desk.notifications._sending.values():
        sender.deadline = 0.0
    assert desk.passes() == []
    assert "webhook: no answer within 60 s (will be retried)" in desk.notified(slow).trouble


def test_so_many_are_sent_together_and_the_rest_follows(desk: Desk, hook: Hook) -> None:
    runs = [desk.run({"command": ["true"]}) for _ in range(TOGETHER + 1)]
    for run in runs:
        desk.move(run, RunState.HELD)
    desk.notifications.run(desk.epoch, NOW)
    assert len(desk.notifications._sending) == TOGETHER
    desk.notifications.finish(desk.epoch, 60)
    assert len(desk.passes()) == 1


def test_the_configuration_of_the_time_of_the_change_counts(desk: Desk, hook: Hook) -> None:
    run = desk.run({})
    desk.move(run, RunState.FAILED, "", NOW - 20)
    desk.store.move_attempt(run, 1, AttemptState.ENDED, "", epoch=desk.epoch, now=NOW - 20)
    digest = desk.store.put_config({"name": "r", "notify": {"webhook": hook.url}})
    stamp = {"epoch": desk.epoch, "now": NOW - 10}
    desk.store.move_run(run, RunState.RECOVERING, "", **stamp, config_digest=digest)
    desk.store.add_attempt(run, nonce="89abcdef", excluded=(), **stamp)
    desk.passes()
    desk.move(run, RunState.HELD)
    desk.passes()
    assert [posted["state"] for posted in hook.posted] == ["HELD"]


@pytest.mark.parametrize("why", ["old", "foreign", "test", "no such config"])
def test_what_is_nobodys_news_is_not_told(desk: Desk, hook: Hook, why: str) -> None:
    more: dict[str, Any] = {"foreign": {"scheduler": "elsewhere"}, "test": {"identity": {"restore_test": {}}}}.get(
        why, {}
    )
    run = desk.run({"webhook": hook.url} if why != "no such config" else {"on": 3}, **more)
    desk.move(run, RunState.HELD, "", NOW - STALE - 1 if why == "old" else NOW)
    assert desk.passes() == []
    assert (hook.posted, desk.notifications.pending, desk.store.run(run).notified) == ([], False, {})


def test_a_run_that_is_removed_meanwhile_is_forgotten(desk: Desk, hook: Hook) -> None:
    run = desk.run({"webhook": hook.url})
    desk.move(run, RunState.SUCCEEDED)
    hook.status = 500
    desk.passes()
    desk.store.move_attempt(run, 1, AttemptState.ENDED, "", epoch=desk.epoch, now=NOW)
    desk.store.begin_removal(run)
    desk.store.delete_run(run)
    assert desk.passes(NOW + STALE / 2) == []
    assert not desk.notifications.pending


def test_a_controller_without_its_lease_writes_nothing(desk: Desk, hook: Hook) -> None:
    run = desk.run({"webhook": hook.url})
    desk.move(run, RunState.HELD)
    lease = desk.store.lease()
    assert lease is not None
    desk.notifications.run(desk.epoch, NOW)
    desk.store.drop_lease(lease)
    with pytest.raises(Fenced):
        desk.notifications.finish(desk.epoch, 60)
    assert desk.store.run(run).notified == {}


def test_without_a_process_the_run_is_told_of_it(desk: Desk, hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    run = desk.run({"webhook": hook.url})
    desk.move(run, RunState.HELD)

    def fails(order: object) -> Sender:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(Sender, "begin", fails)
    assert desk.passes() == []
    assert "webhook: cannot start a process: Resource temporarily unavailable" in desk.notified(run).trouble
    assert isinstance(desk.store.run(run), Run)
