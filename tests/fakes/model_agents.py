"""Agents and ranks of one simulated job: they obey GO, train, save, beat and write an outcome, in real files."""

import json

from checkpointing.format.commit import checkpoint_name
from orchestrator.scheduler.interface import JobSpec
from tests.fakes.model_clock import FakeClock
from trainer.protocol.config import load
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.outcome import AgentEnd, AgentReport, AttemptOutcome, AttemptResult, ExitCode, Failure
from trainer.protocol.launch_token import LaunchToken, holds
from trainer.protocol.requests import RequestKind, pending
from trainer.protocol.run_dir import RunDir

GO_TIMEOUT = 120.0
STEP_SECONDS = 1.0


class ModelAgents:
    """Processes of one attempt; `exit_code` is set once they have exited, `dead` once they have been killed."""

    def __init__(self, spec: JobSpec, job_id: str, nodes: tuple[str, ...], restarts: int, clock: FakeClock) -> None:
        self.spec, self.job_id, self.nodes, self.restarts, self.clock = spec, job_id, nodes, restarts, clock
        self.folder = RunDir(spec.run_dir)
        self.place = self.folder.attempt(spec.attempt)
        self.began = clock.now
        self.token: LaunchToken | None = None
        self.step_done = 0
        self.exit_code: int | None = None
        self.dead = False
        self.frozen = False  # stopped (SIGSTOP, stuck in the kernel): it neither acts nor reports
        self.commits: list[tuple[float, str]] = []
        self.trained: list[tuple[float, int]] = []
        self.saves_failing = ""
        self._seq = 0
        self._events: EventLog | None = None

    @property
    def training(self) -> bool:
        return self.token is not None and self.exit_code is None and not self.dead and not self.frozen

    def step(self, seconds: float) -> None:
        """Advance by some seconds."""
        if self.dead or self.frozen or self.exit_code is not None:
            return
        if self.restarts > 0 and not self.spec.expedite:
            self.exit_code = ExitCode.RETRY
        elif self.token is None:
            self._wait_for_go()
        else:
            self._train(seconds)

    def _wait_for_go(self) -> None:
        places = self.folder.all_attempts() if self.restarts else [self.place]
        for place in places:
            try:
                token = LaunchToken.read(place.go)
            except (OSError, ValueError):
                continue
            if (token.attempt, token.job_id, token.restarts) == (place.number, self.job_id, self.restarts):
                self.token, self.config, self.place = token, load(self.folder, place.number), place
                self._begin()
                return
        if self.clock.now - self.began > GO_TIMEOUT:
            self.exit_code = ExitCode.RETRY

    def _begin(self) -> None:
        assert self.token is not None
        self._events = EventLog(self.place.event_file("agent-0000"), "agent-0000", self.place.number, clock=self.clock)
        self._events.generation = 1
        self._say(EventKind.ATTEMPT_STARTED, job_id=self.job_id, nodes=list(self.nodes), world=2)
        self._say(EventKind.GENERATION_STARTED, world=2, nodes=list(self.nodes))
        newest = max(self.token.checkpoints, default=None)
        if newest is not None:
            self.step_done = int(newest.split("-")[1].partition(".")[0])
            self._say(EventKind.CHECKPOINT_RESTORED, step=self.step_done, name=newest, seconds=0.1)
        self._beat()

    def _say(self, kind: EventKind, **data: object) -> None:
        assert self._events is not None
        self._events.write(kind, **data)

    def _train(self, seconds: float) -> None:
        if not self._fence():
            self.exit_code = ExitCode.RETRY
            return
        for _ in range(max(1, int(seconds / STEP_SECONDS))):
            self.step_done += 1
            self.trained.append((self.clock.now, self.step_done))
            if self.step_done % max(1, self.config.checkpoint.every) == 0:
                self._save()
            if self.step_done >= self.config.train.steps:
                self._save()
                self._end(AttemptResult.FINISHED, "all steps are trained", ExitCode.FINISHED)
                break
        self._beat()
        if self.exit_code is None:
            self._listen()

    def _listen(self) -> None:
        for request in pending(self.folder.requests, self.place.number, set()):
            if request.kind is RequestKind.STOP:
                self._save()
                self._end(AttemptResult.STOPPED, request.reason, ExitCode.STOPPED_AFTER_SAVE)
                return

    def fail(self, failure: Failure) -> None:
        """End the attempt with an outcome that names its cause."""
        self._end(AttemptResult.FAILED, failure.reason, ExitCode.RETRY, failure)

    def lose_coordinator(self) -> None:
        """Let another agent exit because the coordinator is silent; its report reaches the controller as a file."""
        AgentReport(
            node=1, name="other", end=AgentEnd.SILENT, time=self.clock.now,
            reason="other lost the coordinator: it was silent for 60 s",
        ).write(self.place.agent_report(1))  # fmt: skip

    def _end(self, result: AttemptResult, reason: str, code: ExitCode, failure: Failure | None = None) -> None:
        outcome = AttemptOutcome(
            attempt=self.place.number, job_id=self.job_id, result=result, reason=reason, exit_code=code,
            step=self.step_done, generations=1, started_at=self.began, ended_at=self.clock.now, failure=failure,
        )  # fmt: skip
        outcome.write(self.place.outcome)
        self.exit_code = code

    def close(self) -> None:
        """Close the event log."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def _fence(self) -> bool:
        assert self.token is not None
        return holds(self.place.go, self.token)

    def _save(self) -> None:
        assert self.token is not None
        name = checkpoint_name(self.step_done, self.place.number, self.token.nonce)
        path = self.folder.checkpoints / name
        if path.exists() or not self._fence():
            return
        path.mkdir()
        (path / "COMMIT").write_text("{}")
        self.commits.append((self.clock.now, name))
        self._say(EventKind.CHECKPOINT_COMMITTED, step=self.step_done, name=name, bytes=10, seconds=0.1)

    def _beat(self) -> None:
        self._seq += 1
        beat = {"seq": self._seq, "step": self.step_done, "loss": 1.0 / (1 + self.step_done)}
        beat["saves_failing"] = self.saves_failing
        self.place.heartbeat.write_text(json.dumps(beat))
