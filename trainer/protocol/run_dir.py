"""The run directory and the names of all its files.

Because of inode quotas, the ranks of a node share their files, except for logs. Nodes never share files, because NFS
loses lines if several hosts append to one file.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


def _entry(*parts: str) -> "cached_property[Path]":
    """Return a property with the path of an entry in the owner's folder, cached because controllers read it often."""
    return cached_property(lambda owner: owner.path.joinpath(*parts))


@dataclass(frozen=True)
class AttemptDir:
    """Folder `attempts/NNN` of one attempt (numbers count from 1)."""

    path: Path

    config = _entry("config.json")  # present if it differs from the submitted one
    run_config = _entry("run-config.json")  # the run's config, present if this attempt is smaller than the run
    code = _entry("code.json")  # the user's code that this attempt imported: a CodeRecord
    submission = _entry("submission")
    go = _entry("GO")
    requeued = _entry("requeued.json")  # present if this attempt continues in an earlier one's job: its log sizes
    coordinator = _entry("coordinator.json")
    outcome = _entry("outcome.json")
    heartbeat = _entry("heartbeat.json")
    ranks = _entry("ranks.json")  # progress of every rank: `trainer.protocol.rank_readings`
    skipped_batches = _entry("skipped.json")  # data positions that this attempt's rollbacks skip, with reasons
    command_memory = _entry("command.json")  # facts about a user's program that the next attempt needs
    restore_verdict = _entry("verdict.json")
    logs = _entry("logs")
    events = _entry("events")
    evidence = _entry("evidence")
    outcomes = _entry("outcomes")
    metrics = _entry("metrics", "steps.jsonl")
    validation = _entry("metrics", "validation.jsonl")  # one line per validation, in training order
    final = _entry("metrics", "final.json")  # summary of the finished run: step, loss, digest of the weights

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def run(self) -> "RunDir":
        return RunDir(self.path.parent.parent)

    def earlier_attempts(self) -> list["AttemptDir"]:
        """Return the run's earlier attempts that have a folder, oldest first."""
        return [attempt for attempt in self.run.all_attempts() if attempt.number < self.number]

    def incident(self, name: str) -> Path:
        """Return the evidence folder of one incident."""
        return self.evidence / name

    def last_flights(self, node: str, generation: int) -> Path:
        """Return the file with flight records of one node's ranks that exited with an exception, one line each."""
        return self.evidence / f"flights-{node}.g{generation:03d}.jsonl"

    def all_last_flights(self, generation: int) -> list[Path]:
        return sorted(self.evidence.glob(f"flights-*.g{generation:03d}.jsonl"))

    def watchdog_flight(self, generation: int) -> Path:
        """Return the path prefix of the pickled flight records of NCCL's watchdog; torch appends the rank."""
        return self.evidence / f"nccl.g{generation:03d}.rank-"

    def watchdog_flights(self, generation: int) -> list[tuple[int, Path]]:
        """Return the watchdog's flight records of one generation, each with its rank."""
        prefix = self.watchdog_flight(generation).name
        found = ((path.name.removeprefix(prefix), path) for path in sorted(self.evidence.glob(f"{prefix}*")))
        return [(int(rank), path) for rank, path in found if rank.isdecimal()]

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:05d}.log"

    def share_log(self, rank: int, others: Iterable[int]) -> None:
        """Make a rank's log that of other ranks too, since a launcher writes all their output to it. Raises OSError."""
        for other in others:
            with suppress(FileExistsError):
                self.rank_log(other).symlink_to(self.rank_log(rank).name)

    def output_log(self, rank: int) -> Path:
        """Return the log with a rank's output: its own, or that of a rank with which it shares one."""
        path = self.rank_log(rank)
        return path.with_name(os.readlink(path)) if path.is_symlink() else path

    def agent_log(self, node: int) -> Path:
        return self.logs / f"agent-{node:04d}.log"

    def work_log(self, node: str) -> Path:
        """Return a node's work log, with one line per step and rank as proof of training."""
        return self.path / "metrics" / f"work-{node}.jsonl"

    def work_logs(self) -> list[Path]:
        return sorted((self.path / "metrics").glob("work-*.jsonl"))

    def event_file(self, source: str) -> Path:
        return self.events / f"{source}.jsonl"

    def rank_events(self, node: str) -> Path:
        """Return the event file of one node's ranks."""
        return self.event_file(f"ranks-{node}")

    def rank_outcomes(self, node: str) -> Path:
        """Return the outcome file of one node's ranks, with one line per rank and generation."""
        return self.outcomes / f"ranks-{node}.jsonl"

    def all_rank_outcomes(self) -> list[Path]:
        return sorted(self.outcomes.glob("ranks-*.jsonl"))

    def error_file(self, rank: int, generation: int) -> Path:
        """Return the file in which torch's `@record` stores the exception of a command's rank."""
        return self.outcomes / f"error-rank-{rank:05d}.g{generation:03d}.json"

    def program_saves(self, node_rank: int) -> Path:
        """Return the file in which the ranks of one node list the checkpoints that their program has saved."""
        return self.outcomes / f"saves-node-{node_rank:04d}.jsonl"

    def rank_errors(self, node: str) -> Path:
        """Return the file with the collected errors of one node's ranks, one line each."""
        return self.outcomes / f"errors-{node}.jsonl"

    def agent_report(self, node: int) -> Path:
        """Return the report of an agent that exited without an order from its coordinator."""
        return self.outcomes / f"agent-{node:04d}.json"

    def agent_reports(self) -> list[Path]:
        """Return the existing agent reports, keyed by node."""
        return sorted(self.outcomes.glob("agent-*.json"))

    def make(self) -> None:
        """Create the folders of this attempt, private to the user."""
        for folder in (self.path, self.submission, self.logs, self.events, self.evidence, self.outcomes):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.metrics.parent.mkdir(mode=0o700, exist_ok=True)


