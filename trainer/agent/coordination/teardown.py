"""The end of a generation's processes on all nodes, and what is done about those that cannot be killed."""

from trainer.agent.coordination.startup import Until
from trainer.agent.coordination.stopping import Stopping
from trainer.agent.ladder import node_replacement
from trainer.agent.ladder.in_job_policy import Decision
from trainer.agent.nodes.roster import Roster
from trainer.contract.events import EventKind, EventLog

KILL_SECONDS = 60.0


class Teardown:
    """Between two generations: nothing of the first may be left where the second one runs."""

    def __init__(self, roster: Roster, stopping: Stopping, until: Until, events: EventLog) -> None:
        """`until` handles messages until a condition holds, or the seconds are over (False)."""
        self._roster, self._stopping, self._until, self._events = roster, stopping, until, events

    async def kill_generation(self, generation: int, decision: Decision) -> bool:
        """Kill what is left of the generation, on all nodes; whether all of it is really gone where that matters."""
        self._roster.broadcast("kill", generation=generation)
        left_behind = node_replacement.left_behind(decision)
        return await self._until(lambda: self._roster.all_gone(generation, but=left_behind), KILL_SECONDS)

    def exclude_stuck_nodes(self, generation: int, decision: Decision) -> Decision:
        """What is done instead of `decision`: nodes on which ranks cannot be killed are left, whatever was decided."""
        stopping = self._stopping.stop is not None
        instead = node_replacement.replace_unkillable_nodes(
            decision, self._roster, generation, seconds=KILL_SECONDS, stopping=stopping
        )
        self._events.write(EventKind.DECISION, action=instead.action.name.lower(), reason=instead.reason)
        return instead
