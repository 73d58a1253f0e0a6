"""The coordinator: one per job, in agent 0; starts and ends generations according to `in_job_policy`."""

import secrets
import time
import traceback
from dataclasses import replace
from typing import Any

from checkpointing.storage.storage_errors import is_disk_error
from trainer.agent.attempt_state.attempt_state import CoordinatorState
from trainer.agent.control.control_server import AgentRefused, ControlServer
from trainer.agent.coordination.job_monitor import JobMonitor
from trainer.agent.coordination.message_loop import MessageLoop, RequestHandlers, Timers
from trainer.agent.coordination.startup import Startup
from trainer.agent.fork_server.torchrun_command import free_port
from trainer.agent.ladder import in_job_policy, node_replacement
from trainer.agent.ladder.in_job_policy import InJobAction, InJobDecision
from trainer.agent.processes.background_tasks import describe_error
from trainer.agent.user_command.command_run import CommandRun
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import AttemptOutcome, Failure, FailureKind
from trainer.protocol.heartbeat import AttemptStage
from trainer.protocol.messages.agents import End, Hello, KillGeneration, StartGeneration


class Teardown:
    """Cleanup between two generations: the first must be gone from every node that runs the second."""

    def __init__(self, state: CoordinatorState, messages: MessageLoop) -> None:
        self._state, self._messages = state, messages

    async def kill_generation(self, decision: InJobDecision) -> bool:
        """Kill the current generation's ranks; returns whether all are gone, ignoring nodes given up by `decision`."""
        number, roster = self._state.generation.number, self._state.roster
        roster.broadcast(KillGeneration(generation=number))
        given_up = node_replacement.left_behind(decision)
        return await self._messages.wait_until(lambda: roster.all_gone(number, but=given_up), self._state.timeouts.kill)

    def exclude_stuck_nodes(self, decision: InJobDecision) -> InJobDecision:
        """Return the decision that replaces `decision` if ranks cannot be killed: their nodes are always excluded."""
        instead = node_replacement.replace_unkillable_nodes(
            decision, self._state.roster, self._state.generation.number, seconds=self._state.timeouts.kill,
            stopping=self._state.stopping.stop is not None,
        )  # fmt: skip
        self._state.events.write(EventKind.DECISION, action=instead.action.name.lower(), reason=instead.reason)
        return instead


HANG_UP_SECONDS = 5.0

_LOOK_SECONDS, _SOON_SECONDS = 0.25, 0.05
"""Check intervals of a running generation between messages; the shorter one applies after a failure or a stop."""


