"""The end of a generation's processes on all nodes, and what is done about those that cannot be killed."""

from trainer.agent.attempt_state.attempt_state import AttemptState
from trainer.agent.coordination.message_loop import MessageLoop
from trainer.agent.ladder import node_replacement
from trainer.agent.ladder.in_job_policy import Decision
from trainer.contract.events import EventKind
from trainer.contract.messages.agents import KillGeneration


class Teardown:
    """Between two generations: nothing of the first may be left where the second one runs."""

    def __init__(self, state: AttemptState, messages: MessageLoop) -> None:
        self._state, self._messages = state, messages

    async def kill_generation(self, decision: Decision) -> bool:
        """Kill the ranks of the current generation; whether all are gone, but for nodes that `decision` gives up."""
        number, roster = self._state.generation.number, self._state.roster
        roster.broadcast(KillGeneration(generation=number))
        given_up = node_replacement.left_behind(decision)
        return await self._messages.wait_until(lambda: roster.all_gone(number, but=given_up), self._state.timeouts.kill)

    def exclude_stuck_nodes(self, decision: Decision) -> Decision:
        """What is done instead of `decision`: nodes on which ranks cannot be killed are excluded in any case."""
        instead = node_replacement.replace_unkillable_nodes(
            decision, self._state.roster, self._state.generation.number, seconds=self._state.timeouts.kill,
            stopping=self._state.stopping.stop is not None,
        )  # fmt: skip
        self._state.events.write(EventKind.DECISION, action=instead.action.name.lower(), reason=instead.reason)
        return instead
