"""The run directory and the names of all its files.

Because of inode quotas, the ranks of a node share their files, except for logs. Nodes never share files: appends by
several hosts to one file lose lines on NFS.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class AttemptDir:
    """Folder `attempts/NNN` of one attempt (numbers count from 1)."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def run(self) -> "RunDir":
        return RunDir(self.path.parent.parent)

    @property
    def config(self) -> Path:
        """Return the config of this attempt, present if it differs from the submitted one."""
        return self.path / "config.json"

    @property
    def run_config(self) -> Path:
        """Return the run's config that this attempt's was derived from, present in attempts smaller than the run."""
        return self.path / "run-config.json"

    @property
    def code(self) -> Path:
        """Return the record of the user's code that this attempt imported: `trainer.protocol.user_code.code_record`."""
        return self.path / "code.json"

    @property
    def submission(self) -> Path:
        return self.path / "submission"

    @property
    def go(self) -> Path:
        return self.path / "GO"

    @property
    def coordinator(self) -> Path:
        return self.path / "coordinator.json"

    @property
    def outcome(self) -> Path:
        return self.path / "outcome.json"

    @property
    def heartbeat(self) -> Path:
        return self.path / "heartbeat.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def evidence(self) -> Path:
        return self.path / "evidence"

    def incident(self, name: str) -> Path:
        """Return the evidence bundle of one incident."""
        return self.evidence / name

    def last_flights(self, node: str, generation: int) -> Path:
        """Return the flight records of one node's ranks that ended with an exception, one line each."""
        return self.evidence / f"flights-{node}.g{generation:03d}.jsonl"

    def all_last_flights(self, generation: int) -> list[Path]:
        """Return the flight record files of one generation, including those of older versions (one per rank)."""
        wanted = (f"flight-rank-*.g{generation:03d}.json", f"flights-*.g{generation:03d}.jsonl")
        return [path for pattern in wanted for path in sorted(self.evidence.glob(pattern))]

    def watchdog_flight(self, generation: int) -> Path:
        """Return the path prefix of the pickled flight records of NCCL's watchdog; torch appends the rank."""
        return self.evidence / f"nccl.g{generation:03d}.rank-"

    def watchdog_flights(self, generation: int) -> list[tuple[int, Path]]:
        """Return the watchdog's flight records of one generation with their ranks."""
        prefix = self.watchdog_flight(generation).name
        found = ((path.name.removeprefix(prefix), path) for path in sorted(self.evidence.glob(f"{prefix}*")))
        return [(int(rank), path) for rank, path in found if rank.isdecimal()]

    @property
    def ranks(self) -> Path:
        """Return the file with the progress of every rank, see `trainer.protocol.rank_readings`."""
        return self.path / "ranks.json"

    @property
    def skipped_batches(self) -> Path:
        """Return the file with the data positions that this attempt's rollbacks skip, with reasons."""
        return self.path / "skipped.json"

    @property
    def outcomes(self) -> Path:
        return self.path / "outcomes"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics" / "steps.jsonl"

    @property
    def validation(self) -> Path:
        """Return the file with one line per validation, in training order."""
        return self.path / "metrics" / "validation.jsonl"

    @property
    def final(self) -> Path:
        """Return the summary of the finished run: step, loss, digest of the weights."""
        return self.path / "metrics" / "final.json"

    @property
    def restore_verdict(self) -> Path:
        """Return the verdict of a restore test."""
        return self.path / "verdict.json"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:05d}.log"

    def work_log(self, node: str) -> Path:
        """Return the work log of a node: one line per step and rank, written by the workers as proof of training."""
        return self.path / "metrics" / f"work-{node}.jsonl"

    def work_logs(self) -> list[Path]:
        """Return the existing work logs; those of older versions have one rank each."""
        return sorted((self.path / "metrics").glob("work-*.jsonl"))

    def agent_log(self, node: int) -> Path:
        return self.logs / f"agent-{node:04d}.log"

    def event_file(self, source: str) -> Path:
        return self.events / f"{source}.jsonl"

    def rank_events(self, node: str) -> Path:
        """Return the events of one node's ranks."""
        return self.event_file(f"ranks-{node}")

    def rank_outcomes(self, node: str) -> Path:
        """Return the outcomes of one node's ranks, one line per rank and generation."""
        return self.outcomes / f"ranks-{node}.jsonl"

    def all_rank_outcomes(self) -> list[Path]:
        """Return the existing outcome files; those of older versions have one rank and generation each."""
        return [path for pattern in ("rank-*.json", "ranks-*.jsonl") for path in sorted(self.outcomes.glob(pattern))]

    @property
    def command_memory(self) -> Path:
        """Return the file with facts about a user's program that the next attempt needs."""
        return self.path / "command.json"

    def error_file(self, rank: int, generation: int) -> Path:
        """Return the file where torch's `@record` writes the exception of a command's rank, for its agent to read."""
        return self.outcomes / f"error-rank-{rank:05d}.g{generation:03d}.json"

    def rank_errors(self, node: str) -> Path:
        """Return the collected error files of one node's ranks, one line each."""
        return self.outcomes / f"errors-{node}.jsonl"

    def agent_report(self, node: int) -> Path:
        """Return the report of an agent that ended without an order from its coordinator."""
        return self.outcomes / f"agent-{node:04d}.json"

    def agent_reports(self) -> list[Path]:
        """Return the existing agent reports, by node."""
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
    known_as: Path | None = None  # the folder's own path, if `path` is a different path to it (a descriptor)

    @property
    def own_path(self) -> Path:
        """Return the path by which people and other processes know this folder."""
        return self.known_as or self.path

    @property
    def name(self) -> str:
        return self.own_path.name

    @property
    def run(self) -> Path:
        return self.path / "run.json"

    @property
    def config(self) -> Path:
        """Return the config that the run was submitted with; an attempt may have its own (`attempt_config`)."""
        return self.path / "config.json"

    @property
    def secrets(self) -> Path:
        """Return the file with the values of `env_from` and of webhooks, the only file of the run with secrets."""
        return self.path / "secrets.json"

    @property
    def restore_test(self) -> Path:
        """Return the restore order, present if this run is a restore test."""
        return self.path / "restore_test.json"

    @property
    def record(self) -> Path:
        """Return the registry's record of this run, written on the controller side for `orch db rebuild`."""
        return self.path / "record.json"

    @property
    def requests(self) -> Path:
        return self.path / "requests"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @cached_property  # a controller reads it thousands of times per pass
    def attempts(self) -> Path:
        return self.path / "attempts"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.attempts / f"{number:03d}")

    def attempt_config(self, attempt: int) -> Path:
        """Return the config of this attempt: its own if present, else the submitted one."""
        own = self.attempt(attempt).config
        return own if own.exists() else self.config

    def attempt_run_config(self, attempt: int) -> Path:
        """Return the run's full-size config at the start of this attempt, before any reduction in nodes."""
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
        """Create the run's folders; raises FileExistsError if one inside the run folder exists."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        for folder in (self.requests, self.checkpoints, self.attempts):
            folder.mkdir(mode=0o700)
