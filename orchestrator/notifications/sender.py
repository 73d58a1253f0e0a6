"""One process that delivers a notification, as the controller sees it: begun, looked at, killed when it is late."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from orchestrator.notifications.deliver import Order
from orchestrator.scheduler.job_environment import package_root

WITHIN = 60.0
"""Seconds for all channels of one notification; each of them has a shorter limit of its own."""


@dataclass
class Sender:
    """A delivery that goes on."""

    process: "subprocess.Popen[bytes]"
    channels: tuple[str, ...]
    deadline: float

    @classmethod
    def begin(cls, order: Order) -> "Sender":
        """Start the process; raises OSError. The order is in memory that no other user can read."""
        environment = dict(os.environ)
        if root := package_root():
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        command = [sys.executable, "-P", "-m", "orchestrator.notifications.deliver"]
        # A pipe would hold the controller up until somebody reads from it.
        with open(os.memfd_create("orch-notification"), "w+b") as given:
            given.write(order.encode())
            given.seek(0)
            process = subprocess.Popen(
                command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd="/",
                start_new_session=True,
            )  # fmt: skip
        return cls(process, tuple(order.targets), time.monotonic() + WITHIN)

    def result(self) -> Mapping[str, str] | None:
        """By channel why it failed, or nothing; None while it goes on."""
        if self.process.poll() is None and time.monotonic() < self.deadline:
            return None
        late = self.process.poll() is None
        if late:
            self.end()
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            said = b"" if late else stream.read()
        try:
            found: dict[str, str] = json.loads(said)
        except ValueError:
            why = f"no answer within {WITHIN:.0f} s" if late else f"the sender ended with {self.process.returncode}"
            return dict.fromkeys(self.channels, why)
        return found

    def end(self) -> None:
        """Kill it, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
