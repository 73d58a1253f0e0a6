"""One rank as its agent sees it: what the coordinator judges by. Ages, not times: clocks of nodes never meet."""

from dataclasses import astuple, dataclass, fields
from itertools import product
from typing import Any


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

    def to_row(self) -> list[Any]:
        """For the wire, without the node's name, which the coordinator knows."""
        rank, _, *rest = astuple(self)
        return [rank, *rest]

    @classmethod
    def from_row(cls, row: list[Any], node: str) -> "RankSample":
        """Raises TypeError or ValueError when `row` is none: what comes over the wire is compared and added later."""
        if type(row) is not list or tuple(map(type, row)) not in _KINDS:
            raise TypeError(f"no row of a sighting: {str(row)[:80]}")
        rank, step, phase, first, collective, age, alive, state, lock, ended = row
        if age < 0 or alive < 0 or lock < 0:
            raise ValueError(f"a sighting of rank {rank} in the future")
        return cls(
            rank=rank, node=node, step=step, phase=phase, first=first, collective=collective, age=age, alive=alive,
            state=state, lock=lock, ended=ended,
        )  # fmt: skip


_TYPES: dict[Any, tuple[type, ...]] = {int: (int,), str: (str,), bool: (bool,), float: (float, int)}
_KINDS = frozenset(product(*(_TYPES[item.type] for item in fields(RankSample) if item.name != "node")))
"""The types of a row's values: True is no number, and an age may be a whole one."""
