"""Controller work that follows each pass over the runs: restore tests, notifications, nodes under repair."""

import time
from dataclasses import dataclass
from typing import Self

from orchestrator.controller.reconciler.reconcile import Controller
from orchestrator.controller.repaired_nodes import RepairedNodes
from orchestrator.notifications.controller_pass import Notifications
from orchestrator.notifications.delivery import WITHIN
from orchestrator.restore_tests.controller_pass import RestoreTests

LAST_WORD_WITHIN = 5.0
"""Seconds a daemon waits for notifications in flight before it exits; its successor sends them again."""


@dataclass(frozen=True)
class AfterPass:
    """Restore tests, notifications and node repairs of one controller."""

    controller: Controller
    tests: RestoreTests
    notifications: Notifications
    repaired: RepairedNodes

    @classmethod
    def for_controller(cls, controller: Controller) -> Self:
        store, owns, between = controller.store, controller.domain.has, controller.actor.renew_lease_if_due
        return cls(
            controller,
            RestoreTests(store, controller.files, owns, between),
            Notifications(store, owns, between),
            RepairedNodes(store, controller.schedulers),
        )

    def serve(self, epoch: int, now: float) -> list[str]:
        """Send due notifications and prolong exclusions of nodes still out of service; return one line per action."""
        repaired = self.repaired.run(self.controller.domain.live(), epoch, now)
        return [*repaired, *self.notifications.run(epoch, now)]

    def serve_and_wait(self, epoch: int, now: float) -> list[str]:
        """Call `serve` and wait for notifications in flight, because a single pass has no later one."""
        done, deadline = self.serve(epoch, now), time.monotonic() + WITHIN
        while self.notifications.sending and (left := deadline - time.monotonic()) > 0:
            done += [*self.notifications.finish(epoch, left), *self.notifications.run(epoch, time.time())]
        return done
