"""A controller whose Slurm does not answer takes over an environment in which it does: that of a run's submitter.

It was started by some shell, which may have had no SLURM_CONF, or one that has moved since.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from checkpointing.storage.durable import dump_line
from orchestrator.controller.reconciler.reconcile import Controller, TickReport
from orchestrator.controller.slurm_contact import write_contact
from orchestrator.errors import RegistryError
from orchestrator.registry.records import Run
from orchestrator.registry.store import Store
from orchestrator.scheduler.available_schedulers import usable
from orchestrator.scheduler.scheduler_instance import SlurmInstance, is_known
from orchestrator.scheduler.slurm.client_environment import RECORDED, ClientEnvironment
from orchestrator.states import LIVE_RUNS
from trainer.contract.config_sections.scheduler_kinds import SLURM

log = logging.getLogger("orch.controller")

TRY_AGAIN = 60.0
"""Seconds after which an environment in which Slurm did not answer is tried once more."""
MOST_TRIED = 3
"""Environments that are tried in a row: each may take ten seconds, and a lease lasts a minute."""


class EnvironmentSearch:
    """Remembers which environments were tried, and when."""

    def __init__(self, between: Callable[[], None] = lambda: None, mono: Callable[[], float] = time.monotonic) -> None:
        """`between` is called before each try."""
        self._between, self._mono = between, mono
        self._tried: dict[str, float] = {}

    def adopt(self, runs: Iterable[Run], wanted: str) -> str:
        """Take over the first that reaches the instance `wanted`, or any where that is not known; whose it is, or "".

        `runs`: the newest first.
        """
        left = MOST_TRIED
        for run in runs:
            found = ClientEnvironment.of(run.identity.get(RECORDED)) if run.cluster == SLURM else None
            if found is None or not found.can_replace(ClientEnvironment.here()) or not left or not self._is_due(found):
                continue
            left -= 1
            self._between()
            instance = SlurmInstance(environ=found.applied(os.environ))()
            if instance and (instance == wanted or not is_known(wanted)):
                changed = "; ".join(found.differences(ClientEnvironment.here()))
                found.take_over()
                log.info("goes on with the environment that %s was submitted with: %s", run.name, changed)
                return run.name
        return ""

    def _is_due(self, environment: ClientEnvironment) -> bool:
        key, now = dump_line([environment.variables, environment.sbatch]), self._mono()
        if now - self._tried.get(key, -TRY_AGAIN) < TRY_AGAIN:
            return False
        self._tried[key] = now
        return True


def adopt_at_start(store_path: Path, kind: str) -> None:
    """Before a controller knows what it is for: where Slurm does not answer this process, look for how it does."""
    if kind != SLURM or not store_path.exists() or SlurmInstance()():
        return
    # Who opens it next says what is wrong with it.
    with suppress(RegistryError), Store.open(store_path, readonly=True) as store:
        EnvironmentSearch().adopt(store.runs(LIVE_RUNS), "")


class SlurmWatch:
    """After every pass of a daemon: whether Slurm answered, written down; if not, another environment."""

    def __init__(self, store_path: Path, kind: str, controller: Controller) -> None:
        self._path, self._kind, self._controller = store_path, kind, controller
        self._search = EnvironmentSearch(controller.actor.renew_lease_if_due)
        self._written: tuple[str, str] | None = None

    def after(self, report: TickReport) -> bool:
        """Whether Slurm can be asked again at once, in an environment that was taken over. Raises Fenced."""
        if self._kind != SLURM:
            return False
        silence, scheduler = "; ".join(report.silence), self._controller.actor.lease.scheduler
        adopted = bool(silence) and bool(self._search.adopt(self._controller.store.runs(LIVE_RUNS), scheduler))
        if adopted:
            silence = ""
            self._controller.schedulers = self._controller.actor.schedulers = usable(self._kind)
        if (scheduler, silence) != self._written or adopted:
            with suppress(OSError):
                write_contact(self._path, scheduler, silence)
                self._written = scheduler, silence
        return adopted
