"""The run directory: the only place that knows what its files are called.

Inode quotas are real: apart from logs, the ranks of a node share their files. Nodes never do: appends of several hosts
to one file lose lines on NFS.
"""

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class AttemptDir:
    """The folder `attempts/NNN` of one attempt (numbers count from 1)."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def run(self) -> "RunDir":
        return RunDir(self.path.parent.parent)

    @property
    def config(self) -> Path:
        """The config of this attempt, where it is not the one that the run was submitted with."""
        return self.path / "config.json"

    @property
    def run_config(self) -> Path:
        """The run's config that this attempt's was derived from, where the attempt is smaller than its run."""
        return self.path / "run-config.json"

    @property
    def code(self) -> Path:
        """The user's code that this attempt imported: `trainer.contract.user_code.code_record`."""
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
        """The evidence bundle of one incident."""
        return self.evidence / name

    def last_flights(self, node: str, generation: int) -> Path:
        """The flight records of one node's ranks that an exception ended, one line each."""
        return self.evidence / f"flights-{node}.g{generation:03d}.jsonl"

    def all_last_flights(self, generation: int) -> list[Path]:
        """The files of one generation, those of older versions (one for each rank) included."""
        wanted = (f"flight-rank-*.g{generation:03d}.json", f"flights-*.g{generation:03d}.jsonl")
        return [path for pattern in wanted for path in sorted(self.evidence.glob(pattern))]

    def watchdog_flight(self, generation: int) -> Path:
        """Where NCCL's own watchdog leaves the record of a rank, a pickle: torch adds the rank to the name."""
        return self.evidence / f"nccl.g{generation:03d}.rank-"

    def watchdog_flights(self, generation: int) -> list[tuple[int, Path]]:
        """Those of one generation, with their ranks."""
        prefix = self.watchdog_flight(generation).name
        found = ((path.name.removeprefix(prefix), path) for path in sorted(self.evidence.glob(f"{prefix}*")))
        return [(int(rank), path) for rank, path in found if rank.isdecimal()]

    @property
    def ranks(self) -> Path:
        """The progress of every rank while the attempt runs: see `trainer.contract.rank_readings`."""
        return self.path / "ranks.json"

    @property
    def skipped(self) -> Path:
        """Positions in the data that this attempt's rollbacks skip, with the reasons."""
        return self.path / "skipped.json"

    @property
    def outcomes(self) -> Path:
        return self.path / "outcomes"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics" / "steps.jsonl"

    @property
    def validation(self) -> Path:
        """One line for every validation, in the order of the steps that were trained."""
        return self.path / "metrics" / "validation.jsonl"

    @property
    def final(self) -> Path:
        """What the finished run ended with: step, loss, digest of the weights."""
        return self.path / "metrics" / "final.json"

    @property
    def restore_verdict(self) -> Path:
        """What a restore test has found."""
        return self.path / "verdict.json"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:05d}.log"

    def work_log(self, node: str) -> Path:
        """One line per step and rank of this node: the workers' own proof of which rank trained what, when."""
        return self.path / "metrics" / f"work-{node}.jsonl"

    def work_logs(self) -> list[Path]:
        """The work logs that are there; those of older versions have one rank each."""
        return sorted((self.path / "metrics").glob("work-*.jsonl"))

    def agent_log(self, node: int) -> Path:
        return self.logs / f"agent-{node:04d}.log"

    def event_file(self, source: str) -> Path:
        return self.events / f"{source}.jsonl"

    def rank_events(self, node: str) -> Path:
        """The events of one node's ranks."""
        return self.event_file(f"ranks-{node}")

    def rank_outcomes(self, node: str) -> Path:
        """How the ranks of one node ended, one line for each rank and generation."""
        return self.outcomes / f"ranks-{node}.jsonl"

    def all_rank_outcomes(self) -> list[Path]:
        """The files that are there; those of older versions have one rank and generation each."""
        return [path for pattern in ("rank-*.json", "ranks-*.jsonl") for path in sorted(self.outcomes.glob(pattern))]

    @property
    def command_memory(self) -> Path:
        """What the next attempt must know about a user's own program."""
        return self.path / "command.json"

    def error_file(self, rank: int, generation: int) -> Path:
        """Where torch's `@record` writes the exception that ended a command's rank, until its agent has read it."""
        return self.outcomes / f"error-rank-{rank:05d}.g{generation:03d}.json"

    def rank_errors(self, node: str) -> Path:
        """The error files of one node's ranks, one line each."""
        return self.outcomes / f"errors-{node}.jsonl"

    def agent_report(self, node: int) -> Path:
        """Why the agent of a node ended without an order of its coordinator."""
        return self.outcomes / f"agent-{node:04d}.json"

    def agent_reports(self) -> list[Path]:
        """Those that are there, by node."""
        return sorted(self.outcomes.glob("agent-*.json"))

    def make(self) -> None:
        """Create the folders of this attempt, private to the user."""
        for folder in (self.path, self.submission, self.logs, self.events, self.evidence, self.outcomes):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.metrics.parent.mkdir(mode=0o700, exist_ok=True)


@dataclass(frozen=True)
class RunDir:
    """The folder of one run below `cluster.root`."""

    path: Path
    label: str = ""  # the run's name, where the folder is reached under another one (by a descriptor)

    @property
    def name(self) -> str:
        return self.label or self.path.name

    @property
    def run(self) -> Path:
        return self.path / "run.json"

    @property
    def config(self) -> Path:
        """The config that the run was submitted with; an attempt may have another one (`config_of`)."""
        return self.path / "config.json"

    @property
    def secrets(self) -> Path:
        """The values of `env_from`, and of webhooks: the only file of the run that has secrets."""
        return self.path / "secrets.json"

    @property
    def restore_test(self) -> Path:
        """What this run is to restore, where it is a restore test."""
        return self.path / "restore_test.json"

    @property
    def record(self) -> Path:
        """What the registry knows of this run, written by the controller side: `orch db rebuild` reads it."""
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

    @cached_property  # a controller asks thousands of times in a pass
    def attempts(self) -> Path:
        return self.path / "attempts"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.attempts / f"{number:03d}")

    def config_of(self, attempt: int) -> Path:
        """The config of this attempt: its own, or the one that the run was submitted with."""
        own = self.attempt(attempt).config
        return own if own.exists() else self.config

    def run_config_of(self, attempt: int) -> Path:
        """The config of the run when this attempt was begun: its own, but for an attempt that is smaller."""
        base = self.attempt(attempt).run_config
        return base if base.exists() else self.config_of(attempt)

    def all_attempts(self) -> list[AttemptDir]:
        """Attempts that have a folder, oldest first."""
        if not self.attempts.is_dir():
            return []
        numbered = [entry for entry in os.listdir(self.attempts) if entry.isdigit()]
        return [AttemptDir(self.attempts / entry) for entry in sorted(numbered, key=int)]

    @property
    def newest_attempt(self) -> int:
        """The number of the newest attempt that has a folder; 0 without any."""
        return max((attempt.number for attempt in self.all_attempts()), default=0)

    def make(self) -> None:
        """Create the run's folders; those in the run folder must be new (FileExistsError)."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        for folder in (self.requests, self.checkpoints, self.attempts):
            folder.mkdir(mode=0o700)
