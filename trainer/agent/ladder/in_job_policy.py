"""The coordinator's next action within an attempt. Pure.
Rungs 1 (roll back, skip a batch), 2 (restart in place), 3 (use a spare node) and 4 (leave the attempt).
"""

import sys
from dataclasses import dataclass, field, replace

from trainer.agent.ladder.attempt_history import AttemptHistory
from trainer.agent.ladder.command_failures import CommandPast, command_cause
from trainer.agent.ladder.rank_death import find_cause, secondary_order
from trainer.agent.processes.background_tasks import run_detached
from trainer.agent.watch.hang_limits import PATIENCE
from trainer.protocol import skipped_batches
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.decision import Action, Decision
from trainer.protocol.failures.outcome import LOSS_SPIKE, AttemptResult, ExitCode, Failure, FailureKind, select_kinds
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.failures.suspect_checkpoints import failed_generation, suspect_steps
from trainer.protocol.rank_progress.progress import StopReason
from trainer.protocol.run_dir import AttemptDir
from trainer.protocol.skipped_batches import Skip


async def record_skip(skip: Skip, attempt: AttemptDir, events: EventLog, *, seconds: float = 10.0) -> None:
    """Record the batch before any rank can read it again, waiting at most `seconds` for a hung file system."""
    try:
        await run_detached(lambda: skipped_batches.add(attempt, [skip]), seconds)
    except (OSError, ValueError) as error:  # this attempt skips it anyway
        sys.stderr.write(f"orch-agent: cannot write {attempt.skipped_batches}: {error!r}\n")
    events.write(EventKind.BATCH_SKIPPED, step=skip.step, position=skip.position, reason=skip.reason)


SETTLE_SECONDS = 1.0
"""Seconds for peers to report their own outcomes; limited, since they may be blocked in a collective forever."""

SURE_SECONDS = 0.2
"""The same limit if an exit is self-explanatory: only an earlier exit could be the cause, and it is about to be
reported.
"""

QUICK_SECONDS = 60.0
"""Two equal exceptions at the same step, each within this many seconds, are classified as a deterministic bug."""

MAX_FUTILE_RESTARTS = 3
"""Consecutive restarts without a new step after which the attempt ends."""

FIXED_BY_RESTART = select_kinds(lambda traits: traits.restarts_in_place)
"""Failures that a new generation on the same nodes can fix."""

AGAIN_SECONDS = 30.0
"""Minimum seconds left for a restart made only to save: a kill, a warm start, a restore, a step or two, and the save.
This exceeds the 20 s after a SIGTERM: SIGKILL follows soon, and a clean end is better than an attempt to save.
"""

START_SECONDS = 10.0
"""The same minimum once everything is ready; with less time, a generation would be started only to be killed."""

LONGEST_REASON = 2000
"""Maximum characters of the outcome's reason: agents reject overlong lines, and a desync may name every rank."""

_EXAMINED = select_kinds(lambda traits: traits.examined)
"""Failures declared after examining all ranks, so no further reports will arrive."""

_NEVER_RETRY = select_kinds(lambda traits: traits.comes_back)
"""Failures that recur until an operator changes something."""

_COMMAND_LATE = "the command was asked to stop, did not end in time, and was killed"