class Coordinator:
    """Leader of an attempt, generation by generation; its parts share one `AttemptState`."""

    def __init__(self, state: CoordinatorState) -> None:
        self._state, self._host = state, ""
        self._control_server = ControlServer(
            secrets.token_hex(32), admit=state.roster.admit, serve=state.roster.serve, on_foreign=self._on_foreign
        )
        self._monitor = JobMonitor(state)
        self._requests = RequestHandlers(state)
        self._timers = Timers(state, self._monitor)
        self._messages = MessageLoop(state, self._monitor, self._requests, self._timers)
        self._startup = Startup(state, self._messages)
        self._teardown = Teardown(state, self._messages)
        self._command = CommandRun(state.run_dir, state.attempt_dir, state.config, state.events, state.progress)

    async def open(self, host: str) -> dict[str, Any]:
        """Listen and write coordinator.json for the other agents; returns its content. Raises OSError."""
        self._host = host
        port = await self._control_server.open(host)
        found = {"schema": "orch.coordinator/1", "host": host, "port": port, "token": self._control_server.token}
        found["job_id"] = self._state.identity.job_id
        await self._state.outbox.be_found(found)
        return found

    def _on_foreign(self, hello: Hello, reason: str) -> None:
        self._state.deliver(hello.node, AgentRefused(name=hello.name, reason=reason))

    async def run(self) -> int:
        """Run the attempt to its end; returns the exit code of every agent."""
        self._timers.start()
        try:
            return await self._end_attempt(await self._lead())
        finally:
            self._timers.stop()
            await self._control_server.close()

    async def _lead(self) -> InJobDecision:
        """Run generations until one ends the attempt. An exception ends it too, and its outcome names the exception."""
        try:
            decision = await self._startup.run()
            while decision is None:
                decision = await self._run_generation()
        except Exception as error:  # noqa: BLE001  # outermost edge: the outcome keeps the cause
            traceback.print_exception(error)
            reason = f"the coordinator failed: {describe_error(error)}"
            kind = FailureKind.STORAGE if is_disk_error(error) else FailureKind.UNKNOWN
            return in_job_policy.end(reason, Failure(kind=kind, reason=reason, step=self._state.progress.step))
        return decision

    # -- the life of a generation ------------------------------------------------------------------------------------

    async def _run_generation(self) -> InJobDecision | None:
        """Run one generation; returns an InJobDecision if the attempt ends with it, None if another follows."""
        await self._launch_ranks()
        decision = await self._watch_ranks()
        await self._state.record_decision(decision)
        killed = await self._tear_down(decision)
        return await self._prepare_next(decision, killed=killed)

    async def _launch_ranks(self) -> None:
        """Start the ranks on all training nodes and repeat a pending stop or save request to them."""
        state, history = self._state, self._state.history
        generation, cluster = state.begin_generation(), state.config.cluster
        await self._command.start_generation(generation.number)
        state.events.write(EventKind.GENERATION_STARTED, world=cluster.world_size, nodes=cluster.nodes)
        start = StartGeneration(
            generation=generation.number, fit=history.new_nodes, suspects=tuple(history.suspects),
            skip=tuple(each.position for each in history.skipped),
            master=(self._host, free_port(self._host)) if state.config.command else None,
        )  # fmt: skip
        state.roster.start_generation(start)
        history.new_nodes = False
        self._monitor.start_generation()
        state.stopping.extend_for_new_ranks(generation.started)
        if not state.send_stop():
            self._requests.repeat_save()

    async def _watch_ranks(self) -> InJobDecision:
        """Check the ranks until they have ended or failed and `in_job_policy` has decided what follows."""
        state = self._state
        while (decision := in_job_policy.decide(state.situation(self._command.past()))).action is InJobAction.WAIT:
            # Check often only while a deadline may decide something.
            urgent = state.generation.first_failure or state.stopping.stop
            await self._messages.wait_for_news(_SOON_SECONDS if urgent else _LOOK_SECONDS)
            await self._command.check(state.generation)
            failure = await self._monitor.check()
            if failure is not None:
                state.fail(failure)
        return decision

    async def _tear_down(self, decision: InJobDecision) -> bool:
        """Kill the rest of the generation; returns whether it is gone from every node that runs the next one."""
        state = self._state
        state.stage = AttemptStage.CLEARING
        killed = await self._teardown.kill_generation(decision)
        await self._command.end_generation(decision, state.generation, cleared=killed)
        await self._timers.write_status()
        attributed = state.with_drill(decision.failure)
        failure = attributed.to_json() if attributed else None
        step = state.progress.step if state.progress.step or not state.config.command else None  # None: unknown
        state.events.write(EventKind.GENERATION_ENDED, reason=decision.reason, step=step, failure=failure)
        return killed

    async def _prepare_next(self, decision: InJobDecision, *, killed: bool) -> InJobDecision | None:
        """Wait until the next generation can start; returns an InJobDecision if there will not be one."""
        state = self._state
        if decision.action not in (InJobAction.RESTART, InJobAction.ROLL_BACK, InJobAction.REPLACE):
            return decision
        if not killed:
            decision = self._teardown.exclude_stuck_nodes(decision)
        if decision.action is InJobAction.END:
            return decision
        if decision.action is InJobAction.REPLACE:
            return state.replace_nodes(decision) or await self._startup.wait_ready()
        # The decision covers the failure it was made for, not another that occurred while ranks were killed.
        if state.generation.broken is decision.failure:
            state.generation.broken = None
        state.history.restarts += decision.action is InJobAction.RESTART and not state.generation.drill
        state.history.again = state.history.again or state.stopping.stop is not None
        if decision.pause:
            await self._messages.wait_until(
                lambda: state.stopping.stop is not None or state.generation.broken is not None, decision.pause
            )
        return await self._startup.wait_ready()

    async def _end_attempt(self, decision: InJobDecision) -> int:
        """Write the outcome, then end every agent with the same exit code."""
        state, stop = self._state, self._state.stopping.stop
        code, result, reason = in_job_policy.final_outcome(decision, "" if stop is None else stop.why)
        failure = decision.failure
        if failure is not None and failure.kind is FailureKind.STORAGE:
            failure = replace(failure, room=state.progress.unsaved_bytes)
            if (saves := state.progress.saves_failing) and saves not in reason:
                reason, failure = f"{reason}; {saves}", replace(failure, reason=f"{failure.reason}; {saves}")
        outcome = AttemptOutcome(
            attempt=state.attempt_dir.number, job_id=state.identity.job_id, result=result, reason=reason,
            exit_code=int(code), step=state.progress.step, generations=state.generation.number,
            started_at=state.started_at, ended_at=time.time(), failure=state.with_drill(failure),
        )  # fmt: skip
        await state.outbox.leave(outcome)
        state.events.write(EventKind.ATTEMPT_ENDED, result=str(result), reason=reason)
        state.stage = AttemptStage.ENDED
        await self._timers.write_status()
        state.roster.broadcast(End(code=int(code), reason=reason))
        await state.roster.wait_until_disconnected(HANG_UP_SECONDS)
        return int(code)
