"""Signs of a run that need no scheduler: its state, requests, and the attempt's files."""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from orchestrator.controller.actor import Actor
from orchestrator.controller.query_schedule import Signs
from orchestrator.registry.records import Attempt, Run, UserRequest
from orchestrator.run_dirs.bounded_files import RunDirHangs
from orchestrator.states import AttemptState
from trainer.protocol.heartbeat import Heartbeat
from trainer.protocol.run_dir import AttemptDir, RunDir

SILENT = 10.0
"""Seconds without a new heartbeat after which the scheduler is asked about the job. Heartbeats come once a second."""
HAS_JOB = frozenset({AttemptState.SUBMITTED, AttemptState.RUNNING})


def read_signs(actor: Actor, run: Run, last: Attempt, cancel: UserRequest | None, unsettled: Collection[str]) -> Signs:
    """Return the signs of a run; `last` is its newest attempt.

    `unsettled`: runs whose job was missing, leaving or ended in the scheduler's last answer.
    """
    place = RunDir(Path(run.run_dir)).attempt(last.number)
    ended, beat = _read_files(actor, place) if last.state in HAS_JOB else (False, None)
    key = f"beat:{run.name}/{last.number}"  # as in `collect_evidence`
    silent = beat is None or actor.observed.age(key, beat) >= SILENT
    is_time = run.not_before <= actor.clock.wall()
    awaited = {
        AttemptState.INTENT: True,
        AttemptState.SUBMITTED: beat is not None or cancel is not None,
        AttemptState.RUNNING: ended or silent or cancel is not None,
    }.get(last.state, is_time)
    asked = cancel.id if cancel is not None else None
    events = (run.name, run.state, last.number, last.state, is_time, asked, ended, beat is not None)
    return Signs(events=events, unsettled=awaited or run.name in unsettled)


def _read_files(actor: Actor, place: AttemptDir) -> tuple[bool, int | None]:
    """Return whether the attempt has an outcome, and the number of its newest heartbeat, or None if there is none."""
    with suppress(OSError, RunDirHangs):
        return actor.in_folder(RunDir(place.path.parent.parent), lambda: (place.outcome.exists(), _beat(place)))
    return False, None


def _beat(place: AttemptDir) -> int | None:
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        return Heartbeat.read(place.heartbeat).seq
    return None


def has_news(folder: RunDir) -> tuple[bool, bool]:
    """Return whether the newest attempt has an outcome, and whether its agents have started."""
    newest = folder.all_attempts()[-1:]
    return any(place.outcome.exists() for place in newest), any(place.heartbeat.exists() for place in newest)