@dataclass(frozen=True, kw_only=True)
class Situation:
    """All inputs of a decision within an attempt."""

    world: int
    history: AttemptHistory = field(default_factory=AttemptHistory)
    ends: tuple[RankEnd, ...] = ()
    since_failure: float = 0.0  # seconds since the first bad end or breakage
    since_end: float = 60.0  # seconds since the newest exit of a rank
    ran_for: float = 0.0  # seconds since the generation started
    budget: int = 0  # recovery.restarts_in_place
    backoff: tuple[float, float] = (0.0, 0.0)  # recovery.backoff and backoff_max
    stopping: StopReason = StopReason.NONE
    stop_why: str = ""  # origin of the stop request, if known
    overdue: bool = False  # the stop's deadline has passed
    left: float = 0.0  # seconds until that deadline
    command: CommandPast | None = None  # set if the ranks run the user's own command
    broken: Failure | None = None  # failure other than a rank's: of an agent, a fork server or a preflight
    restored: int = 0  # step of the checkpoint that this generation started from; 0 if none
    spares: int = 0  # nodes that could replace another
    home: str = ""  # the coordinator's own node, which a spare cannot replace
    spike_budget: int = 0  # detection.spike.roll_backs
    saves_failing: str = ""  # when saves began to fail, and why; empty while they succeed
    drill: str = ""  # kind of the requested drill that ends this generation
    shortfall: str = ""  # step that a user's program has reached, if that is not its last one

    @property
    def stop_words(self) -> str:
        return self.stop_why or self.stopping.name.lower().replace("_", " ")

    def bad(self) -> list[RankEnd]:
        return [end for end in self.ends if not end.good]


_STOP_FAILURES = {
    StopReason.CANCEL: FailureKind.CANCELLED,
    StopReason.PREEMPTION: FailureKind.PREEMPTED,
    StopReason.TIME_LIMIT: FailureKind.TIME_LIMIT,
}


def decide(now: Situation) -> Decision:
    """Return the next action for a running generation."""
    # A lost agent's ranks are lost with it; only a spare or a new attempt can replace them.
    if now.broken is not None and now.broken.kind is FailureKind.AGENT_LOST:
        return _replace(now, now.broken) or end(now.broken.reason, now.broken)
    if not now.bad() and now.broken is None:
        return _without_failure(now)
    # All ranks are examined before a hang is declared, so none has anything more to report.
    asked = now.broken is not None and now.broken.kind in (FailureKind.HANG, FailureKind.DESYNC)
    if now.broken is not None and now.broken.kind in _EXAMINED and now.stopping is StopReason.NONE:
        return _after_failure(now)
    # The first bad exit may not be the cause, so give the other ranks a moment to report theirs.
    settle = 0.0 if asked else SURE_SECONDS if any(secondary_order(end) == 0 for end in now.bad()) else SETTLE_SECONDS
    if now.since_failure < settle and len(now.ends) < now.world:
        return Decision(action=Action.WAIT, reason="a rank has failed; waiting for the reports of its peers")
    if now.stopping is not StopReason.NONE:
        return _failed_while_stopping(now)
    return _after_failure(now)


def _replace(now: Situation, lost: Failure, reason: str = "", nodes: tuple[str, ...] = ()) -> Decision | None:
    """Replace all lost or blamed nodes if there are enough spares (rung 3)."""
    nodes = nodes or lost.nodes
    if not nodes or len(nodes) > now.spares or now.stopping is not StopReason.NONE or now.home in nodes:
        return None
    takers = "a spare node takes" if len(nodes) == 1 else f"{len(nodes)} spare nodes take"
    left = now.spares - len(nodes)
    reason = f"{reason or lost.reason}; {takers} the place of {', '.join(nodes)}, {left} left after it"
    return Decision(action=Action.REPLACE, reason=reason, failure=lost, mark="lost", lost=nodes)


def _without_failure(now: Situation) -> Decision:
    if len(now.ends) == now.world:
        stopped = any(end.exit_code == ExitCode.STOPPED_AFTER_SAVE for end in now.ends)
        # A command may exit 0 when asked to stop; only its own checkpoints show whether it had finished.
        if stopped or (now.command is not None and now.stopping is not StopReason.NONE):
            return Decision(action=Action.STOP, reason=f"all ranks stopped: {now.stop_words}")
        # Slurm signals every process of a step, so ranks may exit 0 before their agents report the signal.
        if now.command is not None and now.since_end < SETTLE_SECONDS:
            return Decision(action=Action.WAIT, reason="all ranks have ended; waiting for reports of a signal")
        if now.shortfall:
            reason = f"all ranks ended with exit code 0 at {now.shortfall}"
            return end(reason, Failure(kind=FailureKind.UNKNOWN, reason=reason))
        # The ranks finished, so the last save worked; only copying it to other tiers is failing.
        copies = f"; {now.saves_failing}" if now.saves_failing else ""
        return Decision(action=Action.FINISH, reason=_cut(f"all ranks finished{copies}"))
    if now.overdue:
        if now.command is not None:
            return stop_failure(now.stopping, _COMMAND_LATE, now.stop_words)
        late = "ranks were asked to save and stop, did not do so in time, and were killed"
        return _end_if_saves_fail(now, late) or stop_failure(now.stopping, late, now.stop_words)
    return Decision(action=Action.WAIT, reason=f"{len(now.ends)} of {now.world} ranks have ended")


