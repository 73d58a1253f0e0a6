"""What the agents report of training, merged into one line: what the heartbeat says."""

from collections.abc import Callable, Sequence

from checkpointing.storage.durable import number
from trainer.contract.heartbeat import LONGEST_TROUBLE, Heartbeat
from trainer.contract.messages.agents import ProgressReport


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
            loss=None if self.loss is None else number(self.loss),
            phase=self.phase,
            saved_step=self.saved,
            nodes=nodes,
            state=state,
            saves_failing=self.saves_failing,
        )
