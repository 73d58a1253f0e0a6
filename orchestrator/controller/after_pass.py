"""What a controller does beside its passes over the runs: restore tests, notifications, nodes under repair."""

import time
from dataclasses import dataclass
from typing import Self

from orchestrator.controller.reconciler.reconcile import Controller
from orchestrator.controller.repaired_nodes import RepairedNodes
from orchestrator.notifications.channels import WITHIN
from orchestrator.notifications.controller_pass import Notifications
from orchestrator.restore_tests.controller_pass import RestoreTests

LAST_WORD_WITHIN = 5.0
"""Seconds that a daemon waits for notifications under way before it ends; its successor sends them again."""


@dataclass(frozen=True)
class AfterPass:
    """What follows from the runs of one controller."""

    controller: Controller
    tests: RestoreTests
    notifications: Notifications
    repaired: RepairedNodes

    @classmethod
    def of(cls, controller: Controller) -> Self:
        store, owns, between = controller.store, controller.domain.has, controller.actor.renew_lease_if_due
        return cls(
            controller,
            RestoreTests(store, controller.files, owns, between),
            Notifications(store, owns, between),
            RepairedNodes(store, controller.schedulers),
        )

    def serve(self, epoch: int, now: float) -> list[str]:
        """Send what is due, and prolong exclusions of nodes that are still out of service; what was done, in words."""
        repaired = self.repaired.run(self.controller.domain.live(), epoch, now)
        return [*repaired, *self.notifications.run(epoch, now)]

    def serve_and_wait(self, epoch: int, now: float) -> list[str]:
        """The same, and wait for what is being sent: a single pass has no later one."""
        done, deadline = self.serve(epoch, now), time.monotonic() + WITHIN
        while self.notifications.sending and (left := deadline - time.monotonic()) > 0:
            done += [*self.notifications.finish(epoch, left), *self.notifications.run(epoch, time.time())]
        return done
