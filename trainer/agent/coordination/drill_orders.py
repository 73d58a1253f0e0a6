"""Drills that people request of the live job: each is ordered as soon as all ranks train, and answered then."""

from collections.abc import Iterator
from dataclasses import replace

from trainer.agent.attempt_state.attempt_state import AttemptState
from trainer.agent.ranks import fault_injection
from trainer.contract.heartbeat import Stage
from trainer.contract.messages.agents import InjectFault
from trainer.contract.requests import REFUSED, Request


class DrillOrders:
    """Holds requests back while nothing trains: a fault during a start would hit nobody, or another fault's restart."""

    def __init__(self, state: AttemptState) -> None:
        self._state = state
        self._waiting: dict[str, tuple[InjectFault, str]] = {}  # request -> the order and the answer
        self._serial = 0

    def refuse(self, request: Request) -> str | None:
        """Why this drill will never be ordered; None: `order` answers the request."""
        if self._state.stopping.stop is not None:
            return f"{REFUSED}the job is being stopped"
        order, answer = fault_injection.drill_order(request, self._state.config.cluster)
        if order is None:
            return answer
        self._waiting[request.name] = (order, answer)
        return None

    def order(self) -> Iterator[tuple[str, str]]:
        """Order what can strike now; the names of these requests and the answers."""
        if not self._waiting or not _all_train(self._state):
            return
        generation, waiting = self._state.generation, self._waiting
        self._waiting = {}
        for name, (order, answer) in waiting.items():
            self._serial += 1
            generation.note_drill(order.kind)
            self._state.roster.broadcast(replace(order, generation=generation.number, serial=self._serial))
            yield name, answer


def _all_train(state: AttemptState) -> bool:
    """Whether every rank of the current generation has trained a step; of a command: whether all are started."""
    if state.stage is not Stage.RUNNING or state.generation.first_failure is not None:
        return False
    reports = state.reports()
    trained = bool(state.config.command) or all(report.stepped for report in reports)
    return len(reports) == state.config.cluster.nodes and trained
