"""What a run does, as it does it: the newest events and metrics of its run directory, put into sentences."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.cli.runs.tail import OpenAttempts, file_size, tail_offset
from orchestrator.cli.terminal.render import count, decimal, progress, size
from trainer.contract.events import Event, EventKind, read_events
from trainer.contract.line_file import read_new_lines
from trainer.contract.outcome import ExitCode
from trainer.contract.run_dir import AttemptDir, RunDir

_MAIN_FILES = ("coordinator.jsonl", "rank-00000.jsonl")
"""Event files in which most is told: opened at every poll, since on NFS only an open asks the server for the size."""
_RANK_ZERO = "rank-00000"


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Where training stands; loss is as it was written (nan and inf as words)."""

    attempt: int
    generation: int
    step: int
    loss: float | str | None
    tokens_per_s: float | None
    time: float


class EventFeed:
    """Reads on where it stopped: every event once, and the newest metric."""

    def __init__(self, run_dir: Path, *, recent_only: bool = False) -> None:
        """`recent_only`: only the newest attempt, of it only rank 0, and only the ends of long files."""
        self._place, self._recent_only = RunDir(run_dir), recent_only
        self._open_attempts = OpenAttempts(self._place, newest=recent_only)
        self._events: dict[Path, int] = {}
        self._rank_zero: set[Path] = set()  # files in which it has told something
        self._metrics: dict[Path, int] = {}
        self.latest: StepMetrics | None = None

    def skip_existing(self) -> None:
        """What is there by now is never told; `latest` is brought up to date."""
        self._open_attempts = OpenAttempts(self._place, newest=True)
        for attempt in self._open_attempts.attempts():
            for path in self._files(attempt):
                self._events[path] = file_size(path)
            self._read_metrics(attempt)

    def poll(self) -> list[Event]:
        """Events that are new since the last call, by their time; `latest` is brought up to date."""
        fresh: list[Event] = []
        for attempt in self._open_attempts.attempts():
            found = self._fresh_events(attempt)
            if found:
                self._open_attempts.mark_written(attempt)
            fresh += found
            self._read_metrics(attempt)
        return sorted(fresh, key=lambda event: (event.time, event.attempt, event.seq))

    def _files(self, attempt: AttemptDir) -> list[Path]:
        names = sorted(os.listdir(attempt.events)) if attempt.events.is_dir() else []
        wanted = (name for name in names if not (self._recent_only and name.startswith("rank-")) or name in _MAIN_FILES)
        return [attempt.events / name for name in wanted]

    def _fresh_events(self, attempt: AttemptDir) -> list[Event]:
        found: list[Event] = []
        for path in self._files(attempt):
            if path not in self._events:
                self._events[path] = tail_offset(path) if self._recent_only else 0
            if path.name in _MAIN_FILES or path in self._rank_zero or file_size(path) > self._events[path]:
                events, self._events[path] = read_events(path, self._events[path])
                found += self._wanted(events)
                if any(event.source == _RANK_ZERO for event in events):
                    self._rank_zero.add(path)
        return found

    def _wanted(self, events: list[Event]) -> list[Event]:
        if not self._recent_only:
            return events
        return [event for event in events if event.source == _RANK_ZERO or not event.source.startswith("rank-")]

    def _read_metrics(self, attempt: AttemptDir) -> None:
        path = attempt.metrics
        if path not in self._metrics:
            self._metrics[path] = tail_offset(path)  # only the newest line counts
        lines, self._metrics[path] = read_new_lines(path, self._metrics[path])
        for line in reversed(lines):
            latest = _metrics_of_line(line)
            if latest is not None:
                self.latest = latest
                return


def _metrics_of_line(line: bytes) -> StepMetrics | None:
    """One line of steps.jsonl; None for a torn one."""
    try:
        fields = json.loads(line)
        return StepMetrics(
            attempt=fields["attempt"], generation=fields["generation"], step=fields["step"], loss=fields.get("loss"),
            tokens_per_s=fields.get("tokens_per_s"), time=fields["time"],
        )  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return None


def progress_line(run: str, state: str, total: int, latest: StepMetrics | None) -> str:
    """`tiny-gpt-3  RUNNING  step 120/200 60%  loss 2.1130  81 000 tokens/s  attempt 1 generation 2`."""
    if latest is None:
        return f"{run}  {state}"
    share = f" {100 * latest.step // total}%" if total else ""
    speed = f"  {count(round(latest.tokens_per_s))} tokens/s" if isinstance(latest.tokens_per_s, (int, float)) else ""
    where = f"attempt {latest.attempt} generation {latest.generation}"
    return f"{run}  {state}  step {progress(latest.step, total)}{share}  loss {decimal(latest.loss)}{speed}  {where}"


def describe_event(event: Event) -> str | None:
    """What an event means to somebody who watches; None for what they need not see."""
    words = _DESCRIPTIONS.get(event.kind)
    if words is None:
        return None
    try:
        text = words(event.data)
    except (KeyError, TypeError, ValueError):
        return None  # written by another version: better silent than wrong
    where = f"attempt {event.attempt}" + (f" generation {event.generation}" if event.generation else "")
    return f"{where}: {text}" if text else None


def _exited(data: dict[str, Any]) -> str:
    code, signal = data.get("exit_code"), data.get("signal")
    if not signal and code in (ExitCode.FINISHED, ExitCode.STOPPED_AFTER_SAVE, ExitCode.RETRY):
        return ""  # RETRY is what peers of a dead rank end with
    how = data.get("reason") or (f"killed by signal {signal}" if signal else f"exit code {code}")
    return f"rank {data['rank']} on {data.get('node')} ended: {how}"


