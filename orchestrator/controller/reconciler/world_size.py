"""Node count of a run's attempts: a job that waits too long is ended, and the next attempt uses the available nodes.

Each decision is recorded before it takes effect: the stop request before the job is cancelled, and an attempt's size
with its intent.
"""

from dataclasses import replace
from typing import Any

from orchestrator.config.run_config import RunConfig
from orchestrator.controller.collect_evidence import GAVE_UP
from orchestrator.controller.reconciler.actor import Actor
from orchestrator.controller.reconciler.nodes_to_avoid import PoolSize, UsableNodes, to_avoid
from orchestrator.controller.reconciler.running_jobs import end_job
from orchestrator.errors import SlurmUnreachable
from orchestrator.recovery.classify_failure import Evidence
from orchestrator.recovery.elastic_policy import (
    LastAttempt,
    asked_nodes,
    choose_smaller_world,
    full_size,
    give_up_waiting,
    needs_choice,
    next_size,
    on_nodes,
    resize_config,
    world_sizes,
)
from orchestrator.run_dirs.controlled_run import ControlledRun, stored_config
from orchestrator.run_dirs.job_spec import job_spec
from orchestrator.scheduler.interface import LEAVING_STATES, JobStatus
from orchestrator.scheduler.slurm.refusals import waits_for_nodes
from trainer.protocol.failures.outcome import FailureKind
from trainer.protocol.time_spans import span


def give_up_long_wait(
    actor: Actor, view: ControlledRun, full: RunConfig, job: JobStatus, evidence: Evidence, pool_size: PoolSize,
    usable_nodes: UsableNodes,
) -> None:  # fmt: skip
    """End a job that has waited for nodes longer than `recovery.patience` if a smaller one could start.

    `full`: the run's own config; the attempt's may be smaller.
    """
    if view.cancel is not None or not full.cluster.min_nodes or job.state in LEAVING_STATES:
        return
    if evidence.gave_up:  # the controller was killed before it cancelled the job, or its scancel was lost
        end_job(actor, view, job.job_id, evidence.gave_up, GAVE_UP)
        return
    key, waits = f"waits:{view.run.name}/{view.last.number}", waits_for_nodes(job.reason)
    if job.held or job.state != "PENDING" or waits is False:
        actor.observed.forget(key)
        return
    waited, patience = actor.observed.age(key, job.job_id), full.recovery.patience
    if not waits or waited < patience:
        return
    try:
        usable = _usable(actor, view, full, pool_size, usable_nodes)
    except SlurmUnreachable:  # a missing answer proves nothing
        return
    why = give_up_waiting(world_sizes(full), view.config.cluster.all_nodes, waited, patience, usable)
    if why:
        end_job(actor, view, job.job_id, why, GAVE_UP)


def size_note(view: ControlledRun, full: RunConfig, job: JobStatus) -> str:
    """Return a note on the newest attempt's size and on the end of a wait for nodes."""
    world = view.last.smaller_world
    words = [on_nodes(world)] if world else []
    waits = bool(full.cluster.min_nodes) and job.state == "PENDING" and waits_for_nodes(job.reason)
    if waits and any(size.all_nodes < view.config.cluster.all_nodes for size in world_sizes(full)):
        words.append(f"after {span(full.recovery.patience)} of this the next job asks for fewer nodes")
    return "; ".join(words)


def next_world(actor: Actor, view: ControlledRun, pool_size: PoolSize, usable_nodes: UsableNodes) -> dict[str, Any]:
    """Return the next attempt's differences from the run as changes for `add_attempt`, with the reason.

    Stores the attempt's config. Raises SlurmUnreachable.
    """
    sizes, full = world_sizes(view.config), full_size(view.config)
    last = _last(view, full.all_nodes, actor.clock.wall())
    if not needs_choice(sizes, last):
        return {}
    usable = _usable(actor, view, view.config, pool_size, usable_nodes)
    size, reason = next_size(sizes, last, usable, view.config.recovery.patience)
    if size.all_nodes == full.all_nodes:
        return {"reason": f"next attempt on {reason}"} if reason else {}
    base = stored_config(actor.store, view.run.config_digest)
    data = resize_config(base, size)
    world = choose_smaller_world(data["cluster"], base["cluster"], view.run.config_digest, reason)
    return {
        "config_digest": actor.store.put_config(data),
        "smaller_world": world,
        "reason": f"next attempt {on_nodes(world)}",
    }


def _last(view: ControlledRun, full: int, now: float) -> LastAttempt:
    """Return the newest attempt; nothing of it counts after a resume, which may have changed the config."""
    last, failure = view.last, view.last.failure
    if last.number < view.run.fresh_from:
        return LastAttempt(asked=full)
    world = last.smaller_world
    asked = full if world is None else asked_nodes(world)
    if failure is None:
        return LastAttempt(asked=asked)
    kind = FailureKind(failure["kind"])
    return LastAttempt(
        asked=asked, kind=kind, reason=str(failure["reason"]), refused_for=now - _refused_since(view, now)
    )  # fmt: skip


def _refused_since(view: ControlledRun, now: float) -> float:
    """Return the start of the newest unbroken series of rejected full-size attempts; `now` if the last was accepted."""
    since = now
    for attempt in reversed(view.attempts):
        kind = (attempt.failure or {}).get("kind")
        if kind != FailureKind.SUBMIT_DEFERRED or attempt.smaller_world or attempt.number < view.run.fresh_from:
            break
        since = min(since, attempt.intent_at)
    return since


def _usable(
    actor: Actor, view: ControlledRun, full: RunConfig, pool_size: PoolSize, usable_nodes: UsableNodes
) -> int | None:
    """Return the nodes in service that the smallest job would not avoid; a larger job avoids no others."""
    smallest = world_sizes(full)[-1].all_nodes
    avoid = to_avoid(actor, replace(view, config=full), pool_size, usable_nodes, smallest)
    actor.renew_lease_if_due()
    return usable_nodes(job_spec(view.run, view.last, view.config).resources, frozenset(avoid))
