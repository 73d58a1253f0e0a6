"""heartbeat.json: shows once a second that the coordinator is alive, to processes that can only read files."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from checkpointing.storage.durable import dump_line
from checkpointing.storage.reserved_file import replace_or_overwrite
from trainer.contract.messages.agents import ProgressReport
from trainer.contract.secrets.secret_redaction import in_use


class Stage(StrEnum):
    """What the coordinator is doing."""

    JOINING = "joining"  # it waits for agents and their preflight
    WARMING = "warming"  # it waits for fork servers
    RUNNING = "running"  # ranks run
    CLEARING = "clearing"  # it kills what is left of a generation
    ENDED = "ended"  # the outcome is written


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """One reading; `time` is seconds since the epoch on the coordinator's node."""

    seq: int
    time: float
    attempt: int
    job_id: str
    generation: int
    step: int
    total_steps: int
    loss: float | str | None
    phase: str
    saved_step: int
    nodes: list[str]
    state: str  # a Stage
    saves_failing: str = ""  # since when and why; empty while they work

    def write(self, path: Path) -> None:
        line = in_use().record(dump_line({"schema": "orch.heartbeat/1", **asdict(self)}))
        replace_or_overwrite(path, f"{line}\n".encode(errors="backslashreplace"))


LONGEST_TROUBLE = 500
"""Characters of what ranks say of their saves: the heartbeat must stay within the room that its file has."""


class AttemptProgress:
    """Merges what the agents report into one line; keeps the last known values between generations."""

    def __init__(self, attempt: int, job_id: str, clock: Callable[[], float]) -> None:
        self._attempt, self._job_id, self._clock, self._seq = attempt, job_id, clock, 0
        self.step = self.total = self.saved = 0
        self.loss: float | str | None = None
        self.phase = "init"
        self._saves: dict[int, str] = {}
        self.unsaved_bytes = 0  # of the checkpoint that could not be saved last

    @property
    def saves_failing(self) -> str:
        """Since when saves fail, and why; empty while they work."""
        return next((self._saves[rank] for rank in sorted(self._saves)), "")

    def note_saves(self, rank: int, trouble: str, size: int) -> None:
        """A rank says why saves of so many bytes fail. Rank 0 commits for all: what works for it works."""
        self.unsaved_bytes = size or self.unsaved_bytes
        if rank == 0:
            self._saves.clear()
        if trouble:
            self._saves[rank] = trouble[:LONGEST_TROUBLE]

    def merge(self, reports: Sequence[ProgressReport]) -> None:
        """Take in the newest report of every node, node rank 0's first; nodes that know no step yet do not count."""
        if not reports:
            return
        slowest = min(reports, key=lambda report: report.step)
        self.phase = slowest.phase or self.phase
        self.saved = max(self.saved, *(report.saved for report in reports))
        self.total = max(self.total, *(report.total for report in reports))
        if slowest.step > 0:
            self.step = slowest.step
            self.loss = self.loss if reports[0].loss is None else reports[0].loss

    def beat(self, *, generation: int, nodes: list[str], state: str) -> Heartbeat:
        self._seq += 1
        return Heartbeat(
            seq=self._seq,
            time=self._clock(),
            attempt=self._attempt,
            job_id=self._job_id,
            generation=generation,
            step=self.step,
            total_steps=self.total,
            loss=self.loss,
            phase=self.phase,
            saved_step=self.saved,
            nodes=nodes,
            state=state,
            saves_failing=self.saves_failing,
        )
