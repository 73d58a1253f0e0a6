"""An agent's look at its ranks: cells ten times a second, /proc only for those whose cell stands still."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.agent.local_ranks import LocalRank, LocalRanks
from trainer.agent.proc import Signs, look
from trainer.agent.sighting import Sighting
from trainer.agent.stragglers import worth_telling
from trainer.contract.durations import added, quantile

STILL = 1.0
"""Seconds without a write to its cell after which a rank is looked at more closely."""
_LOOK_EVERY = 0.5
_BUSY = 0.05
"""Share of a core above which CPU time is a sign of life: what waits, wakes up now and then too."""
_BYTES = 4096
"""Bytes read or written between two looks that are a sign of life: a log line is none."""


def report_seconds(nodes: int) -> float:
    """Seconds between two reports of an agent: a coordinator hears about a thousand of them a second at most."""
    return max(0.5, nodes / 1000)


@dataclass(kw_only=True)
class _Watched:
    """What is remembered of one rank between two looks."""

    born: float
    told: tuple[int, str, bool] = (-1, "", False)  # newest write, state and end that were reported
    looked: float = 0.0
    lived: float = 0.0
    signs: Signs | None = None


class Sampler:
    """The ranks of one generation on one node; `name` is the node's."""

    def __init__(
        self, ranks: LocalRanks, name: str, *, clock: Callable[[], float] = time.monotonic,
        signs: Callable[[int], Signs | None] = look,
    ) -> None:  # fmt: skip
        self._ranks, self._name, self._clock, self._signs = ranks, name, clock, signs
        self._watched = {rank: _Watched(born=clock()) for rank in ranks.by_rank}
        self._p99: dict[str, float] = {}
        self._worked: dict[int, int] = {}

    def sightings(self) -> list[Sighting]:
        """Every rank, now."""
        return [self._sight(local) for local in self._ranks.by_rank.values()]

    def report(self) -> dict[str, Any]:
        """What has changed since the last report, in the form it is sent in."""
        seen = [(sighting, self._watched[sighting.rank]) for sighting in self.sightings()]
        rows = [sighting.to_row() for sighting, watched in seen if self._is_news(sighting, watched)]
        found = {"sightings": rows, "p99": self._slower(), "work": self._work()}
        return {key: value for key, value in found.items() if value}

    def _is_news(self, sighting: Sighting, watched: _Watched) -> bool:
        local = self._ranks.by_rank[sighting.rank]
        now = (local.last.moved_at, sighting.state, sighting.ended)
        # Of a rank that stands still every look counts: its signs of life excuse it.
        news = now != watched.told or (sighting.age > STILL and not sighting.ended)
        watched.told = now
        return news

    def _sight(self, local: LocalRank) -> Sighting:
        watched, reading, now = self._watched[local.rank], local.look(), self._clock()
        moved = reading.moved_at * 1e-9 or watched.born
        age = max(0.0, now - moved)
        if age > STILL and not local.ended and local.pid is not None:
            self._look_closer(local.pid, watched, now)
        elif age <= STILL:
            watched.signs = None
        state = watched.signs.state if watched.signs is not None else "X" if local.ended else "R"
        ticked = local.cell.ticked() * 1e-9
        return Sighting(
            rank=local.rank,
            node=self._name,
            step=reading.step,
            phase=reading.phase.name.lower(),
            first=not local.stepped(),
            collective=reading.collective,
            age=age,
            alive=min(age, now - watched.lived),
            state=state,
            lock=max(0.0, now - ticked) if ticked else 0.0,
            ended=local.ended,
        )

    def _look_closer(self, pid: int, watched: _Watched, now: float) -> None:
        if watched.signs is not None and now - watched.looked < _LOOK_EVERY:
            return
        signs = self._signs(pid)
        before, watched.signs = watched.signs, signs
        if before is not None and signs is not None:
            busy = (signs.cpu_seconds - before.cpu_seconds) / max(1e-3, now - watched.looked)
            if busy > _BUSY or signs.io_bytes - before.io_bytes > _BYTES:
                watched.lived = now
        watched.looked = now

    def _slower(self) -> dict[str, float]:
        """The 99th percentile of every phase over this node's ranks, where it has changed."""
        rows: dict[str, list[tuple[int, ...]]] = {}
        for local in self._ranks.by_rank.values():
            for phase, counts in local.cell.times().items():
                rows.setdefault(phase.name.lower(), []).append(counts)
        found = {phase: quantile(added(counts), 0.99) for phase, counts in rows.items()}
        changed = {phase: seconds for phase, seconds in found.items() if self._p99.get(phase) != seconds}
        self._p99.update(changed)
        return changed

    def _work(self) -> list[list[int]]:
        """Own work of the ranks that have come to the end of a window of steps since they were told of."""
        rows = []
        for rank, local in self._ranks.by_rank.items():
            work = local.cell.work()
            if worth_telling(self._worked.get(rank, 0), work.steps):
                self._worked[rank] = work.steps
                rows.append([rank, work.steps, *work.sections])
        return rows
