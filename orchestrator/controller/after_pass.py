"""What a controller does beside its passes over the runs: restore tests, notifications."""

import time
from dataclasses import dataclass
from typing import Self

from orchestrator.controller.reconciler.reconcile import Controller
from orchestrator.notifications.controller_pass import Notifications
from orchestrator.notifications.sender import WITHIN
from orchestrator.restore_tests.controller_pass import RestoreTests

LAST_WORD_WITHIN = 5.0
"""Seconds that a daemon waits for notifications under way before it ends; its successor sends them again."""


@dataclass(frozen=True)
class AfterPass:
    """The restore tests and the notifications of one controller's runs."""

    tests: RestoreTests
    notifications: Notifications

    @classmethod
    def of(cls, controller: Controller) -> Self:
        store, owns, between = controller.store, controller.domain.has, controller.actor.renew_lease_if_due
        return cls(RestoreTests(store, controller.files, owns, between), Notifications(store, owns, between))

    def notify_and_wait(self, epoch: int, now: float) -> list[str]:
        """Send what is due and wait for it: a single pass has no later one."""
        done, deadline = self.notifications.run(epoch, now), time.monotonic() + WITHIN
        while self.notifications.sending and (left := deadline - time.monotonic()) > 0:
            done += [*self.notifications.finish(epoch, left), *self.notifications.run(epoch, time.time())]
        return done
