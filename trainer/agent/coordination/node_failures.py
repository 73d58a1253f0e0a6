"""What goes wrong with a node, and whether the generation that runs can do without it."""

import time
from collections.abc import Callable

from trainer.agent.attempt_state.generation import Generation
from trainer.agent.attempt_state.heartbeat import AttemptProgress
from trainer.agent.control.tcp_transport import Message
from trainer.agent.nodes.roster import Roster
from trainer.contract.events import EventKind, EventLog
from trainer.contract.outcome import Failure, FailureKind


class NodeFailures:
    """Each method notes what has happened to a node; the generation fails with it only when it needs that node."""

    def __init__(
        self, roster: Roster, events: EventLog, progress: AttemptProgress, generation: Callable[[], Generation]
    ) -> None:
        self._roster, self._events, self._progress, self._generation = roster, events, progress, generation

    def fail(self, failure: Failure) -> None:
        """The generation that runs, or the wait for the next one, is over for this reason."""
        self._generation().fail(failure, time.monotonic())

    def lost(self, node: int, reason: str) -> None:
        """An agent does not answer any more."""
        member = self._roster.members.get(node)
        if member is None or member.lost:
            return
        member.lost = reason
        member.peer.drop()
        self._events.write(EventKind.AGENT_LOST, node=node, name=member.name, reason=reason)
        if self._roster.is_needed(node):
            self._fail(FailureKind.AGENT_LOST, node, f"the agent of {member.name} is lost: {reason}")

    def unloadable(self, node: int, message: Message) -> None:
        """A fork server cannot import the workload: where others could, that is its node's fault."""
        member = self._roster.members[node]
        member.excluded = f"the workload cannot be imported: {message['exception']}: {message['message']}"
        if not self._roster.is_needed(node):
            return
        others = [other for other in self._roster.present() if other.node != node and other.ready]
        if others:
            told = f"{member.name}: {member.excluded}, while {others[0].name} can import it"
            self._fail(FailureKind.NODE_SUSPECT, node, told)
        else:
            self._fail(FailureKind.USER_ERROR, node, member.excluded)

    def fork_server_failed(self, node: int, reason: str) -> None:
        """A node's fork servers die one after the other."""
        self._roster.members[node].excluded = reason
        if self._roster.is_needed(node):
            self._fail(FailureKind.UNKNOWN, node, reason)

    def fork_server_died(self, node: int, reason: str) -> None:
        """With the ranks that it had started; its agent starts another one."""
        name = self._roster.members[node].name
        self._fail(FailureKind.RANK_KILLED, node, f"the fork server of {name} died: {reason}")

    def _fail(self, kind: FailureKind, node: int, reason: str) -> None:
        name = self._roster.members[node].name
        self.fail(Failure(kind=kind, reason=reason, node=name, step=self._progress.step))
