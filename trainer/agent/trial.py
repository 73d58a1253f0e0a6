"""The ranks' first measurements of a generation: gathered until all are there, then held against each other once."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.agent.fitness import Measured, fleet, verdict
from trainer.contract.outcome import Failure
from trainer.contract.watching import PreflightConfig


class Trial:
    """`nodes` names each rank's node, `machines` says on which machine each of these is, where that is known."""

    def __init__(self, nodes: Sequence[str], machines: Mapping[str, str], config: PreflightConfig) -> None:
        self._nodes, self._config = nodes, config
        known = [machines.get(node, "") for node in dict.fromkeys(nodes)]
        # Nodes that share a machine take its cores from one another: their speeds say nothing.
        self._comparable = all(known) and len(set(known)) == len(known)
        self._measured: dict[int, Measured] = {}

    def heard(self, message: Mapping[str, Any]) -> bool:
        """One rank's figures; True when they complete the trial. Raises KeyError, TypeError or ValueError."""
        one = Measured.from_message(message)
        if not 0 <= one.rank < len(self._nodes):
            raise ValueError(f"there is no rank {one.rank}")
        news = one.rank not in self._measured
        self._measured[one.rank] = one
        return news and len(self._measured) == len(self._nodes)

    def failure(self) -> Failure | None:
        """The node to blame, if there is one."""
        return verdict(list(self._measured.values()), self._nodes, self._config) if self._comparable else None

    def told(self) -> dict[str, float]:
        """The median node's speeds, for the record."""
        return fleet(self._measured.values(), self._nodes)
