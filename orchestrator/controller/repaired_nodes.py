"""Exclusions count from the end of a repair: what Slurm calls down or drained stays excluded until it is back.

Of the faults of 400 nodes in a year (stepfun-ai/InfiniteHBD-Trace), 22 % hit a node within a day after its repair, and
14 % within a day after the fault before (`benchmarks/node_exclusion.py`).
"""

from collections.abc import Iterable, Mapping

from orchestrator.config.run_config import RunConfig
from orchestrator.errors import SlurmUnreachable
from orchestrator.registry.records import ORCH, Node, Run
from orchestrator.registry.store import Store
from orchestrator.scheduler.interface import Scheduler
from trainer.contract.config import build

EVERY = 600.0
"""Seconds between two looks."""


class RepairedNodes:
    """Of one controller's schedulers."""

    def __init__(self, store: Store, schedulers: Mapping[str, Scheduler]) -> None:
        self._store, self._schedulers = store, schedulers
        self._looked = float("-inf")

    def run(self, runs: Iterable[Run], epoch: int, now: float) -> list[str]:
        """Let exclusions begin anew for nodes that are still out of service; what was done, in words."""
        if now - self._looked < EVERY:
            return []
        self._looked = now
        excluded: dict[str, list[Node]] = {}
        for node in self._store.nodes():
            if node.excluded_by(now) == ORCH:
                excluded.setdefault(node.cluster, []).append(node)
        by_domain = {run.domain: run for run in runs} if excluded else {}
        return [
            line
            for domain, run in by_domain.items()
            for line in self._prolong(run, excluded.get(domain, []), epoch, now)
        ]

    def _prolong(self, run: Run, nodes: list[Node], epoch: int, now: float) -> list[str]:
        if not nodes:
            return []
        try:
            out = self._schedulers[run.cluster].out_of_service(frozenset(node.name for node in nodes))
        except SlurmUnreachable:
            return []  # asked again
        config = build(RunConfig, self._store.config(run.config_digest))
        assert isinstance(config, RunConfig)
        until, done = now + config.recovery.exclude_hours * 3600, []
        for node in nodes:
            if node.name in out and until > node.excluded_until:
                before = node.excluded_until
                self._store.prolong_exclusion(node.name, node.cluster, before, until, epoch=epoch, now=now)
                done.append(f"{node.name} is still out of service: its exclusion begins when it is back")
        return done
