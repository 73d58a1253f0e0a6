"""Failures of nodes, and whether the current generation needs the node."""

from trainer.agent.attempt_state.attempt_state import CoordinatorState
from trainer.agent.control.control_server import AgentRefused
from trainer.agent.watch.root_cause import LIMITS
from trainer.protocol.events import EventKind
from trainer.protocol.failures.failure_patterns import Meaning, has_meaning
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.messages.agents import Unloadable


class NodeFailures:
    """Recorder of node failures; the generation fails only if it needs the node."""

    def __init__(self, state: CoordinatorState) -> None:
        self._state, self._roster = state, state.roster

    def lost(self, node: int, reason: str) -> None:
        """Record that an agent has disconnected or timed out."""
        member = self._roster.members.get(node)
        if member is None or member.lost:
            return
        member.lost = reason
        member.peer.drop()
        self._state.events.write(EventKind.AGENT_LOST, node=node, name=member.name, reason=reason)
        if self._roster.is_needed(node):
            # An agent that reported its own failure exits a moment later; that failure is the cause.
            why = member.excluded or reason
            self._fail(FailureKind.AGENT_LOST, node, f"the agent of {member.name} is lost: {why}")

    def foreign(self, node: int, refused: AgentRefused) -> None:
        """Record the refusal of an agent with another protocol; its node cannot join unless another agent did."""
        reason = f"the agent of {refused.name}: {refused.reason}"
        self._state.events.write(EventKind.DECISION, action="refuse", reason=reason)
        if node in self._roster.members:
            return
        self._roster.give_up(node)
        if self._roster.is_needed(node):
            self._state.fail(Failure(kind=FailureKind.INSTALLATION, reason=reason, node=refused.name))

    def unloadable(self, node: int, message: Unloadable) -> None:
        """Record a fork server that cannot import the workload. If other nodes can, the node is at fault."""
        member = self._roster.members[node]
        member.excluded = f"the workload cannot be imported: {message.exception}: {message.message}"
        if not self._roster.is_needed(node):
            return
        others = [other for other in self._roster.present_members() if other.node != node and other.ready]
        if others:
            reason = f"{member.name}: {member.excluded}, while {others[0].name} can import it"
            self._fail(FailureKind.NODE_SUSPECT, node, reason)
        elif has_meaning(member.excluded, Meaning.NO_PROCESSES):
            self._fail(FailureKind.UNKNOWN, node, f"{member.name}: {member.excluded}; {LIMITS}")
        elif self._state.history.trained and has_meaning(member.excluded, Meaning.INSTALLATION):
            self._fail(FailureKind.STORAGE, node, f"{member.name}: {member.excluded}")
        else:
            self._fail(FailureKind.USER_ERROR, node, member.excluded)

    def agent_failed(self, node: int, reason: str) -> None:
        """Record that an agent cannot serve its node."""
        self._roster.members[node].excluded = reason
        if self._roster.is_needed(node):
            self._fail(FailureKind.UNKNOWN, node, reason)

    def fork_server_died(self, node: int, reason: str) -> None:
        """Record that a fork server died with the ranks it had started; its agent starts another one."""
        name = self._roster.members[node].name
        self._fail(FailureKind.RANK_KILLED, node, f"the fork server of {name} died: {reason}")

    def _fail(self, kind: FailureKind, node: int, reason: str) -> None:
        name = self._roster.members[node].name
        self._state.fail(Failure(kind=kind, reason=reason, node=name, step=self._state.progress.step))