def _ended(data: dict[str, Any]) -> str:
    failure = data.get("failure")
    return f"ended at step {data['step']}: {failure['reason'] if failure else data['reason']}"


def _saved(data: dict[str, Any]) -> str:
    stall = data.get("stall")
    waited = f", training waited {1000 * stall:.0f} ms" if stall else ""
    return f"saved step {data['step']} ({size(data['bytes'])}, {_s(data)}{waited})"


def _failed(data: dict[str, Any]) -> str:
    what = f"copying step {data['step']} to {data['tier']}" if data.get("tier") else f"saving step {data['step']}"
    return f"{what} failed: {data['reason']}"


def _incident(data: dict[str, Any]) -> str:
    if data.get("withdrawn"):
        return f"taken for hung, but it went on: {data['reason']}"
    return f"hung: {data['reason']}; evidence in {data['evidence']}"


def _straggler(data: dict[str, Any]) -> str:
    who = f"rank {data['rank']} on {data['node']}"
    if data.get("over"):
        return f"{who} is as fast as its peers again"
    return f"{who} is slow: {data['section']} takes {data['ratio']:.2f} x its peers' time"


def _whom(data: dict[str, Any]) -> str:
    return f"rank {data['rank']}" if data.get("rank") is not None else str(data.get("node", ""))


def _node(data: dict[str, Any]) -> str:
    return str(data.get("name") or (f"node {data['node']}" if "node" in data else "a node"))


def _s(data: dict[str, Any]) -> str:
    return f"{data['seconds']:.1f} s"


def _of(data: dict[str, Any]) -> str:
    """In which tier, where there is more than one."""
    tier = data.get("tier")
    return "" if not tier else " in memory" if tier == "memory" else f" in {tier}"


def _source(data: dict[str, Any]) -> str:
    """What a restart in place has loaded needs no disk; where else it lay is worth telling on a disk of the node."""
    return "memory, " if data.get("tier") == "memory" else ""


_DESCRIPTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    EventKind.ATTEMPT_STARTED: lambda d: f"started, job {d['job_id']} on {','.join(d['nodes'])}, {d['world']} ranks",
    EventKind.AGENT_LOST: lambda d: f"lost the agent of {d['name']}: {d['reason']}",
    EventKind.PREFLIGHT: lambda d: "" if d["ok"] else f"{_node(d)} failed its checks: {d['reason']}",
    EventKind.GENERATION_STARTED: lambda d: f"ranks start ({d['world']})",
    EventKind.GENERATION_FIRST_STEP: lambda d: f"trains: step {d['step']} done after {d['seconds']:.1f} s",
    EventKind.GENERATION_ENDED: _ended,
    EventKind.RANK_EXITED: _exited,
    EventKind.DECISION: lambda d: f"decision: {d['action']} ({d['reason']})",
    EventKind.INCIDENT: _incident,
    EventKind.STRAGGLER: _straggler,
    EventKind.BATCH_SKIPPED: lambda d: f"the batch of step {d['step']} is left out from now on: {d['reason']}",
    EventKind.SPARE_USED: lambda d: f"{d['name']} takes the place of {d['instead']}: {d['reason']}",
    EventKind.DRILL: lambda d: f"drill: {d['kind']} {_whom(d)} at step {d['step']}",
    EventKind.STOP_REQUESTED: lambda d: f"asked to stop: {d['reason']}",
    EventKind.STOP_AGREED: lambda d: f"ranks stop together after step {d['step']}: {d['reason']}",
    EventKind.CHECKPOINT_COMMITTED: _saved,
    EventKind.CHECKPOINT_FAILED: _failed,
    EventKind.CHECKPOINT_REFUSED: lambda d: f"checkpoint {d['step']}{_of(d)} is not used: {d['reason']}",
    EventKind.CHECKPOINT_RESTORED: lambda d: f"resumed from {_source(d)}step {d['step']}",
    EventKind.CHECKPOINT_INCOMPLETE: lambda d: f"checkpoint {d['step']} does not hold everything: {d['reason']}",
    EventKind.CHECKPOINT_SKIPPED: lambda d: f"step {d['step']} is not saved: {d['reason']}",
    EventKind.CHECKPOINT_RETRIED: lambda d: f"saving step {d['step']} is tried again: {d['reason']}",
    EventKind.CHECKPOINT_DOUBTED: lambda d: f"step {d['step']} is saved, but looks wrong: {d['reason']}",
    EventKind.CHECKPOINT_FLUSHED: lambda d: f"copied step {d['step']} to {d['tier']} ({size(d['bytes'])}, {_s(d)})",
    EventKind.CHECKPOINT_STUCK: lambda d: f"saving step {d['step']} hangs, training goes on: {d['reason']}",
    EventKind.CHECKPOINT_SUSPECT: lambda d: f"checkpoint {d['step']} is suspect: {d['reason']}",
    EventKind.CHECKPOINT_SEEN: lambda d: f"the program has a checkpoint of step {d['step']} ({size(d['bytes'])})",
    EventKind.CHECKPOINT_SET_ASIDE: lambda d: f"checkpoint {d['step']} is now {d['path']}: {d['reason']}",
    EventKind.CHECKPOINT_CADENCE: lambda d: f"saves every {count(d['steps'])} steps from now on: {d['reason']}",
    EventKind.ATTEMPT_ENDED: lambda d: f"{d['result']}: {d['reason']}",
}