def _end_if_saves_fail(now: Situation, reason: str) -> Decision | None:
    """Return the end of an attempt that could not save before stopping because saves were already failing, or None."""
    if not now.saves_failing:
        return None
    reason = f"{reason}: {now.saves_failing}"
    return end(reason, Failure(kind=FailureKind.STORAGE, reason=reason))


def _failed_while_stopping(now: Situation) -> Decision:
    if now.command is not None:
        # SIGTERM is the request, so dying of it or exiting with any code afterwards complies.
        if len(now.ends) == now.world:
            return Decision(action=Action.STOP, reason=f"the command ended when asked: {now.stop_words}")
        if not now.overdue:
            return Decision(action=Action.WAIT, reason="the command was asked to stop")
        return stop_failure(now.stopping, _COMMAND_LATE, now.stop_words)
    cause = _cause(now)
    failure = cause.known_failure
    reason = f"{failure.reason}, while stopping ({now.stop_words})"
    if failure.kind is FailureKind.NUMERIC:
        return _bad_while_stopping(now, cause, reason)
    if failure.kind not in FIXED_BY_RESTART or not cause.retry:
        return end(reason, failure, cause.mark)
    if why_not := _not_again(now):
        return end(f"{reason}, {why_not}", failure, cause.mark)
    reason = f"{reason}; {now.left:.0f} s are left to start again, save and stop"
    return Decision(action=Action.RESTART, reason=reason, failure=failure, mark=cause.mark)


def _bad_while_stopping(now: Situation, cause: Decision, reason: str) -> Decision:
    """Roll back while stopping.
    The batch is skipped even if no time is left to train and save, since the next attempt benefits.
    """
    rollback = _roll_back(now, cause, reason, doubted=False)
    if rollback.action is not Action.ROLL_BACK or not (why_not := _no_time(now)):
        return rollback
    why = f"{cause.known_failure.reason}, {why_not}; that batch is skipped from now on"
    stopped = stop_failure(now.stopping, why, now.stop_words)
    return replace(stopped, skip=rollback.skip)


def _not_again(now: Situation) -> str:
    """Return why ranks that failed while stopping are not restarted to save, or "" if they are."""
    if now.history.restarts_used >= now.budget and not now.history.restarted_to_save:
        return f"with {_spent(now.budget, 'restart in place', 'restarts in place')}"
    return _no_time(now)


def _no_time(now: Situation) -> str:
    """Return why no time is left for a restart. A rollback checks only this, since it uses no restart."""
    if now.history.restarted_to_save:
        return "once more after a restart for the save"
    # The deadline may still move while ranks make progress, but only the time left now is certain.
    return "" if now.left >= AGAIN_SECONDS else f"with {now.left:.0f} s left, too little to start again"


def _after_failure(now: Situation) -> Decision:
    suspect = _new_suspect(now)
    # A repeated failure after loading the same checkpoint may be the checkpoint's fault, so try an older one first.
    cause = _cause(now, forgive=suspect is not None)
    reason = cause.known_failure.reason
    if suspect is not None:
        reason = f"{reason}; the checkpoint of step {suspect[0]} is suspect: {suspect[1]}"
    if cause.set_aside and not now.drill:
        reason = f"{reason}; {cause.set_aside}"
    decision = _rung(now, cause, reason, doubted=suspect is not None)
    if now.drill:
        return decision
    decision = replace(decision, own=cause.own, set_aside=cause.set_aside)
    return replace(decision, suspect=suspect[0]) if suspect is not None else decision


