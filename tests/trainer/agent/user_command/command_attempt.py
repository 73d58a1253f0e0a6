"""One attempt of a run of a user's program, driven without processes."""

import asyncio
import time
from pathlib import Path
from typing import Any

from trainer.agent.attempt_state.attempt_state import GenerationState
from trainer.agent.attempt_state.published_files import AttemptProgress
from trainer.agent.ladder.attempt_history import AttemptHistory
from trainer.agent.ladder.command_failures import CommandPast
from trainer.agent.ladder.in_job_policy import Situation, decide
from trainer.agent.user_command.command_run import CommandRun
from trainer.protocol.command_progress import CommandCheckpointsConfig, CommandProgressConfig
from trainer.protocol.config import JobConfig
from trainer.protocol.events import EventKind, EventLog, read_events
from trainer.protocol.failures.decision import Action, Decision
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.run_dir import RunDir

TORN = RankEnd(
    rank=0, node="n0", at=0.0, step=None, exit_code=1, exception="EOFError", message="Ran out of input",
    lines=("Traceback (most recent call last):", "    state = torch.load(path)", "EOFError: Ran out of input"),
)  # fmt: skip


BUG = RankEnd(rank=0, node="n0", at=0.0, step=None, exit_code=1, exception="KeyError", message="lr")


class Attempt:
    """One attempt of a run of a program; every generation of it is over when `fails` returns."""

    def __init__(
        self, root: Path, number: int, restarts: int = 5, *, pattern: str = "checkpoint-*", path: str = "out",
        progress: str = "", adapter: str = "auto",
    ) -> None:  # fmt: skip
        self.run = RunDir(root / "run-1")
        if number == 1:
            self.run.make()
        self.dir = self.run.attempt(number)
        self.dir.make()
        checkpoints = CommandCheckpointsConfig(path=str(root / path) if path else "", pattern=pattern, adapter=adapter)
        self.progress = AttemptProgress(number, "1", lambda: 0.0)
        self.restarts, self.budget, self.number = 0, restarts, 0
        events = EventLog(self.dir.event_file("coordinator"), "coordinator", number)
        config = JobConfig(
            command=("python", "train.py"), checkpoints=checkpoints, progress=CommandProgressConfig(pattern=progress)
        )
        self.program = CommandRun(self.run, self.dir, config, events, self.progress)

    def fails(self, end: RankEnd = TORN, while_it_ran: Any = None, **generation: Any) -> Decision:
        return asyncio.run(self._fails(end, while_it_ran, **generation))

    async def _fails(self, end: RankEnd, while_it_ran: Any, *, cleared: bool = True) -> Decision:
        self.number += 1
        now = GenerationState(number=self.number, started=100.0, first_failure=105.0)
        await self.program.start_generation(self.number)
        if while_it_ran is not None:
            while_it_ran()
            await self.program.check(GenerationState(number=self.number, started=100.0, first_failure=float("inf")))
        situation = Situation(
            world=1, ends=(end,), since_failure=5.0, ran_for=5.0, history=AttemptHistory(restarts=self.restarts),
            budget=self.budget, backoff=(10.0, 900.0), command=self.program.past(),
        )  # fmt: skip
        decision = decide(situation)
        self.restarts += decision.action is Action.RESTART
        await self.program.end_generation(decision, now, cleared=cleared)
        return decision

    def stops(self, seconds: float = 60.0) -> None:
        """One more generation, which a preemption ends."""
        self.number += 1
        now = GenerationState(number=self.number, started=time.monotonic() - seconds)
        asyncio.run(self.program.start_generation(self.number))
        asyncio.run(self.program.end_generation(Decision(action=Action.STOP, reason="preemption"), now, cleared=True))

    @property
    def past(self) -> CommandPast:
        past = self.program.past()
        assert past is not None
        return past

    def told(self, kind: EventKind) -> list[dict[str, Any]]:
        events, _ = read_events(self.dir.event_file("coordinator"))
        return [event.data for event in events if event.kind == kind]


def save(out: Path, step: int, text: str = "{}") -> None:
    (out / f"checkpoint-{step}").mkdir()
    (out / f"checkpoint-{step}" / "state.json").write_text(text)


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def save_ranks(out: Path, step: int, torn: int | None = None) -> None:
    for rank in (0, 1):
        (out / f"step{step}-rank{rank}.json").write_text('{"tor' if rank == torn else "{}")
