"""Start of an attempt or generation: nodes join, pass preflight and start fork servers, or the attempt ends."""

import time
from collections.abc import Callable

from trainer.agent.attempt_state.attempt_state import CoordinatorState
from trainer.agent.coordination.message_loop import MessageLoop
from trainer.agent.ladder import in_job_policy, node_replacement
from trainer.agent.ladder.in_job_policy import InJobAction, InJobDecision
from trainer.agent.nodes import preflight
from trainer.protocol.config_sections.fault_detection_config import PreflightConfig
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.heartbeat import AttemptStage


class Startup:
    """Conditions before training; each method waits for one and returns an InJobDecision if it cannot be met."""

    def __init__(self, state: CoordinatorState, messages: MessageLoop) -> None:
        self._state, self._roster, self._messages = state, state.roster, messages

    async def run(self) -> InJobDecision | None:
        """Wait until the first generation can start."""
        decision = await self._wait_joined()
        if decision is not None:
            return decision
        self._state.events.write(
            EventKind.ATTEMPT_STARTED, job_id=self._state.identity.job_id, nodes=self._roster.names(),
            world=self._state.config.cluster.world_size, began=self._state.started_at,
        )  # fmt: skip
        decision = await self._wait_preflight()
        if decision is not None:
            return decision
        self._roster.assign_node_ranks()
        return await self.wait_ready()

    async def wait_ready(self) -> InJobDecision | None:
        """Wait until every training node can start ranks; spares replace nodes that fail meanwhile."""
        self._state.stage = AttemptStage.WARMING
        decision = await self._wait_fork_servers()
        while decision is not None and node_replacement.can_replace(decision, self._roster):
            if (ended := self._state.replace_nodes(decision)) is not None:
                return ended
            decision = await self._wait_fork_servers()
        return decision

    async def _wait_joined(self) -> InJobDecision | None:
        """Wait until every agent has joined, or enough have and the others have had their time."""
        seconds = self._state.timeouts.join
        settled = self._is_settled(self._roster.complete, self._roster.enough)
        if await self._messages.wait_until(settled, seconds):
            return None
        missing = ", ".join(str(node) for node in self._roster.missing_nodes())
        reason = f"no agent of node(s) {missing} joined within {seconds:.0f} s"
        return in_job_policy.end(reason, Failure(kind=FailureKind.AGENT_LOST, reason=reason))

    async def _wait_preflight(self) -> InJobDecision | None:
        """Wait until every node has passed preflight, or enough have."""
        seconds = self._state.timeouts.preflight
        settled = self._is_settled(self._roster.all_examined, self._roster.can_train)
        answered = await self._messages.wait_until(settled, seconds)
        faults = {member.name: member.faults for member in self._roster.present_members() if member.faults is not None}
        found = [
            failure
            for failure in (preflight.find_blamed_node(faults), *self._exclude_skewed_nodes())
            if failure is not None
        ]
        # A fault of a single node ends nothing if the other nodes are enough.
        alone = all(failure.kind is FailureKind.NODE_SUSPECT for failure in found)
        if found and not (alone and self._roster.can_train()):
            return in_job_policy.end("; ".join(failure.reason for failure in found), found[0])
        if not (answered or self._roster.can_train()):
            return self._end_on_timeout("was not examined", self._roster.unexamined_nodes(), seconds)
        return None

    def _exclude_skewed_nodes(self) -> list[Failure]:
        """Exclude nodes with skewed clocks, worst first, until the others agree or no node can be blamed."""
        found: list[Failure] = []
        config = self._state.config.detection.preflight
        while (failure := self._find_skewed(config)) is not None:
            found.append(failure)
            if (node := self._roster.find_node(failure.node)) is None:
                break
            self._roster.members[node].excluded = failure.reason
            self._state.events.write(EventKind.PREFLIGHT, node=node, name=failure.node, ok=False, reason=failure.reason)
        return found

    def _find_skewed(self, config: PreflightConfig) -> Failure | None:
        """Return the clock skew failure of the nodes that could train, or None."""
        fit = [member for member in self._roster.present_members() if member.usable and member.faults == []]
        of_files = {member.name: member.ahead_of_files for member in fit}
        return preflight.skew({member.name: member.ahead for member in fit}, config, of_files)

    async def _wait_fork_servers(self) -> InJobDecision | None:
        """Wait until every training node's fork server can start ranks."""
        seconds = self._state.timeouts.ready
        ready = await self._messages.wait_until(lambda: self._roster.all_ready() or self._pointless(), seconds)
        stop, broken = self._state.stopping.stop, self._fatal()
        if broken is not None:
            return in_job_policy.end(broken.reason, broken)
        if stop is not None and not self._state.generation.number:
            return InJobDecision(action=InJobAction.STOP, reason="asked to stop before training began")
        if stop is not None and self._too_late():
            return in_job_policy.stop_failure(stop.reason, "asked to stop between two generations", stop.why)
        if not ready:
            return self._end_on_timeout("had no fork server ready", self._roster.unready_nodes(), seconds)
        return None

    def _is_settled(self, whole: Callable[[], bool], enough: Callable[[], bool]) -> Callable[[], bool]:
        """Return a condition: `whole()` holds, `enough()` has held for a while, or waiting is pointless."""
        since: float | None = None

        def is_settled() -> bool:
            nonlocal since
            now = time.monotonic()
            since = (since or now) if enough() else None
            waited = since is not None and now - since >= self._state.timeouts.more_nodes
            return whole() or self._pointless() or waited

        return is_settled

    def _end_on_timeout(self, what: str, names: list[str], seconds: float) -> InJobDecision:
        reason = f"{', '.join(names)} {what} within {seconds:.0f} s"
        # If exactly one node is late, the node itself is the likeliest cause.
        only = names[0] if len(names) == 1 else None
        if (node := self._roster.find_node(only)) is not None:
            self._roster.members[node].excluded = reason
        return in_job_policy.end(reason, Failure(kind=FailureKind.UNKNOWN, reason=reason, node=only))

    def _pointless(self) -> bool:
        return self._fatal() is not None or self._too_late()

    def _too_late(self) -> bool:
        """Return whether a requested stop makes a new generation pointless.
        True if none has trained or too little time is left.
        """
        state = self._state
        if state.stopping.stop is None:
            return False
        # A newly started command may not handle a stop yet.
        pointless = bool(state.config.command) or not state.generation.number
        return pointless or state.stopping.seconds_left(time.monotonic()) < in_job_policy.START_SECONDS

    def _fatal(self) -> Failure | None:
        """Return a failure that a new generation cannot fix; an agent replaces its own dead fork server."""
        broken = self._state.generation.broken
        return None if broken is None or broken.kind in in_job_policy.FIXED_BY_RESTART else broken