def _new_suspect(now: Situation) -> tuple[int, str] | None:
    """Return the step of the checkpoint that this generation started from and why it is suspect, if newly so."""
    if now.drill:
        return None
    last = failed_generation(_cause(now, forgive=True).known_failure, now.restored, None)
    found = {} if last is None else suspect_steps([*now.history.failed_generations, last], now.history.suspects)
    return (now.restored, found[now.restored]) if now.restored in found else None


def _rung(now: Situation, cause: Decision, reason: str, *, doubted: bool) -> Decision:
    """Choose the lowest rung that may help. `doubted` means that another checkpoint will be restored."""
    failure = cause.known_failure
    if failure.kind is FailureKind.NUMERIC and now.command is not None:
        return _restart_before_bad_loss(now, cause, reason)
    if failure.kind is FailureKind.NUMERIC:
        return _roll_back(now, cause, reason, doubted=doubted)
    if failure.kind is FailureKind.NODE_SUSPECT:
        return _replace(now, failure, reason) or end(reason, failure, cause.mark)
    # A single hang can have any cause; two on one node point to that node.
    again = tuple(node for node in failure.nodes if node in now.history.hung)
    if failure.kind is FailureKind.HANG and again and not now.drill:
        verb = "is" if len(again) == 1 else "are"
        reason = f"{reason}; {', '.join(again)} {verb} blamed for a hang for the second time in this attempt"
        return _replace(now, failure, reason, again) or end(reason, failure, cause.mark)
    decision = _restart(now, cause, reason)
    if failure.kind is FailureKind.HANG and decision.action is Action.RESTART and not now.drill:
        return replace(decision, reason=f"{decision.reason}, with {PATIENCE:g} times the `detection.hang.least`")
    return decision


def _roll_back(now: Situation, cause: Decision, reason: str, *, doubted: bool) -> Decision:
    """Restore the newest checkpoint and skip the batch of the bad step (rung 1), without using a restart."""
    failure, used = cause.known_failure, now.history.rollbacks_used
    assert cause.skip is not None
    if cause.skip.position in {skip.position for skip in now.history.skipped}:
        return end(f"{reason}; that batch should already have been skipped", failure, cause.mark)
    # The batch was not the cause; an older checkpoint may help. Loss spikes are exempt, since bad batches come in runs.
    if not (doubted or failure.exception == LOSS_SPIKE) and failure.step in {skip.step for skip in now.history.skipped}:
        reason = f"{reason}; step {failure.step} was bad before, and its batch at that time was skipped"
        return end(reason, failure, cause.mark)
    if used >= now.spike_budget:
        return end(f"{reason}; {_spent(now.spike_budget, 'rollback', 'rollbacks')}", failure, cause.mark)
    return Decision(
        action=Action.ROLL_BACK,
        reason=f"{reason}; rollback {used + 1} of {now.spike_budget}, skipping that batch",
        failure=failure,
        mark=cause.mark,
        skip=cause.skip,
    )


def _restart_before_bad_loss(now: Situation, cause: Decision, reason: str) -> Decision:
    """Start a user's program again from a checkpoint that is older than its unusable losses, once per step.
    Its batches are its own, so none can be skipped.
    """
    failure = cause.known_failure
    if failure.step is not None and failure.step <= now.history.bad_loss:
        reason = f"{reason}; it was unusable from step {now.history.bad_loss} on before the restart"
        return end(reason, failure, cause.mark)
    return _restart(now, replace(cause, action=Action.RESTART), reason)


