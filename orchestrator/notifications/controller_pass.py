"""Notifications after each controller pass: find new state changes, send messages, record the results.

A result is recorded after delivery. If the controller dies in between, its successor sends the message again with the
same id. Nothing here changes a run.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from orchestrator.errors import NotFound, RegistryError
from orchestrator.notifications.channels import NotifyConfig, Order
from orchestrator.notifications.delivery import (
    DeliveryRecord,
    NotificationState,
    Sender,
    make_message,
    message_variables,
)
from orchestrator.registry.records import Attempt, Run, Transition
from orchestrator.registry.store import Store
from orchestrator.scheduler.job_environment import Submitter
from trainer.protocol.plain_data import build
from trainer.protocol.run_dir import RunDir

log = logging.getLogger("orch.controller")

STALE = 86400.0
"""Seconds after which a state change is too old for a message."""
AGAIN = (30.0, 120.0, 600.0, 1800.0)
"""Seconds before each retry."""
TOGETHER = 4
"""Maximum concurrent delivery processes."""


@dataclass
class Notifications:
    """Notifications of one controller's runs."""

    store: Store
    owns: Callable[[Run], bool]
    between: Callable[[], None] = lambda: None
    """Called during waits, to renew the lease."""
    wall: Callable[[], float] = time.time
    _seen: int = 0  # number of the newest state change examined, in the registry's order
    _watched: set[str] = field(default_factory=set)  # runs with unsettled changes
    _sending: dict[str, tuple[Sender, DeliveryRecord]] = field(default_factory=dict)
    _configs: dict[str, NotifyConfig] = field(default_factory=dict)

    @property
    def pending(self) -> bool:
        """Whether messages remain to be sent."""
        return bool(self._watched)

    @property
    def sending(self) -> bool:
        """Whether deliveries are in progress."""
        return bool(self._sending)

    def run(self, epoch: int, now: float) -> list[str]:
        """Record finished deliveries and send due messages. Raises Fenced, RegistryError.

        Returns one line for each message that reached a channel.
        """
        done = [words for run in list(self._sending) if (words := self._collect_result(run, epoch, now))]
        newest = self.store.changes_after(self._seen, now - STALE)
        self._seen = max((number for number, _ in newest), default=self._seen)
        self._watched |= {run for _, run in newest}
        for name in sorted(self._watched - set(self._sending)):
            if len(self._sending) < TOGETHER:
                self._look(name, epoch, now)
        return done

    def finish(self, epoch: int, patience: float) -> list[str]:
        """Wait for deliveries in progress; return lines as `run` does. A successor repeats those that are late."""
        done, deadline = [], time.monotonic() + patience
        while self._sending and time.monotonic() < deadline:
            self.between()
            time.sleep(0.05)
            done += [words for run in list(self._sending) if (words := self._collect_result(run, epoch, self.wall()))]
        return done

    def _look(self, name: str, epoch: int, now: float) -> None:
        """Send the oldest unsent change, or a message due for a retry; if there is neither, stop watching the run."""
        try:
            run = self.store.run(name)
        except NotFound:
            self._watched.discard(name)
            return
        if run.name != name or "restore_test" in run.identity or not self.owns(run):
            self._watched.discard(name)
            return
        notified = NotificationState.from_json(run.notified)
        changes = [change for change in self.store.transitions(name) if change.kind == "run"]
        attempts = self.store.attempts(name)
        news = range(notified.settled, len(changes))
        fresh = next((index for index in news if self._needs_message(run, attempts, changes[index], now)), None)
        due = next((each for each in notified.waiting if _is_due(each, now)), None)
        record = DeliveryRecord(index=fresh, state=changes[fresh].after) if fresh is not None else due
        if record is not None:
            change = changes[record.index]
            self._send(run, change, self._config(run, attempts, change), record, epoch, now)
        elif not notified.waiting:
            self._watched.discard(name)

    def _needs_message(self, run: Run, attempts: list[Attempt], change: Transition, now: float) -> bool:
        if now - change.time > STALE:
            return False
        config = self._config(run, attempts, change)
        return change.after in config.on and bool(config.targets)

    def _config(self, run: Run, attempts: list[Attempt], change: Transition) -> NotifyConfig:
        """Return the config at the time of the change, because `orch resume` may have replaced it since."""
        begun = [attempt for attempt in attempts if attempt.intent_at <= change.time]
        digest = (begun[-1].config_digest if begun else "") or run.config_digest
        if digest not in self._configs:
            try:
                self._configs[digest] = build(NotifyConfig, self.store.config(digest).get("notify", {}))
            except (RegistryError, NotFound, ValueError, TypeError, KeyError) as error:
                log.warning("%s: cannot read its notification settings: %s", run.name, error)
                self._configs[digest] = NotifyConfig()
        return self._configs[digest]

    def _send(
        self, run: Run, change: Transition, config: NotifyConfig, record: DeliveryRecord, epoch: int, now: float
    ) -> None:  # fmt: skip
        targets = {name: value for name, value in config.targets.items() if name not in record.delivered}
        message = make_message(run, change)
        order = Order(
            targets=targets, payload=message,
            environ={**Submitter.from_identity(run.identity).environ(os.environ), **message_variables(message)},
            folder=str(run.identity.get("submit_dir", "/")), secrets=str(RunDir(Path(run.run_dir)).secrets),
        )  # fmt: skip
        trying = replace(record, tries=record.tries + 1, at=now)
        try:
            self._sending[run.name] = Sender.begin(order), trying
        except OSError as error:
            self._write(run.name, trying, dict.fromkeys(targets, f"cannot start a process: {error.strerror}"), epoch)

    def _collect_result(self, run: str, epoch: int, now: float) -> str:
        """Record the result of a finished delivery; return "" while it is in progress."""
        sender, trying = self._sending[run]
        result = sender.result()
        if result is None:
            return ""
        del self._sending[run]
        return self._write(run, replace(trying, at=now), result, epoch)

    def _write(self, run: str, trying: DeliveryRecord, result: Mapping[str, str], epoch: int) -> str:
        failed = {way: why for way, why in result.items() if why}
        reached = sorted(set(result) - set(failed))
        retry_delay = AGAIN[trying.tries - 1] if failed and trying.tries <= len(AGAIN) else None
        record = replace(
            trying, failed=failed, delivered=tuple(sorted({*trying.delivered, *reached})),
            next_at=0.0 if retry_delay is None else trying.at + retry_delay,
        )  # fmt: skip
        try:
            notified = NotificationState.from_json(self.store.run(run).notified).after(record)
        except NotFound:
            return ""  # removed by `orch rm` in the meantime
        self.store.note_notified(run, asdict(notified), epoch=epoch)
        if record.trouble:
            log.warning("%s: %s", run, record.trouble)
        return f"{run}: sent the {record.state} notification by {', '.join(reached)}" if reached else ""


def _is_due(record: DeliveryRecord, now: float) -> bool:
    """Return whether a retry is due. If more than the longest pause remains, the clock was set back."""
    return not 0.0 < record.next_at - now <= AGAIN[-1]
