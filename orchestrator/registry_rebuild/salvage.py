"""Reconstruction of a missing run record from its jobs' files, without assumptions about past decisions."""

import time
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import read_json
from orchestrator.registry.operations.run_record import RunRecord
from orchestrator.registry.records import Attempt, Run, Transition
from orchestrator.states import AttemptState, RunState
from trainer.protocol.events import Event, EventKind, read_events
from trainer.protocol.failures.outcome import AttemptOutcome, AttemptResult
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.run_dir import AttemptDir, RunDir

FRESH = 120.0
"""Seconds for which a heartbeat proves that the job is alive."""


def salvage(folder: RunDir, run: dict[str, Any], now: float | None = None) -> RunRecord:
    """Build a record from run.json and the attempts' files. Raises OSError, ValueError or KeyError."""
    now = time.time() if now is None else now
    places = [place for place in folder.all_attempts() if (place.path / "intent.json").exists()]
    attempts = [_attempt(run["name"], place, newest=place is places[-1]) for place in places]
    if not attempts:
        raise ValueError(f"{folder.attempts} has no attempt")
    state, reason = _run_state(attempts[-1], places[-1], now)
    row = Run(
        name=run["name"],
        state=state,
        reason=reason,
        cluster=run["cluster"],
        run_dir=str(folder.path),
        config_digest=run["config_digest"],
        total_steps=run["total_steps"],
        created_at=run["created_at"],
        updated_at=max(run["created_at"], *(attempt.ended_at or attempt.intent_at for attempt in attempts)),
        identity=run["identity"],
        scheduler=run.get("scheduler", "") or attempts[-1].scheduler,
        tags=tuple(run.get("tags", ())),
    )
    note = Transition(
        run=row.name, kind="run", subject=row.name, before="", after=state, reason=reason, time=row.updated_at
    )
    return RunRecord(
        run=row, attempts=tuple(attempts), generations=(), checkpoints=(), transitions=(note,), nodes=(), cursors={}
    )


def _attempt(run: str, place: AttemptDir, *, newest: bool) -> Attempt:
    intent = read_json(place.path / "intent.json")
    token, started, outcome = _token(place), _find_start_event(place), _outcome(place)
    job_id = (token and token.job_id) or (started and started.data.get("job_id")) or (outcome and outcome.job_id)
    if outcome is not None:
        state = AttemptState.ENDED
    elif not newest:
        state = AttemptState.LOST  # a later attempt was allowed, so this one had ended
    elif job_id:
        state = AttemptState.RUNNING if started else AttemptState.SUBMITTED
    else:
        state = AttemptState.INTENT
    return Attempt(
        run=run,
        number=int(intent["attempt"]),
        state=state,
        nonce=intent["nonce"],
        job_name=intent["job_name"],
        reason=outcome.reason if outcome else "",
        epoch=token.epoch if token else 0,
        job_id=str(job_id) if job_id else None,
        excluded=tuple(intent["excluded"]),
        intent_at=float(intent["at"]),
        # It may have been submitted just after its intent: look-ups decide, as for any ambiguous submit.
        submitted_at=float(intent["at"]),
        started_at=outcome.started_at if outcome else started.time if started else None,
        ended_at=outcome.ended_at if outcome else None,
        last_step=(outcome.step or None) if outcome else None,  # unknown for a command
        failure=outcome.failure.to_json() if outcome and outcome.failure else None,
        scheduler=intent.get("scheduler", ""),
    )


def _run_state(last: Attempt, place: AttemptDir, now: float) -> tuple[RunState, str]:
    """Return the run's state: only a finished run and a live job are certain; otherwise a person must decide."""
    outcome = _outcome(place)
    if outcome is not None and outcome.result is AttemptResult.FINISHED:
        return RunState.SUCCEEDED, outcome.reason
    if outcome is None and _is_fresh(place.heartbeat, now):
        return RunState.RUNNING, "rebuilt from its run directory: its job is alive"
    known = f"its last attempt ended: {outcome.reason}" if outcome else "its last attempt left no outcome"
    return RunState.HELD, f"rebuilt without its record, and {known}; to go on: orch resume {last.run}"


def _is_fresh(path: Path, now: float) -> bool:
    try:
        return now - path.stat().st_mtime < FRESH
    except OSError:
        return False


def _token(place: AttemptDir) -> LaunchToken | None:
    try:
        return LaunchToken.read(place.go)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _outcome(place: AttemptDir) -> AttemptOutcome | None:
    try:
        return AttemptOutcome.read(place.outcome)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _find_start_event(place: AttemptDir) -> Event | None:
    files = sorted(place.events.glob("*.jsonl")) if place.events.is_dir() else []
    events = [event for path in files for event in read_events(path)[0]]
    return next((event for event in events if event.kind == EventKind.ATTEMPT_STARTED), None)