def _restart(now: Situation, cause: Decision, reason: str) -> Decision:
    """Start a new generation on the same nodes (rung 2)."""
    failure = cause.known_failure
    if now.drill and (cause.retry or failure.kind in FIXED_BY_RESTART):
        reason = f"{reason}; restart in place, not counted: drill {now.drill}"
        return Decision(action=Action.RESTART, reason=reason, failure=failure, mark=cause.mark)
    if not cause.retry:
        return end(reason, failure, cause.mark)
    # A command's steps are unknown.
    if now.history.futile_restarts >= MAX_FUTILE_RESTARTS and now.command is None:
        return end(
            f"{reason}; {now.history.futile_restarts} restarts in a row have trained no new step", failure, cause.mark
        )
    if now.history.restarts_used >= now.budget:
        why = _spent(now.budget, "restart in place", "restarts in place")
        return end(f"{reason}; {why}", failure, cause.mark)
    pause = _pause(now, cause)
    after = f", in {pause:.0f} s" if pause else ""
    return Decision(
        action=Action.RESTART,
        reason=f"{reason}; restart {now.history.restarts_used + 1} of {now.budget} in place{after}",
        failure=failure,
        mark=cause.mark,
        pause=pause,
    )


def _pause(now: Situation, cause: Decision) -> float:
    """Return the pause in seconds before a checkpoint that just failed, or an external server, is tried again."""
    tries = cause.tries or (now.history.restarts_used + 1 if cause.outside else 0)
    if not tries:
        return 0.0
    first, most = now.backoff
    return min(most, first * 2.0 ** min(tries - 1, 60))


def _spent(budget: int, singular: str, plural: str) -> str:
    """Describe an exhausted rung, which ends the attempt but is not its cause."""
    if budget == 0:
        return f"no {plural} allowed"
    return f"{budget} {singular if budget == 1 else plural} used up without a new checkpoint"


def _cause(now: Situation, *, forgive: bool = False) -> Decision:
    """Return the root cause of the failure. If `forgive` is set, ignore an earlier occurrence at the same step."""
    if now.broken is not None:
        action = Action.RESTART if now.broken.kind in FIXED_BY_RESTART else Action.END
        return Decision(action=action, reason=now.broken.reason, failure=now.broken, mark="broken")
    if now.command is not None:
        return command_cause(now.ends, now.command, now.ran_for)
    last_mark = now.history.mark if now.ran_for < QUICK_SECONDS and not forgive else ""
    return find_cause(now.ends, trained=now.history.trained, last_mark=last_mark, restored=now.restored)


def stop_failure(stopping: StopReason, reason: str, words: str) -> Decision:
    """End an attempt that was asked to stop and could not save first."""
    reason = f"{reason} ({words})"
    return end(reason, Failure(kind=_STOP_FAILURES.get(stopping, FailureKind.UNKNOWN), reason=reason))


def end(reason: str, failure: Failure, mark: str = "") -> Decision:
    return Decision(action=Action.END, reason=reason, failure=failure, mark=mark)


def final_outcome(decision: Decision, stopped: str) -> tuple[ExitCode, AttemptResult, str]:
    """Return the attempt's end for this decision: the agents' exit code, the result and its reason.
    `stopped` is the reason for a requested stop, or "" if none was requested.
    """
    if decision.action is Action.FINISH:
        return ExitCode.FINISHED, AttemptResult.FINISHED, decision.reason
    if decision.action is Action.STOP:
        return ExitCode.STOPPED_AFTER_SAVE, AttemptResult.STOPPED, stopped or "the ranks themselves"
    assert decision.failure is not None
    return exit_code(decision.failure), AttemptResult.FAILED, _cut(decision.reason)


def _cut(reason: str) -> str:
    return reason if len(reason) <= LONGEST_REASON else f"{reason[: LONGEST_REASON - 3]}..."


def exit_code(failure: Failure) -> ExitCode:
    if failure.kind in _NEVER_RETRY:
        return ExitCode.NEVER_RETRY
    if failure.kind is FailureKind.NODE_SUSPECT:
        return ExitCode.NODE_SUSPECT
    return ExitCode.STORAGE if failure.kind is FailureKind.STORAGE else ExitCode.RETRY
