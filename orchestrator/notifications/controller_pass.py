"""What a controller does about notifications after each pass: finds changes nobody was told of, sends, writes it down.

Written down after it was sent: a controller that dies in between leaves it to its successor, which sends it again
under the same id. Nothing here changes a run.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from orchestrator.config.notify_config import NotifyConfig
from orchestrator.errors import NotFound, RegistryError
from orchestrator.notifications.deliver import COMMAND, MAIL, WEBHOOK, Order
from orchestrator.notifications.message import message
from orchestrator.notifications.record import Notified
from orchestrator.notifications.sender import Sender
from orchestrator.registry.records import Attempt, Run, Transition
from orchestrator.registry.store import Store
from orchestrator.scheduler.job_environment import Submitter
from trainer.contract.config import build

log = logging.getLogger("orch.controller")

STALE = 86400.0
"""Seconds after which a change is no news any more: nobody is told of it."""
AGAIN = (30.0, 120.0, 600.0, 1800.0)
"""Seconds before each further try."""
TOGETHER = 4
"""Processes that deliver at one time."""


@dataclass
class Notifications:
    """The notifications of one controller's runs."""

    store: Store
    owns: Callable[[Run], bool]
    between: Callable[[], None] = lambda: None
    """Called while somebody waits: a lease has to be renewed."""
    wall: Callable[[], float] = time.time
    _seen: int = 0  # the newest change of state that was looked at, in the order of the registry
    _watched: set[str] = field(default_factory=set)  # runs with changes that are not settled
    _sending: dict[str, tuple[Sender, Notified]] = field(default_factory=dict)
    _configs: dict[str, NotifyConfig] = field(default_factory=dict)

    @property
    def pending(self) -> bool:
        """Whether somebody is still to be told of something."""
        return bool(self._watched)

    @property
    def sending(self) -> bool:
        """Whether some are under way."""
        return bool(self._sending)

    def run(self, epoch: int, now: float) -> list[str]:
        """Take in what has been delivered, and send what is due; says what it did. Raises Fenced, RegistryError."""
        done = [words for run in list(self._sending) if (words := self._taken_in(run, epoch, now))]
        newest = self.store.changes_after(self._seen, now - STALE)
        self._seen = max((number for number, _ in newest), default=self._seen)
        self._watched |= {run for _, run in newest}
        for name in sorted(self._watched - set(self._sending)):
            if len(self._sending) < TOGETHER:
                self._look(name, epoch, now)
        return done

    def finish(self, epoch: int, patience: float) -> list[str]:
        """Wait for what is being sent; says what came of it. What is late is left to whoever comes next."""
        done, deadline = [], time.monotonic() + patience
        while self._sending and time.monotonic() < deadline:
            self.between()
            time.sleep(0.05)
            done += [words for run in list(self._sending) if (words := self._taken_in(run, epoch, self.wall()))]
        return done

    # -- one run

    def _look(self, name: str, epoch: int, now: float) -> None:
        """Send the oldest change that is to be told; a run without any is watched no longer."""
        try:
            run = self.store.run(name)
        except NotFound:
            self._watched.discard(name)
            return
        if run.name != name or "restore_test" in run.identity or not self.owns(run):
            self._watched.discard(name)
            return
        notified = Notified.of(run.notified)
        # No pause is longer than the longest one: what is left of this one tells that the clock was set since.
        if 0.0 < notified.next_at - now <= AGAIN[-1]:
            return
        index, change, config = self._next(run, notified.settled, now)
        if change is None or config is None:
            self._watched.discard(name)
            return
        again = notified.next_at and notified.settled == index
        self._send(run, change, config, notified if again else Notified(settled=index), epoch, now)

    def _next(self, run: Run, settled: int, now: float) -> tuple[int, Transition | None, NotifyConfig | None]:
        """The first change that is not settled and is to be told, with its place among the run's changes."""
        changes = [change for change in self.store.transitions(run.name) if change.kind == "run"]
        attempts = self.store.attempts(run.name)
        for index in range(settled, len(changes)):
            change = changes[index]
            config = self._config(run, attempts, change) if now - change.time <= STALE else None
            if config is not None and change.after in config.on and _targets(config):
                return index, change, config
        return len(changes), None, None

    def _config(self, run: Run, attempts: list[Attempt], change: Transition) -> NotifyConfig | None:
        """What the run was trained with when it changed: `orch resume` may have brought another one since."""
        begun = [attempt for attempt in attempts if attempt.intent_at <= change.time]
        digest = (begun[-1].config_digest if begun else "") or run.config_digest
        if digest not in self._configs:
            try:
                made = build(NotifyConfig, self.store.config(digest).get("notify", {}))
            except (RegistryError, NotFound, ValueError, TypeError, KeyError) as error:
                log.warning("%s: it cannot be said who is to be told of it: %s", run.name, error)
                made = NotifyConfig()
            assert isinstance(made, NotifyConfig)
            self._configs[digest] = made
        return self._configs[digest]

    def _send(
        self, run: Run, change: Transition, config: NotifyConfig, notified: Notified, epoch: int, now: float
    ) -> None:  # fmt: skip
        targets = {way: where for way, where in _targets(config).items() if way not in notified.delivered}
        said = message(run, change)
        folder = str(run.identity.get("submit_dir", "/"))
        environ = {**Submitter.of(run.identity).environ(os.environ), **said.variables()}
        order = Order(targets=targets, payload=said.to_json(), environ=environ, folder=folder)
        trying = replace(notified, state=change.after, tries=notified.tries + 1, at=now)
        try:
            sender = Sender.begin(order)
        except OSError as error:
            self._write(run.name, trying, dict.fromkeys(targets, f"no process: {error.strerror}"), epoch)
            return
        self._sending[run.name] = sender, trying

    def _taken_in(self, run: str, epoch: int, now: float) -> str:
        """Write down what became of a delivery that has ended; empty while it goes on."""
        sender, trying = self._sending[run]
        result = sender.result()
        if result is None:
            return ""
        del self._sending[run]
        return self._write(run, replace(trying, at=now), result, epoch)

    def _write(self, run: str, trying: Notified, result: Mapping[str, str], epoch: int) -> str:
        failed = {way: why for way, why in result.items() if why}
        delivered = tuple(sorted({*trying.delivered, *(way for way in result if way not in failed)}))
        over = not failed or trying.tries > len(AGAIN)
        now = replace(
            trying, failed=failed, delivered=delivered, settled=trying.settled + (1 if over else 0),
            next_at=0.0 if over else trying.at + AGAIN[trying.tries - 1],
        )  # fmt: skip
        self.store.note_notified(run, now.to_json(), epoch=epoch)
        if now.trouble:
            log.warning("%s: %s", run, now.trouble)
        return f"{run}: told that it is {now.state} by {', '.join(now.delivered)}" if now.delivered else ""


def _targets(config: NotifyConfig) -> dict[str, Any]:
    """By channel, where to."""
    found = {WEBHOOK: config.webhook, MAIL: list(config.addresses), COMMAND: list(config.command)}
    return {way: where for way, where in found.items() if where}
