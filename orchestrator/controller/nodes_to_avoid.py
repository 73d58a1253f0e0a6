"""Nodes that a run may use or must avoid, and exclusions that restart while their node is out of service."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random

from orchestrator.controller.actor import Actor
from orchestrator.errors import ConfigError, SlurmUnreachable
from orchestrator.recovery import failure_rate
from orchestrator.recovery.elastic_policy import world_sizes
from orchestrator.recovery.failure_rate import NodeHistory
from orchestrator.recovery.node_exclusion import (
    REMEMBERED,
    NodeRecord,
    Pool,
    avoided_nodes,
    count_replacements,
    excluded_nodes,
    faulty,
    hangs,
    of_every_node,
    slowness,
)
from orchestrator.registry.records import ORCH, PERSON, Node, Run
from orchestrator.registry.store import Store
from orchestrator.run_dirs.controlled_run import ControlledRun, RunConfigs
from orchestrator.run_dirs.job_spec import job_spec
from orchestrator.scheduler.interface import Scheduler
from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.events import EventKind

_NOTICED = (EventKind.INCIDENT, EventKind.STRAGGLER, EventKind.PREFLIGHT, EventKind.SPARE_USED, EventKind.DRILL)


def load_pool(actor: Actor, view: ControlledRun, gone: Sequence[str] = ()) -> Pool:
    """Return the nodes this run may use, with their records; simulated nodes are never excluded.

    `gone`: nodes that the scheduler removed from the newest attempt's job while the job continued.
    """
    if traits(view.run.cluster).simulated_nodes:
        return Pool(size=view.config.cluster.all_nodes, needed=view.config.cluster.all_nodes)
    store, now = actor.store, actor.clock.wall()
    nodes = [node for node in store.nodes() if node.cluster == view.run.domain]
    back = {node.name: node.excluded_until for node in nodes}
    # Incidents that led to an exclusion no longer count once the node is back.
    noticed = [
        notice
        for notice in of_every_node(store.cluster_notices(view.run.domain, _NOTICED, now - REMEMBERED))
        if notice.kind == EventKind.DRILL or notice.time > back.get(notice.node, 0.0)
    ]
    runs = {notice.run for notice in noticed}
    generations = {(run, each.number): each.generations for run in runs for each in store.attempts(run)}
    hung, slow, lost = hangs(noticed), slowness(noticed, generations), count_replacements(noticed)
    sick = faulty(noticed, generations, {(view.run.name, view.last.number, node) for node in gone})
    spared = [(one.node, one.time) for one in noticed if one.kind == EventKind.SPARE_USED and not one.data.get("drill")]
    attempts, _ = store.history(view.run.domain, now - failure_rate.NODE_WINDOW)
    past = failure_rate.histories(attempts, spared, now)
    # Releasing a node resets its count of failures, so only later failures are kept.
    own = {}
    for node in nodes:
        history = past.get(node.name, NodeHistory())
        own[node.name] = replace(history, failed=history.failed[: node.failures])
    known = [
        NodeRecord(
            name=node.name, history=own[node.name], others=failure_rate.of_others(own, node.name),
            excluded_until=node.excluded_until,
            hangs=hung.get(node.name, 0), slow=slow.get(node.name, 0), replaced=lost.get(node.name, 0),
            faulty=sick.get(node.name, ""), by_person=node.exclusion_source(now) == PERSON,
        )
        for node in nodes
    ]  # fmt: skip
    return Pool(
        size=actor.pool_size(view.config), needed=view.config.cluster.all_nodes, known=tuple(known),
        node_days=view.config.checkpoint.auto.node_days,
    )  # fmt: skip


def to_avoid(actor: Actor, view: ControlledRun, needed: int | None = None) -> tuple[str, ...]:
    """Return the nodes that this run's next job must avoid, if it requests `needed` nodes (default: as configured).

    Some nodes that orch has excluded are readmitted if a run with `cluster.min_nodes` could not start without them.
    Raises SlurmUnreachable.
    """
    store, now = actor.store, actor.clock.wall()
    # If no node is excluded, as is usual, the partition size is not needed.
    if not any(node.excluded_until > now for node in store.nodes() if node.cluster == view.run.domain):
        return ()
    pool = load_pool(actor, view)
    pool = replace(pool, needed=needed or pool.needed)
    if view.config.cluster.min_nodes:
        actor.renew_lease_if_due()
        pool = replace(pool, in_service=_in_service(actor, view, pool, now))
    return avoided_nodes(pool, view.config.recovery, now)


def _in_service(actor: Actor, view: ControlledRun, pool: Pool, now: float) -> int | None:
    """Count the nodes in service that no person has excluded; None if the smallest size fits without readmissions."""
    resources = job_spec(view.run, view.last, view.config).resources
    left = actor.usable_nodes(resources, frozenset(excluded_nodes(pool.known, now)) | pool.by_persons)
    if left is None or left >= world_sizes(view.config)[-1].all_nodes:
        return None
    return actor.usable_nodes(resources, pool.by_persons)


EVERY, JITTER = 600.0, 0.2  # shortest pause in seconds between checks, and the part by which it may grow


class RepairedNodes:
    """Periodic check of one controller's excluded nodes."""

    def __init__(self, store: Store, schedulers: Mapping[str, Scheduler]) -> None:
        self._store, self._configs, self._schedulers = store, RunConfigs(store), schedulers
        self._looked, self._pause, self._rng = float("-inf"), EVERY, Random()

    def run(self, runs: Callable[[], list[Run]], epoch: int, now: float) -> list[str]:
        """Restart the exclusion period of nodes still out of service; return one line per node."""
        if now - self._looked < self._pause:
            return []
        self._looked, self._pause = now, EVERY * (1.0 + JITTER * self._rng.random())
        excluded: dict[str, list[Node]] = {}
        for node in self._store.nodes():
            if node.exclusion_source(now) == ORCH:
                excluded.setdefault(node.cluster, []).append(node)
        by_domain: dict[str, list[Run]] = {}
        for run in runs() if excluded else ():
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
                found.append(self._configs(run.config_digest).recovery.exclude_hours)
        return max(found)
