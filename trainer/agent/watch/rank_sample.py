"""One rank as its agent sees it: what the coordinator judges by. Ages, not times: clocks of nodes never meet."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.contract.messages.agents import SampleRow
from trainer.contract.ranks.stage_activity import AWAITED_SENDS, RECEIVES, Activity, Moment, SentMessages, moment_of

_WAITS = (*RECEIVES, *AWAITED_SENDS, Activity.WAIT_IN_RING)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSample:
    """What is known of one rank at the moment its agent looked."""

    rank: int
    node: str
    step: int = 0
    phase: str = "init"
    first: bool = True  # it has not finished a step in this generation
    collective: int = 0  # collectives it had begun when its cell was written last
    age: float = 0.0  # seconds since its cell was written
    alive: float = 0.0  # seconds since its last sign of life: the cell, CPU time, bytes read or written
    state: str = "R"  # of its training thread as /proc says: R S D T (stopped) t (traced) Z; X: gone
    lock: float = 0.0  # seconds for which nothing could run in its interpreter; 0: not known
    ended: bool = False
    moment: Moment | None = None  # of a pipeline: what it does with which micro-batch
    sent: SentMessages | None = None  # and how far it has come with sending

    @property
    def waits_for_message(self) -> bool:
        """Whether another stage of its pipeline, or another rank of its ring, holds it up."""
        return self.moment is not None and self.moment.activity in _WAITS

    def to_row(self) -> SampleRow:
        """For the wire, without the node's name, which the coordinator knows, and without what is of pipelines."""
        return (
            self.rank, self.step, self.phase, self.first, self.collective, self.age, self.alive, self.state, self.lock,
            self.ended,
        )  # fmt: skip

    @classmethod
    def from_row(cls, row: SampleRow, node: str, stages: Sequence[int] = ()) -> "RankSample":
        """`stages`: of a rank of a pipeline, its row in a report. Raises ValueError for a time that cannot be."""
        rank, step, phase, first, collective, age, alive, state, lock, ended = row
        if age < 0 or alive < 0 or lock < 0:
            raise ValueError(f"a sample of rank {rank} in the future")
        return cls(
            rank=rank, node=node, step=step, phase=phase, first=first, collective=collective, age=age, alive=alive,
            state=state, lock=lock, ended=ended,
            moment=moment_of(*stages[1:4]) if len(stages) >= 4 else None, sent=SentMessages.from_row(stages[4:]),
        )  # fmt: skip
