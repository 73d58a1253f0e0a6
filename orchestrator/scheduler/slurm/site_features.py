"""The version of Slurm's clients, and features that depend on it and on the site's configuration."""

import re
import time
from collections.abc import Callable

from orchestrator.errors import SlurmUnreachable
from orchestrator.scheduler.slurm.command_output import TIMEOUT_S, Version, read_version, run_command

EXPEDITE_SINCE: Version = (25, 11, 3)
"""First version in which an expedited requeue works reliably; 25.11.0 introduced it."""
KEEP_FOR = 3600.0  # seconds for which the configuration is not asked for again
_PARAMETERS = re.compile(r"^SlurmctldParameters\s*=\s?(.*)$", re.MULTILINE)


def enables_expedited_requeue(text: str) -> bool:
    """Return whether `scontrol show config` shows that jobs may be submitted with `--requeue=expedite`."""
    found = _PARAMETERS.search(text)
    return found is not None and "enable_expedited_requeue" in re.split(r"[,\s]+", found[1])


class SiteFeatures:
    """Answers that change only with Slurm itself; each is asked for once, and the configuration once an hour."""

    def __init__(self, timeout: float = TIMEOUT_S, mono: Callable[[], float] = time.monotonic) -> None:
        self._timeout, self._mono = timeout, mono
        self._version: Version | None = None
        self._expedites, self._until = False, float("-inf")

    def version(self) -> Version:
        """Return the clients' version, which they print without asking Slurm; empty while it is unknown."""
        if self._version is None:
            try:
                self._version = read_version(run_command(["scontrol", "--version"], self._timeout).stdout)
            except SlurmUnreachable:
                return ()
        return self._version

    def expedites(self) -> bool:
        """Return whether Slurm is known to accept `--requeue=expedite`; a missing answer counts as no."""
        try:
            if self.version() < EXPEDITE_SINCE:
                return False
            if self._mono() >= self._until:
                done = run_command(["scontrol", "show", "config"], self._timeout)
                self._expedites = done.returncode == 0 and enables_expedited_requeue(done.stdout)
                self._until = self._mono() + KEEP_FOR
        except SlurmUnreachable:
            return False
        return self._expedites
