"""Collect the evidence about an attempt from its files and its scheduler, without deciding anything."""

import errno
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from checkpointing.storage.durable import NestedTooDeeply, NotAFile, read_json
from checkpointing.storage.storage_errors import write_probe
from orchestrator.controller.scheduler_snapshot import SchedulerSnapshot
from orchestrator.errors import ConfigError
from orchestrator.observed_since import ObservedSince
from orchestrator.recovery.classify_failure import LOST_AFTER, Evidence
from orchestrator.registry.records import Attempt
from orchestrator.run_dirs.bounded_files import DirectFiles, Files
from orchestrator.run_dirs.controlled_run import ControlledRun
from orchestrator.run_dirs.job_spec import job_spec
from orchestrator.scheduler.interface import ENDED_STATES, LEAVING_STATES, RUNNING_STATES, JobStatus
from orchestrator.scheduler.script import prepare
from orchestrator.scheduler.slurm.sbatch_values import minutes
from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.failures.outcome import AgentReport, AttemptOutcome, AttemptResult, FailureKind
from trainer.protocol.heartbeat import Heartbeat
from trainer.protocol.logs.log_rotation import read_tail
from trainer.protocol.requests import RequestKind, pending
from trainer.protocol.run_dir import AttemptDir, RunDir

T = TypeVar("T")

SILENCED = "silent"  # `detail` of the stop request for a job whose heartbeat is silent
REQUEUED = "requeued"
"""`detail` of the stop request for a job that Slurm has restarted; accounting may not show the restart."""
GAVE_UP = "gave up waiting"  # `detail` of the stop request for a job that has waited too long for nodes
BEFORE_AGENTS = 60.0  # seconds a job may need to start its first agent
TAIL = 64 * 1024  # bytes read from the end of each log


def read_files(place: AttemptDir) -> tuple[Heartbeat | None, Evidence]:
    """Return the heartbeat and the evidence from an attempt's files; an unreadable file counts as missing."""
    odd: list[str] = []
    heartbeat, outcome = _read(Heartbeat.read, place.heartbeat, odd), _read(AttemptOutcome.read, place.outcome, odd)
    # A coordinator that has lost an agent does not know why.
    unsure = outcome is None or (outcome.failure is not None and outcome.failure.kind is FailureKind.AGENT_LOST)
    paths = place.agent_reports() if unsure else []
    reports = tuple(report for path in paths if (report := _read(AgentReport.read, path, odd)) is not None)
    started = heartbeat is not None or (place.events.is_dir() and any(place.events.glob("*.jsonl")))
    return heartbeat, Evidence(
        attempt=place.number, answered=False, job=None, outcome=outcome, started=started, odd="; ".join(odd),
        reports=reports, silenced=_stop_reason(place, SILENCED), requeued=_stop_reason(place, REQUEUED),
        gave_up=_stop_reason(place, GAVE_UP), saves_failing=heartbeat.saves_failing if heartbeat else "",
        waits=heartbeat.waits if heartbeat else "", unsaved=heartbeat.unsaved if heartbeat else "",
    )  # fmt: skip


def _read(read: Callable[[Path], T], path: Path, odd: list[str]) -> T | None:
    try:
        return read(path)
    except (NotAFile, NestedTooDeeply) as error:
        odd.append(odd_file(path, error))
    except OSError as error:
        if error.errno == errno.ELOOP:
            odd.append(odd_file(path, error))
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    return None


def odd_file(path: Path, error: Exception) -> str:
    """Return a message, with the remedy, about an unexpected or damaged entry where one of our files should be."""
    return f"{path} {(error.strerror if isinstance(error, OSError) else '') or 'is damaged'}: remove it"


