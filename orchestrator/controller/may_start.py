"""Runs that may not start yet: those after another run, and those of a sweep with enough unfinished runs."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.controller.actor import Actor
from orchestrator.controller.conclude import apply
from orchestrator.controller.ownership import never_submitted
from orchestrator.registry.reads import Reads
from orchestrator.registry.records import Attempt, Run, SweepMember
from orchestrator.states import RunState
from trainer.protocol.failures.decision import Action, Decision

ENDED_BADLY = frozenset({RunState.FAILED, RunState.CANCELLED})
"""States of a predecessor after which its successor would never start."""


@dataclass(frozen=True, kw_only=True)
class RunWait:
    """Reason why a run may not start now. `hold`: only a person can change that."""

    reason: str
    hold: bool = False


def waiting_runs(
    live: Sequence[Run],
    attempts: Mapping[str, Sequence[Attempt]],
    predecessors: Mapping[str, Run],
    cancelled: Collection[str] = (),
) -> dict[str, RunWait]:
    """Return the live runs that may not start now, with the reason.

    `live` has all live runs, newest first. `attempts` may lack those of runs that this controller does not serve, which
    are taken for started. `predecessors` has the run after which each one starts, by its own name.

    Only runs that were never submitted wait. Of a sweep, the oldest ones start first; a run that a person has resumed
    does not wait for the others.
    """
    idle = [run for run in reversed(live) if never_submitted(attempts.get(run.name, ())) and run.name not in cancelled]
    waits = {
        run.name: wait for run in idle if (wait := after_predecessor(run, predecessors.get(run.name))) is not None
    }  # fmt: skip
    names = {run.name for run in idle if run.state is RunState.CREATED}
    unfinished: dict[str, list[str]] = defaultdict(list)
    for run in live:
        if run.sweep and run.name not in names:
            unfinished[run.sweep["name"]].append(run.name)
    for run in idle:
        member = SweepMember.from_run(run)
        if member is None or run.name in waits or run.name not in names:
            continue
        started = unfinished[member.name]
        if len(started) >= member.limit:
            reason = f"waits for its turn in the sweep {member.name}: {len(started)} of its runs are unfinished"
            waits[run.name] = RunWait(reason=f"{reason}, at most {member.limit} at once")
        else:
            started.append(run.name)
    return waits


def after_predecessor(run: Run, before: Run | None) -> RunWait | None:
    """Return why a run may not start because of its predecessor `before` (None: removed), or None if it may."""
    if not run.predecessor:
        return None
    anyway = "resuming this run starts it without waiting"
    if before is None:
        return RunWait(reason=f"was to start after {run.predecessor}, which has been removed; {anyway}", hold=True)
    if before.state in ENDED_BADLY:
        reason = f"was to start after {before.name}, which is {before.state}"
        again = f"`orch resume {before.name}` first lets this run wait for it again"
        return RunWait(reason=f"{reason}; {anyway}, and {again}", hold=True)
    if before.state is not RunState.SUCCEEDED:
        return RunWait(reason=f"waits until {before.name} has succeeded, which is {before.state}")
    return None


def find_predecessors(store: Reads, runs: Sequence[Run]) -> dict[str, Run]:
    """Return the run after which each of these runs starts, by its own name, unless it has been removed."""
    found = {run.name: store.predecessor(run) for run in runs if run.predecessor}
    return {name: before for name, before in found.items() if before is not None}


def record_wait(actor: Actor, run: Run, wait: RunWait) -> bool:
    """Record why a run does not start; return whether it is now held."""
    if not wait.hold:
        actor.note(run, wait.reason)
        return False
    apply(actor, run, Decision(action=Action.HOLD, reason=wait.reason), actor.clock.wall())
    actor.record_action(f"{run.name} held: {wait.reason}")
    return True
