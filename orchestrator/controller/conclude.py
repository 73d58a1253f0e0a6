"""Conclude an attempt: fence it, judge it against the run's history, and write the decision in one transaction."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from orchestrator import failpoints
from orchestrator.controller.actor import Actor
from orchestrator.controller.collect_evidence import forget
from orchestrator.controller.nodes_to_avoid import load_pool
from orchestrator.recovery import failure_rate
from orchestrator.recovery.classify_failure import Verdict
from orchestrator.recovery.doubted_checkpoints import trust_changes
from orchestrator.recovery.node_exclusion import ExclusionDecision, nodes_to_exclude
from orchestrator.recovery.retry_policy import EndedAttempt, after_cancel, attribute_drill, decide
from orchestrator.registry.records import Attempt, Run
from orchestrator.registry.store import Store
from orchestrator.run_dirs.bounded_files import RunDirHangs
from orchestrator.run_dirs.controlled_run import ControlledRun
from orchestrator.run_dirs.run_folder import check_run_folder
from orchestrator.states import RunState, Trust
from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.failures.decision import Action, Decision
from trainer.protocol.failures.outcome import Failure

_RUN_AFTER = {
    Action.SUCCEED: RunState.SUCCEEDED,
    Action.FAIL: RunState.FAILED,
    Action.HOLD: RunState.HELD,
    Action.CANCEL: RunState.CANCELLED,
    Action.RETRY: RunState.RECOVERING,
}


def conclude(actor: Actor, view: ControlledRun, verdict: Verdict, rng: Random, gone: Sequence[str] = ()) -> Decision:
    """End a run's newest attempt and decide the next action. `gone`: nodes that the scheduler removed from its job."""
    run, attempt = view.run, view.last
    state, why, failure = verdict
    failure = attribute_drill(failure, actor.store.notices(run.name), attempt.number, attempt.generations)
    actor.fence(view.attempt_dir)
    now = actor.clock.wall()
    pool = load_pool(actor, view, gone)
    held = None if failure is None or failure.drill else failure  # a drill is not held against any node
    blamed = [one for one in nodes_to_exclude(held, pool, view.config.recovery, now) if one.node is not None]
    decision = _decision(actor, view, (state, why, failure), now, rng, blamed)

    def write() -> None:
        stamp = actor.stamp()
        _note_nodes(actor, run, attempt, held, blamed)
        rows = actor.store.generations(run.name), actor.store.checkpoints(run.name)
        for item, trust, reason in trust_changes(view.attempts, *rows, failure, actor.store.restore_tests(run.name)):
            actor.store.trust(run.name, item.name, trust, reason, **stamp)
        actor.store.move_attempt(
            run.name, attempt.number, state, why, **stamp, ended_at=now,
            failure=failure.to_json() if failure else None, decision=decision.to_json(),
        )  # fmt: skip
        apply(actor, run, decision, now)
        if view.cancel is not None:
            actor.store.answer(view.cancel.id, f"{run.name} is {_RUN_AFTER[decision.action]}", **stamp)

    actor.store.together(write)
    if view.cancel is None:
        failpoints.reach("after_attempt_ended")
    else:
        failpoints.reach("after_ask")
    forget(actor.observed, run.name, attempt.number)
    actor.record_action(f"{run.name}/{attempt.number} ended ({why}): {decision.action}, {decision.reason}")
    return decision


def _note_nodes(
    actor: Actor, run: Run, attempt: Attempt, failure: Failure | None, blamed: Sequence[ExclusionDecision]
) -> None:
    """Count the failure against its nodes, and record which nodes to avoid from now on."""
    if traits(run.cluster).simulated_nodes:
        return
    stamp = actor.stamp()
    why = "" if failure is None else f"{failure.kind} in {run.name}/{attempt.number}"
    failed = () if failure is None else failure.nodes
    for node in failed if failure is not None and failure_rate.counts(failure) else ():
        actor.store.saw_node(node, run.domain, **stamp, failure=why)
    for one in blamed:
        if one.node is not None:
            because = why if one.node in failed else one.reason
            actor.store.exclude_node(one.node, run.domain, one.until, because, **stamp)


