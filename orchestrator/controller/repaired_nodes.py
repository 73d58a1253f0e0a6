"""Exclusions restarted after repairs: a node that Slurm reports down or drained stays excluded until it is back.

Among the faults of 400 nodes in a year (stepfun-ai/InfiniteHBD-Trace), 22 % hit a node within a day after its repair,
and 14 % within a day after the previous fault (`benchmarks/node_exclusion.py`).
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress

from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError, SlurmUnreachable
from orchestrator.registry.records import ORCH, Node, Run
from orchestrator.registry.store import Store
from orchestrator.run_dirs.controlled_run import stored_config
from orchestrator.scheduler.interface import Scheduler
from trainer.protocol.config import build

EVERY = 600.0
"""Seconds between checks."""


class RepairedNodes:
    """Periodic check of excluded nodes in one controller's schedulers."""

    def __init__(self, store: Store, schedulers: Mapping[str, Scheduler]) -> None:
        self._store, self._schedulers = store, schedulers
        self._looked = float("-inf")

    def run(self, runs: Iterable[Run], epoch: int, now: float) -> list[str]:
        """Restart the exclusion period of nodes still out of service; return one line per node."""
        if now - self._looked < EVERY:
            return []
        self._looked = now
        excluded: dict[str, list[Node]] = {}
        for node in self._store.nodes():
            if node.exclusion_source(now) == ORCH:
                excluded.setdefault(node.cluster, []).append(node)
        by_domain: dict[str, list[Run]] = {}
        for run in runs if excluded else ():
            by_domain.setdefault(run.domain, []).append(run)
        return [
            line
            for domain, served in by_domain.items()
            for line in self._prolong(served, excluded.get(domain, []), epoch, now)
        ]

    def _prolong(self, runs: list[Run], nodes: list[Node], epoch: int, now: float) -> list[str]:
        hours = self._exclude_hours(runs) if nodes else 0.0
        if not hours:
            return []
        try:
            out = self._schedulers[runs[0].cluster].out_of_service(frozenset(node.name for node in nodes))
        except SlurmUnreachable:
            return []  # tried again at the next check
        until, done = now + hours * 3600, []
        for node in nodes:
            if node.name in out and until > node.excluded_until:
                before = node.excluded_until
                self._store.prolong_exclusion(node.name, node.cluster, before, until, epoch=epoch, now=now)
                done.append(f"{node.name} is still out of service: its exclusion begins when it is back")
        return done

    def _exclude_hours(self, runs: Iterable[Run]) -> float:
        """Return the longest `exclude_hours` of these runs; unreadable configs are reported elsewhere and skipped."""
        found = [0.0]
        for run in runs:
            with suppress(ConfigError, ValueError):
                config = build(RunConfig, stored_config(self._store, run.config_digest))
                assert isinstance(config, RunConfig)
                found.append(config.recovery.exclude_hours)
        return max(found)
