"""Drills requested of the live job: each is ordered and answered once all ranks train."""

from collections.abc import Iterator
from dataclasses import replace

from trainer.agent.attempt_state.attempt_state import CoordinatorState
from trainer.agent.rank_processes import fault_injection
from trainer.protocol.heartbeat import AttemptStage
from trainer.protocol.messages.agents import InjectFault
from trainer.protocol.requests import REFUSED, Request


class DrillOrders:
    """Queue of requested drills, held back until all ranks train.
    A fault during start-up would hit no rank, or another fault's restart.
    """

    def __init__(self, state: CoordinatorState) -> None:
        self._state = state
        self._waiting: dict[str, tuple[InjectFault, str]] = {}  # request -> order and answer
        self._serial = 0

    def refuse(self, request: Request) -> str | None:
        """Return why this drill will never be ordered, or None if `order` answers the request."""
        if self._state.stopping.stop is not None:
            return f"{REFUSED}the job is being stopped"
        order, answer = fault_injection.drill_order(request, self._state.config.cluster)
        if order is None:
            return answer
        self._waiting[request.name] = (order, answer)
        return None

    def order(self) -> Iterator[tuple[str, str]]:
        """Order the waiting drills if all ranks train; yields the request names and answers."""
        if not self._waiting or not _all_train(self._state):
            return
        generation, waiting = self._state.generation, self._waiting
        self._waiting = {}
        for name, (order, answer) in waiting.items():
            self._serial += 1
            generation.note_drill(order.kind)
            self._state.roster.broadcast(replace(order, generation=generation.number, serial=self._serial))
            yield name, answer


def _all_train(state: CoordinatorState) -> bool:
    """Return whether every rank of the current generation has trained a step; for a command, has started."""
    if state.stage is not AttemptStage.RUNNING or state.generation.first_failure is not None:
        return False
    reports = state.reports()
    trained = bool(state.config.command) or all(report.stepped for report in reports)
    return len(reports) == state.config.cluster.nodes and trained