def collect_evidence(
    view: ControlledRun, snapshot: SchedulerSnapshot, observed: ObservedSince, files: Files | None = None
) -> Evidence:
    """Collect the evidence about the newest attempt of a run. Raises RunDirHangs."""
    attempt, place, access = view.last, view.attempt_dir, files or DirectFiles()

    def read(work: Callable[[], T]) -> T:
        return access.call(view.folder.path, work)

    key = f"{view.run.name}/{attempt.number}"
    job, requeued = snapshot.adopted_job(attempt), snapshot.requeued_job(view.run, attempt)
    heartbeat, seen = read(lambda: read_files(place))
    outcome = seen.outcome
    ended = job is not None and job.state in ENDED_STATES
    leaving = job is not None and job.state in LEAVING_STATES
    silent_for = observed.age(f"beat:{key}", heartbeat.seq if heartbeat else "none")
    quiet = heartbeat is not None and outcome is None and silent_for >= LOST_AFTER
    grown = read(lambda: growth(place)) if quiet else ""
    mute = quiet or (ended and outcome is None)
    gone = removed_nodes(job, observed, key) if view.config.cluster.spare_nodes else ()
    return replace(
        seen,
        answered=snapshot.answered,
        job=job,
        restarts=attempt.restarts,
        requeued_job=requeued,
        requeued_for=_span(observed, f"requeued:{key}", requeued is not None, True),
        unrecorded=attempt.job_id in snapshot.unrecorded,
        absent_for=_span(observed, f"gone:{key}", snapshot.answered and job is None and requeued is None, True),
        ended_for=_span(observed, f"ended:{key}", ended, job.state if job else ""),
        leaving_for=_span(observed, f"leaving:{key}", leaving, True),
        silent_for=silent_for,
        leader=_leader(attempt),
        still_for=_stillness(observed, f"still:{key}", job, grown),
        overstayed=_stillness(observed, f"over:{key}", job, "ended" if outcome is not None else ""),
        disk=read(lambda: write_probe(view.folder.path)) if mute else "",
        lost_interpreter=read(lambda: lost_interpreter(view)) if ended and not seen.started else "",
        gone=gone,
        leader_gone=leader_gone(attempt, job, gone),
        saved_step=attempt.saved_step,
        cancel_asked=view.cancel is not None,
        tails=read(lambda: read_tails(place)) if ended and is_unexplained(outcome) else {},
        near_limit=near_limit(job, outcome, view.config.cluster.signal_lead, traits(view.run.cluster).signal_early),
    )


def lost_interpreter(view: ControlledRun) -> str:
    """Return the interpreter recorded at submission if it is gone because its virtual environment was moved or rebuilt.

    An interpreter from the configuration or a template is not checked, because it may exist only on the nodes.
    """
    spec = job_spec(view.run, view.last, view.config)
    try:
        own = prepare(spec).own_interpreter
    except ConfigError:
        return ""
    return spec.submitter.python if own and not os.path.exists(spec.submitter.python) else ""


def is_unexplained(outcome: AttemptOutcome | None) -> bool:
    """Return whether Slurm's messages in the logs are needed to explain the attempt's end."""
    if outcome is None or outcome.failure is None:
        return outcome is None or outcome.result is AttemptResult.STOPPED
    unjoined = outcome.failure.kind is FailureKind.AGENT_LOST and outcome.failure.node is None
    return unjoined or outcome.failure.kind is FailureKind.PREEMPTED


def near_limit(job: JobStatus | None, outcome: AttemptOutcome | None, lead: float, early: float) -> bool:
    """Return whether the attempt ended when the scheduler's signal was due under its job's current time limit.

    The signal was requested `lead` seconds before the limit, and may come up to `early` seconds before that. The limit
    may have been shortened, which the job learns only from the signal.
    """
    if job is None or outcome is None:
        return False
    try:
        limit = 60.0 * minutes("time limit", job.settings.get("time limit", ""))
    except ConfigError:
        return False
    return limit - (outcome.ended_at - outcome.started_at) <= lead + early + BEFORE_AGENTS


def removed_nodes(job: JobStatus | None, observed: ObservedSince, key: str) -> tuple[str, ...]:
    """Return the nodes that have left the job; only a job with spares continues without them (--no-kill).

    Names known only from agents prove nothing here: a host's own name may differ from Slurm's.
    """
    seen = set(observed.value(f"nodes:{key}").split())
    gone = set(observed.value(f"left:{key}").split())
    if job is not None and job.state in RUNNING_STATES and job.nodes:
        gone, seen = seen - set(job.nodes), seen | set(job.nodes)
        observed.age(f"nodes:{key}", " ".join(sorted(seen)))
        observed.age(f"left:{key}", " ".join(sorted(gone)))
    # After a job has ended, Slurm may list all of its nodes again.
    return tuple(sorted(gone))


