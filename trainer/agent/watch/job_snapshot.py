"""What the coordinator knows of all ranks of a generation: agents report changes, and ages grow with time."""

import heapq
from bisect import insort
from collections.abc import Mapping

from trainer.agent.watch.hang_limits import HALTED
from trainer.agent.watch.rank_sample import RankSample
from trainer.contract.messages.agents import ProgressReport


class JobSnapshot:
    """One generation: the newest sample of every rank, with its age."""

    def __init__(self, started: float, world: int) -> None:
        self._world = world
        self._seen: dict[int, tuple[float, RankSample]] = {}
        self._order: list[int] = []  # the ranks that were seen, sorted
        self.moved = started
        """When any rank moved last, on the coordinator's clock."""
        self.halted: set[int] = set()
        """Ranks whose process nobody may be waiting for, by their newest samples."""
        self._p99: dict[str, dict[str, float]] = {}  # phase -> node -> seconds

    def add_report(self, report: ProgressReport, node: str, now: float) -> None:
        """Take in one agent's report; raises ValueError when it tells what cannot be."""
        stages = {row[0]: row for row in report.stages if row}
        for row in report.samples:
            sample = RankSample.from_row(row, node, stages.get(row[0], ()))
            if not 0 <= sample.rank < self._world:
                raise ValueError(f"there is no rank {sample.rank}")
            if sample.rank not in self._seen:
                insort(self._order, sample.rank)
            self._seen[sample.rank] = (now, sample)
            if not sample.ended:
                self.moved = max(self.moved, now - sample.age)
            if sample.state in HALTED and not sample.ended:
                self.halted.add(sample.rank)
            else:
                self.halted.discard(sample.rank)
        for phase, seconds in report.p99.items():
            self._p99.setdefault(phase, {})[node] = seconds

    def at(self, now: float) -> list[RankSample]:
        """Every rank that has been seen, by number."""
        seen = map(self._seen.__getitem__, self._order)
        return [_aged(sample, max(0.0, now - heard)) for heard, sample in seen]

    def worst(self, now: float, most: int, ratios: Mapping[int, float]) -> list[RankSample]:
        """As many ranks: those of the largest `ratios`, then those that have stood still longest."""
        if len(self._seen) <= most:
            return self.at(now)

        def still(rank: int) -> tuple[float, float]:
            heard, sample = self._seen[rank]
            return ratios.get(rank, 0.0), sample.age - heard

        found = (self._seen[rank] for rank in heapq.nlargest(most, self._order, key=still))
        return [_aged(sample, max(0.0, now - heard)) for heard, sample in found]

    def p99(self) -> dict[str, float]:
        """Seconds of each phase's 99th percentile, on the slowest node."""
        return {phase: max(by_node.values()) for phase, by_node in self._p99.items()}

    def __len__(self) -> int:
        return len(self._seen)


def _aged(sample: RankSample, seconds: float) -> RankSample:
    """The sample of a rank so many seconds later."""
    return RankSample(
        rank=sample.rank, node=sample.node, step=sample.step, phase=sample.phase, first=sample.first,
        collective=sample.collective, age=sample.age + seconds, alive=sample.alive + seconds,
        state=sample.state, lock=sample.lock + seconds if sample.lock else 0.0, ended=sample.ended,
        moment=sample.moment, sent=sample.sent,
    )  # fmt: skip