def apply(actor: Actor, run: Run, decision: Decision, now: float) -> None:
    """Move the run to the state that a decision requires. If a person must act, the reason names the command to run."""
    reason = decision.reason
    cured = f"orch resume {run.name} " in reason  # the reason already names the change to make
    if decision.action in (Action.HOLD, Action.FAIL) and not (cured or is_restore_test(run)):
        reason = f"{reason}; when it is fixed: orch resume {run.name}"
    actor.store.move_run(
        run.name, _RUN_AFTER[decision.action], reason, epoch=actor.epoch, now=now, not_before=decision.not_before
    )


def _decision(
    actor: Actor, view: ControlledRun, verdict: Verdict, now: float, rng: Random, blamed: Sequence[ExclusionDecision]
) -> Decision:
    _, why, failure = verdict
    if failure is None:
        return Decision(action=Action.SUCCEED, reason=why)
    if view.cancel is not None:
        return cancel_decision(actor, view)
    if is_restore_test(run := view.run):
        return Decision(action=Action.FAIL, reason=f"did not finish, and is not retried as {run.name}: {why}")
    past = history(view, failure, now, _saved_after(actor.store, view))
    return decide(
        past, view.config.recovery, now, rng.random(), run=run.name, steps_known=_steps_known(view),
        exclude=tuple(one.node for one in blamed if one.node is not None),
    )  # fmt: skip


def cancel_decision(actor: Actor, view: ControlledRun) -> Decision:
    """Return the decision for a cancelled run. If the newest checkpoint is missing from the folder, it says so."""
    step = max((attempt.saved_step for attempt in view.attempts if attempt.saved_step is not None), default=None)
    return after_cancel(step, "" if step is None else _missing(actor, view, step))


def _missing(actor: Actor, view: ControlledRun, step: int) -> str:
    name, own = view.run.name, str(view.folder.checkpoints)
    rows = [row for row in actor.store.checkpoints(name) if row.step == step and row.trust is not Trust.DELETED]
    copies = [copy for copy in actor.store.copies(name) if copy.name in {row.name for row in rows}]
    paths = [*(Path(row.path) for row in rows), *(Path(copy.path) for copy in copies)]

    def look() -> str:
        if why := check_run_folder(view.run, view.attempts[0]):
            return why
        inside = bool(paths) and all(str(path.parent) == own for path in paths)
        return "its folder is gone" if inside and not any(path.is_dir() for path in paths) else ""

    try:
        return actor.in_folder(view.folder, look)
    except RunDirHangs as error:
        return error.what


def is_restore_test(run: Run) -> bool:
    """Return whether a run is a restore test. It has a single attempt; the next due test replaces a failed one."""
    return "restore_test" in run.identity


def _steps_known(view: ControlledRun) -> bool:
    """Return whether steps are known. A command shows them only in its checkpoints, whose path may be misconfigured."""
    return not view.config.command or any(attempt.saved_step is not None for attempt in view.attempts)


def _saved_after(store: Store, view: ControlledRun) -> dict[int, float]:
    """Map each attempt of a command to the longest time from a generation's start to a checkpoint.

    The map is empty for other runs, whose steps always grow. A checkpoint that the next attempt found at its start does
    not count, because nothing records when it was written.
    """
    found: dict[int, float] = {}
    if not view.config.command:
        return found
    generations, ended = store.generations(view.run.name), {one.number: one.ended_at for one in view.attempts}
    for row in store.checkpoints(view.run.name):
        began = [one.started_at for one in generations if one.attempt == row.attempt]
        end = ended.get(row.attempt)
        before = [at for at in began if at <= row.committed_at and (end is None or row.committed_at <= end)]
        if before:
            found[row.attempt] = max(found.get(row.attempt, 0.0), row.committed_at - max(before))
    return found


def history(
    view: ControlledRun, failure: Failure, now: float, saved_after: Mapping[int, float] | None = None
) -> list[EndedAttempt]:
    """Return the attempts that count for the decision, including the newest with its new failure."""
    first_training = not any(attempt.generations for attempt in view.attempts)
    found = []
    for attempt in view.attempts:
        earlier = Failure.from_json(attempt.failure) if attempt.failure else None
        found.append(
            EndedAttempt(
                row=attempt if attempt.ended_at is not None else replace(attempt, ended_at=now),
                failure=failure if attempt is view.last else earlier,
                saved_after=(saved_after or {}).get(attempt.number, 0.0),
                first_training=first_training,
                drills_recur=bool(view.config.drill.events),
            )
        )
    return [past for past in found if past.row.number >= view.run.fresh_from]