def leader_gone(attempt: Attempt, job: JobStatus | None, gone: Collection[str]) -> str:
    """Return a running job's first node if Slurm removed it; with --no-kill the other nodes stay without a leader."""
    running, leader = job is not None and job.state in RUNNING_STATES, _leader(attempt)
    return leader if running and leader in gone else ""


def _leader(attempt: Attempt) -> str:
    """Return the node of the attempt's coordinator; empty while only Slurm's list of its nodes is known.

    The coordinator lists its own node first. Since 26.05, the first node of Slurm's list may have any task.
    """
    return attempt.nodes[0] if attempt.nodes and attempt.generations else ""


def _span(observed: ObservedSince, key: str, holds: bool, value: Any) -> float:
    if holds:
        return observed.age(key, value)
    observed.forget(key)
    return 0.0


_MEASURED = (
    "gone", "ended", "leaving", "beat", "cancel", "nodes", "left", "still", "over", "avoid", "unheld", "waits",
    "reason", "requeued",
)  # fmt: skip
"""Prefixes of the keys under which an attempt's durations are measured."""


def forget(observed: ObservedSince, run: str, attempt: int) -> None:
    """Drop the measurements of an ended attempt."""
    for what in _MEASURED:
        observed.forget(f"{what}:{run}/{attempt}")


def _stop_reason(place: AttemptDir, detail: str) -> str:
    """Return why orch asked this attempt to stop; empty if it did not."""
    requests = RunDir(place.path.parent.parent).requests
    if not any(requests.glob(f"{RequestKind.STOP}.{place.number:03d}.*.json")):
        return ""
    asked = pending(requests, place.number, set())
    return next((one.reason for one in asked if one.kind is RequestKind.STOP and one.detail == detail), "")


def growth(place: AttemptDir) -> str:
    """Return a digest of the number, sizes and times of the attempt's files; it changes whenever the attempt writes."""
    count, size, newest = 0, 0, 0
    for folder in (place.path, place.events, place.metrics.parent, place.logs, place.evidence, place.outcomes):
        for entry in os.scandir(folder) if folder.is_dir() else ():
            seen = entry.stat(follow_symlinks=False)
            count, size, newest = count + 1, size + seen.st_size, max(newest, seen.st_mtime_ns)
    return f"{count}/{size}/{newest}"


def _stillness(observed: ObservedSince, key: str, job: JobStatus | None, value: str) -> float:
    """Return for how many seconds a running job has kept this value; the count restarts if the job is not RUNNING."""
    if job is None or job.state != "RUNNING" or not value:
        observed.forget(key)
        return 0.0
    return observed.watched_seconds(key, value)


def slurm_logs(submission: Path) -> list[Path]:
    """Return Slurm's output files of the jobs submitted from this folder."""
    return sorted(path for kind in ("*.out", "*.err") for path in submission.glob(kind))


def inherited_logs(place: AttemptDir) -> dict[Path, int]:
    """Return Slurm's output files of an attempt that continues in an earlier one's job, with their former sizes."""
    try:
        found = read_json(place.requeued)
        submission = place.run.attempt(int(found["submitted_by"])).submission
        sizes = {str(name): int(size) for name, size in found["logs"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return {path: sizes.get(path.name, 0) for path in slurm_logs(submission)}


def read_tails(place: AttemptDir) -> dict[str, str]:
    """Return the ends of the agents' logs and of Slurm's output files."""
    paths = sorted(place.logs.glob("agent-*.log"))
    paths += slurm_logs(place.submission)
    found = {}
    for path in paths:
        with suppress(OSError):
            found[path.name] = read_tail(path, TAIL).decode(errors="replace")
    for path, size in inherited_logs(place).items():
        with suppress(OSError):
            found[path.name] = read_tail(path, min(TAIL, max(0, path.stat().st_size - size))).decode(errors="replace")
    return {name: text for name, text in found.items() if text}
