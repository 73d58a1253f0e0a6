"""The beginning of an attempt: every node has joined, is examined and has a fork server; or why it ends early."""

import time
from collections.abc import Awaitable, Callable

from trainer.agent.attempt_state.generation import Generation
from trainer.agent.coordination.stopping import Stopping
from trainer.agent.ladder import in_job_policy
from trainer.agent.ladder.in_job_policy import Action, Decision
from trainer.agent.nodes import preflight
from trainer.agent.nodes.roster import Roster
from trainer.contract.events import EventKind, EventLog
from trainer.contract.monitoring_config import PreflightConfig
from trainer.contract.outcome import Failure, FailureKind

JOIN_SECONDS = 300.0
"""How long agents may take to join: srun starts them within seconds, file systems show files late."""
EXAMINE_SECONDS = 120.0
READY_SECONDS = 1800.0
"""Importing torch on a busy parallel file system takes minutes at worst."""

SPARE_SECONDS = 10.0
"""How long the job waits for more nodes when as many as it needs are there."""

Until = Callable[[Callable[[], bool], float], Awaitable[bool]]


class Startup:
    """Each method waits for one thing and returns a Decision when it will never come."""

    def __init__(
        self, config: PreflightConfig, roster: Roster, stopping: Stopping, until: Until,
        generation: Callable[[], Generation], *, events: EventLog, command: bool = False,
    ) -> None:  # fmt: skip
        """`until` handles messages until a condition holds, or the seconds are over (False).

        `command`: ranks are the user's own, and what a stop means to one that has just started is not known.
        """
        self._config, self._command, self._events = config, command, events
        self._roster, self._stopping, self._until, self._generation = roster, stopping, until, generation

    async def wait_joined(self) -> Decision | None:
        """Every node has an agent, or as many as are needed, and the others had their time."""
        over = self._is_settled(self._roster.complete, self._roster.enough)
        if await self._until(over, JOIN_SECONDS):
            return None
        missing = ", ".join(str(node) for node in self._roster.missing())
        reason = f"no agent of node(s) {missing} joined within {JOIN_SECONDS:.0f} s"
        return in_job_policy.end(reason, Failure(kind=FailureKind.AGENT_LOST, reason=reason))

    async def wait_preflight(self) -> Decision | None:
        """Every node is fit, or as many as are needed."""
        over = self._is_settled(self._roster.all_examined, self._roster.can_train)
        answered = await self._until(over, EXAMINE_SECONDS)
        faults = {member.name: member.faults for member in self._roster.present() if member.faults is not None}
        found = [failure for failure in (preflight.find_blamed_node(faults), *self._skewed()) if failure is not None]
        # What is a node's own trouble is left with that node when the others are enough.
        alone = all(failure.kind is FailureKind.NODE_SUSPECT for failure in found)
        if found and not (alone and self._roster.can_train()):
            return in_job_policy.end("; ".join(failure.reason for failure in found), found[0])
        if not (answered or self._roster.can_train()):
            return self._unanswered("was not examined", self._roster.unexamined(), EXAMINE_SECONDS)
        return None

    def _skewed(self) -> list[Failure]:
        """Nodes whose clocks are off are left out, the worst one first, until the others agree or nobody is named."""
        found: list[Failure] = []
        while (failure := preflight.skew(self._clocks(), self._config)) is not None:
            found.append(failure)
            if (node := self._roster.node_of(failure.node)) is None:
                break
            self._roster.members[node].excluded = failure.reason
            self._events.write(EventKind.PREFLIGHT, node=node, name=failure.node, ok=False, reason=failure.reason)
        return found

    def _clocks(self) -> dict[str, float]:
        """By how much those that could train are ahead."""
        fit = [member for member in self._roster.present() if member.usable and member.faults == []]
        return {member.name: member.ahead for member in fit}

    async def wait_ready(self) -> Decision | None:
        """Every node's fork server can start ranks, and nothing has happened that makes it pointless."""
        ready = await self._until(lambda: self._roster.all_ready() or self._pointless(), READY_SECONDS)
        stop, broken = self._stopping.stop, self._fatal()
        if broken is not None:
            return in_job_policy.end(broken.reason, broken)
        if stop is not None and not self._generation().number:
            return Decision(action=Action.STOP, reason="asked to stop before training began")
        if stop is not None and self._too_late():
            return in_job_policy.stop_failure(stop.reason, "asked to stop between two generations")
        if not ready:
            return self._unanswered("had no fork server ready", self._roster.unready(), READY_SECONDS)
        return None

    def _is_settled(self, whole: Callable[[], bool], enough: Callable[[], bool]) -> Callable[[], bool]:
        """Whether all of it is there, or enough of it for a while, or nothing more is worth waiting for."""
        since: float | None = None

        def over() -> bool:
            nonlocal since
            now = time.monotonic()
            since = (since or now) if enough() else None
            return whole() or self._pointless() or (since is not None and now - since >= SPARE_SECONDS)

        return over

    def _unanswered(self, what: str, names: list[str], seconds: float) -> Decision:
        reason = f"{', '.join(names)} {what} within {seconds:.0f} s"
        # Of one node of many the node itself is the likeliest cause.
        only = names[0] if len(names) == 1 else None
        if (node := self._roster.node_of(only)) is not None:
            self._roster.members[node].excluded = reason
        return in_job_policy.end(reason, Failure(kind=FailureKind.UNKNOWN, reason=reason, node=only))

    def _pointless(self) -> bool:
        return self._fatal() is not None or self._too_late()

    def _too_late(self) -> bool:
        """Whether a stop was asked for that no new generation could serve: none has trained, or no time is left."""
        if self._stopping.stop is None:
            return False
        pointless = self._command or not self._generation().number
        return pointless or self._stopping.left(time.monotonic()) < in_job_policy.START_SECONDS

    def _fatal(self) -> Failure | None:
        """A failure of the machinery that no new generation mends; a fork server that died is replaced by its agent."""
        broken = self._generation().broken
        return None if broken is None or broken.kind in in_job_policy.FIXED_BY_RESTART else broken