@dataclass(frozen=True)
class RunDir:
    """Folder of one run below `cluster.root`."""

    path: Path
    known_as: Path | None = None  # the folder's own path, if `path` refers to it by a descriptor

    run = _entry("run.json")
    config = _entry("config.json")  # as submitted; an attempt may have its own (`attempt_config`)
    secrets = _entry("secrets.json")  # values of `env_from` and of webhooks, the only file of the run with secrets
    restore_test = _entry("restore_test.json")  # the restore order, present if this run is a restore test
    record = _entry("record.json")  # the registry's record, written on the controller side for `orch db rebuild`
    requests = _entry("requests")
    code = _entry("code")
    seals = _entry("seals")  # of a command's checkpoints: `trainer.protocol.checkpoint_seal`
    checkpoints = _entry("checkpoints")
    attempts = _entry("attempts")

    @property
    def own_path(self) -> Path:
        """Return the path that users and other processes use for this folder."""
        return self.known_as or self.path

    @property
    def name(self) -> str:
        return self.own_path.name

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.attempts / f"{number:03d}")

    def attempt_config(self, attempt: int) -> Path:
        """Return the attempt's own config if present, else the submitted config."""
        own = self.attempt(attempt).config
        return own if own.exists() else self.config

    def attempt_run_config(self, attempt: int) -> Path:
        """Return the run's full-size config at the start of this attempt, before any reduction in its nodes."""
        base = self.attempt(attempt).run_config
        return base if base.exists() else self.attempt_config(attempt)

    def all_attempts(self) -> list[AttemptDir]:
        """Return the attempts that have a folder, oldest first."""
        if not self.attempts.is_dir():
            return []
        numbered = [entry for entry in os.listdir(self.attempts) if entry.isdigit()]
        return [AttemptDir(self.attempts / entry) for entry in sorted(numbered, key=int)]

    @property
    def newest_attempt(self) -> int:
        """Return the number of the newest attempt that has a folder, or 0."""
        return max((attempt.number for attempt in self.all_attempts()), default=0)

    def make(self) -> None:
        """Create the run's folders. Raises FileExistsError if a folder inside the run folder exists."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        for folder in (self.requests, self.checkpoints, self.attempts):
            folder.mkdir(mode=0o700)
