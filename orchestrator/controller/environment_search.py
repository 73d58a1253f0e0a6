"""Adopt the environment of a run's submitter if the controller's own environment cannot reach Slurm.

The shell that started the controller may have had no SLURM_CONF, or a SLURM_CONF that has since moved.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from checkpointing.storage.durable import dump_line
from orchestrator.controller.reconcile import Controller, TickReport
from orchestrator.controller.slurm_contact import write_contact
from orchestrator.errors import RegistryError
from orchestrator.registry.records import Run
from orchestrator.registry.store import Store
from orchestrator.scheduler.available_schedulers import usable
from orchestrator.scheduler.scheduler_instance import SlurmInstance, is_known
from orchestrator.scheduler.slurm.client_environment import RECORDED, ClientEnvironment
from orchestrator.states import LIVE_RUNS
from trainer.protocol.config_sections.scheduler_kinds import SLURM

log = logging.getLogger("orch.controller")

TRY_AGAIN = 60.0  # seconds before an environment in which Slurm did not answer is tried again
MOST_TRIED = 3  # maximum number of environments tried in a row; each may take ten seconds, and a lease lasts a minute


class EnvironmentSearch:
    """Searches for a working environment, and remembers which ones were tried, and when."""

    def __init__(self, between: Callable[[], None] = lambda: None, mono: Callable[[], float] = time.monotonic) -> None:
        """`between` is called before each try."""
        self._between, self._mono = between, mono
        self._tried: dict[str, float] = {}

    def adopt(self, runs: Iterable[Run], wanted: str) -> str:
        """Adopt the first environment that reaches the instance `wanted`, or any instance if `wanted` is unknown.

        Return the name of its run, or "" if no environment works. `runs` must be ordered newest first.
        """
        left = MOST_TRIED
        for run in runs:
            found = ClientEnvironment.from_json(run.identity.get(RECORDED)) if run.cluster == SLURM else None
            if (
                found is None
                or not found.can_replace(ClientEnvironment.from_environ())
                or not left
                or not self._is_due(found)
            ):
                continue
            left -= 1
            self._between()
            instance = SlurmInstance(environ=found.build_environ(os.environ))()
            if instance and (instance == wanted or not is_known(wanted)):
                changed = "; ".join(found.differences(ClientEnvironment.from_environ()))
                found.take_over()
                log.info("continuing with the environment that %s was submitted with: %s", run.name, changed)
                return run.name
        return ""

    def _is_due(self, environment: ClientEnvironment) -> bool:
        key, now = dump_line([environment.variables, environment.sbatch]), self._mono()
        if now - self._tried.get(key, -TRY_AGAIN) < TRY_AGAIN:
            return False
        self._tried[key] = now
        return True


def adopt_at_start(store_path: Path, kind: str) -> None:
    """Look for a working environment before the controller knows its scheduler instance, if Slurm does not answer."""
    if kind != SLURM or not store_path.exists() or SlurmInstance()():
        return
    # The next attempt to open the registry reports the error.
    with suppress(RegistryError), Store.open(store_path, readonly=True) as store:
        EnvironmentSearch().adopt(store.runs(LIVE_RUNS), "")


class SlurmWatch:
    """Records after each pass of a daemon whether Slurm answered. If it did not, searches for a working environment."""

    def __init__(self, store_path: Path, kind: str, controller: Controller) -> None:
        self._path, self._kind, self._controller = store_path, kind, controller
        self._search = EnvironmentSearch(controller.actor.renew_lease_if_due)
        self._written: tuple[str, str] | None = None

    def after(self, report: TickReport) -> bool:
        """Return whether the controller has just adopted an environment in which Slurm answers. Raises Fenced."""
        if self._kind != SLURM:
            return False
        silence, scheduler = "; ".join(report.silence), self._controller.actor.lease.scheduler
        adopted = bool(silence) and bool(self._search.adopt(self._controller.store.runs(LIVE_RUNS), scheduler))
        if adopted:
            silence = ""
            self._controller.queries.forget_schedules()
            self._controller.schedulers = self._controller.actor.schedulers = usable(self._kind, daemon=True)
        if (scheduler, silence) != self._written or adopted:
            with suppress(OSError):
                write_contact(self._path, scheduler, silence)
                self._written = scheduler, silence
        return adopted
