"""The coordinator of an attempt, and the start of each generation: join, preflight, fork servers."""

import math
import secrets
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from checkpointing.storage.storage_errors import is_disk_error
from trainer.agent.attempt_state.attempt_state import RunningAttempt
from trainer.agent.control.control_server import AgentRefused, ControlServer
from trainer.agent.coordination.job_monitor import JobMonitor
from trainer.agent.coordination.message_loop import MessageLoop, Timers
from trainer.agent.coordination.requests import RequestHandlers
from trainer.agent.fork_server.launch_order import free_port
from trainer.agent.ladder import in_job_policy, spare_nodes
from trainer.agent.nodes import preflight
from trainer.agent.processes.background_tasks import describe_error
from trainer.agent.user_command.command_run import CommandRun
from trainer.agent.user_command.sealing import Reading
from trainer.protocol.config_sections.fault_detection_config import PreflightConfig
from trainer.protocol.events import EventKind
from trainer.protocol.failures.decision import Action, Decision
from trainer.protocol.failures.outcome import AttemptOutcome, Failure, FailureKind
from trainer.protocol.heartbeat import AttemptStage
from trainer.protocol.messages.agents import End, Hello, KillGeneration


class Startup:
    """Start-up before training. Each method waits for one condition and returns a Decision if it cannot be met."""

    def __init__(self, state: RunningAttempt, messages: MessageLoop) -> None:
        self._state, self._roster, self._messages = state, state.roster, messages

    async def run(self) -> Decision | None:
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

    async def wait_ready(self) -> Decision | None:
        """Wait until every training node can start ranks; spares replace nodes that fail in the meantime."""
        self._state.enter(AttemptStage.WARMING)
        decision = await self._wait_fork_servers()
        while decision is not None and spare_nodes.can_replace(decision, self._roster):
            if (ended := self._state.replace_nodes(decision)) is not None:
                return ended
            decision = await self._wait_fork_servers()
        return decision

    async def _wait_joined(self) -> Decision | None:
        """Wait until every agent has joined, or until enough have and the grace period for the others is over."""
        seconds = self._state.timeouts.join
        settled = self._is_settled(self._roster.complete, self._roster.enough)
        if await self._messages.wait_until(settled, seconds):
            return None
        missing = ", ".join(str(node) for node in self._roster.missing_nodes())
        reason = f"no agent of node(s) {missing} joined within {seconds:.0f} s"
        return in_job_policy.end(reason, Failure(kind=FailureKind.AGENT_LOST, reason=reason))

    async def _wait_preflight(self) -> Decision | None:
        """Wait until every node has passed preflight, or until enough nodes have."""
        stage = self._state.config.cluster.stage
        seconds = self._state.timeouts.preflight + (stage.seconds if stage.archive else 0.0)
        settled = self._is_settled(self._roster.all_examined, self._roster.can_train)
        answered = await self._messages.wait_until(settled, seconds)
        faults = {member.name: member.faults for member in self._roster.present_members() if member.faults is not None}
        blamed = preflight.find_blamed_node(faults)
        found = [*([] if blamed is None else [blamed]), *self._exclude_skewed_nodes()]
        # A fault on a single node does not end the attempt if enough other nodes can train.
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
        fit = [member for member in self._roster.present_members() if member.usable and member.faults == []]
        of_files = {member.name: member.ahead_of_files for member in fit}
        return preflight.skew({member.name: member.ahead for member in fit}, config, of_files)

    async def _wait_fork_servers(self) -> Decision | None:
        seconds = self._state.timeouts.ready
        ready = await self._messages.wait_until(lambda: self._roster.all_ready() or self._pointless(), seconds)
        stop, broken = self._state.stopping.stop, self._fatal()
        if broken is not None:
            return in_job_policy.end(broken.reason, broken)
        if stop is not None and not self._state.generation.number:
            return Decision(action=Action.STOP, reason="asked to stop before training began")
        if stop is not None and self._too_late():
            return in_job_policy.stop_failure(stop.reason, "asked to stop between two generations", stop.why)
        if not ready:
            return self._end_on_timeout("had no fork server ready", self._roster.unready_nodes(), seconds)
        return None

    def _is_settled(self, whole: Callable[[], bool], enough: Callable[[], bool]) -> Callable[[], bool]:
        """Return a condition: whether `whole()` holds, `enough()` has held for a while, or waiting is pointless."""
        since: float | None = None

        def is_settled() -> bool:
            nonlocal since
            now = time.monotonic()
            since = (since or now) if enough() else None
            waited = since is not None and now - since >= self._state.timeouts.more_nodes
            return whole() or self._pointless() or waited

        return is_settled

    def _end_on_timeout(self, what: str, names: list[str], seconds: float) -> Decision:
        reason = f"{', '.join(names)} {what} within {seconds:.0f} s"
        # If exactly one node is late, that node is the most likely cause.
        only = names[0] if len(names) == 1 else None
        if (node := self._roster.find_node(only)) is not None:
            self._roster.members[node].excluded = reason
        return in_job_policy.end(reason, Failure(kind=FailureKind.UNKNOWN, reason=reason, node=only))

    def _pointless(self) -> bool:
        return self._fatal() is not None or self._too_late()

    def _too_late(self) -> bool:
        """Return whether a requested stop makes a new generation pointless.
        This is so if no generation has trained or too little time is left.
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


HANG_UP_SECONDS = 5.0

_LOOK_SECONDS, _SOON_SECONDS = 0.25, 0.05
"""Seconds between checks of a running generation; the shorter interval applies after a failure or a stop."""


class Coordinator:
    """Runs an attempt one generation at a time. Its parts share one `RunningAttempt`."""

    def __init__(self, state: RunningAttempt) -> None:
        self._state, self._host = state, ""
        self._control_server = ControlServer(
            secrets.token_hex(32), admit=state.roster.admit, serve=state.roster.serve, on_foreign=self._on_foreign
        )
        self._monitor = JobMonitor(state)
        self._requests = RequestHandlers(state)
        self._timers = Timers(state, self._monitor)
        self._messages = MessageLoop(state, self._monitor, self._requests, self._timers)
        self._startup = Startup(state, self._messages)
        self._command = CommandRun(state.run_dir, state.attempt_dir, state.config, state.events, state.progress)

    async def open(self, host: str) -> dict[str, Any]:
        """Listen and write coordinator.json for the other agents, and return its content. Raises OSError."""
        self._host = host
        port = await self._control_server.open(host)
        found = {"schema": "orch.coordinator/1", "host": host, "port": port, "token": self._control_server.token}
        found["job_id"] = self._state.identity.job_id
        await self._state.outbox.publish_address(found)
        return found

    def _on_foreign(self, hello: Hello, reason: str) -> None:
        self._state.deliver(hello.node, AgentRefused(name=hello.name, reason=reason))

    async def run(self) -> int:
        """Run the attempt to its end and return the exit code of every agent."""
        self._timers.start()
        try:
            return await self._end_attempt(await self._lead())
        finally:
            self._timers.stop()
            await self._control_server.close()

    async def _lead(self) -> Decision:
        """Run generations until one ends the attempt. An exception also ends it and is named in the outcome."""
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

    async def _run_generation(self) -> Decision | None:
        """Run one generation. Return a Decision if the attempt ends, or None if another generation follows."""
        if (ended := await self._launch_ranks()) is not None:
            return ended
        decision = await self._watch_ranks()
        await self._state.record_decision(decision)
        killed = await self._tear_down(decision)
        return await self._prepare_next(decision, killed=killed)

    async def _launch_ranks(self) -> Decision | None:
        """Start the ranks on all training nodes and repeat any pending stop or save request.
        Return a Decision if no checkpoint of the user's program may be loaded.
        """
        state = self._state
        generation, cluster = state.begin_generation(), state.config.cluster
        await self._command.start_generation(generation.number, self._wait_or_stop)
        generation.started = time.monotonic()  # reading a large checkpoint takes time
        if why := self._command.unusable:
            return in_job_policy.end(why, Failure(kind=FailureKind.STORAGE, reason=why))
        state.events.write(EventKind.GENERATION_STARTED, world=cluster.world_size, nodes=cluster.nodes)
        master = (self._host, free_port(self._host)) if state.config.command else None
        command = self._command
        state.start_ranks(master, command.resume, command.restores.states, is_earlier=command.resumes_earlier)
        self._monitor.start_generation()
        state.stopping.extend_for_new_ranks(generation.started)
        if not state.send_stop():
            self._requests.repeat_save()
        return None

    async def _wait_or_stop(self, reading: Reading[Any]) -> None:
        """Handle messages until a read is over, the attempt is asked to stop, or a node fails."""
        stopping, generation = self._state.stopping, self._state.generation
        await self._messages.wait_until(
            lambda: reading.is_over() or stopping.stop is not None or generation.broken is not None, math.inf
        )

    async def _watch_ranks(self) -> Decision:
        """Check the ranks until they have ended or failed and `in_job_policy` has decided what follows."""
        state = self._state
        while (decision := in_job_policy.decide(state.situation(self._command.past()))).action is Action.WAIT:
            # Check often only after a failure or a stop request, when a deadline may pass.
            urgent = state.generation.first_failure or state.stopping.stop
            await self._messages.wait_for_news(_SOON_SECONDS if urgent else _LOOK_SECONDS)
            await self._command.check(state.generation)
            failure = await self._monitor.check()
            if failure is not None:
                state.fail(failure)
        return decision

    async def _tear_down(self, decision: Decision) -> bool:
        """Kill the rest of the generation and return whether it is gone from every node that will run the next one."""
        state = self._state
        state.enter(AttemptStage.CLEARING)
        killed = await self._kill_generation(decision)
        await self._command.end_generation(decision, state.generation, cleared=killed)
        await self._timers.write_status()
        attributed = state.with_drill(decision.failure)
        failure = attributed.to_json() if attributed else None
        step = state.progress.step if state.progress.step or not state.config.command else None  # None: unknown
        state.events.write(EventKind.GENERATION_ENDED, reason=decision.reason, step=step, failure=failure)
        return killed

    async def _kill_generation(self, decision: Decision) -> bool:
        """Kill the generation's ranks and return whether all are gone, except on nodes that `decision` gives up."""
        number, roster = self._state.generation.number, self._state.roster
        roster.broadcast(KillGeneration(generation=number))
        given_up = spare_nodes.left_behind(decision)
        return await self._messages.wait_until(lambda: roster.all_gone(number, but=given_up), self._state.timeouts.kill)

    def _exclude_stuck_nodes(self, decision: Decision) -> Decision:
        """Return the decision to use instead of `decision` if ranks cannot be killed; their nodes are excluded."""
        state = self._state
        instead = spare_nodes.replace_unkillable_nodes(
            decision, state.roster, state.generation.number, seconds=state.timeouts.kill,
            stopping=state.stopping.stop is not None,
        )  # fmt: skip
        state.events.write(EventKind.DECISION, action=instead.action.name.lower(), reason=instead.reason)
        return instead

    async def _prepare_next(self, decision: Decision, *, killed: bool) -> Decision | None:
        """Wait until the next generation can start. Return a Decision if none will follow."""
        state = self._state
        if decision.action not in (Action.RESTART, Action.ROLL_BACK, Action.REPLACE):
            return decision
        if not killed:
            decision = self._exclude_stuck_nodes(decision)
        if decision.action is Action.END:
            return decision
        if decision.action is Action.REPLACE:
            return state.replace_nodes(decision) or await self._startup.wait_ready()
        state.restart_in_place(decision)
        if decision.pause:
            await self._messages.wait_until(
                lambda: state.stopping.stop is not None or state.generation.broken is not None, decision.pause
            )
        return await self._startup.wait_ready()

    async def _end_attempt(self, decision: Decision) -> int:
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
        await state.outbox.write_outcome(outcome)
        state.events.write(EventKind.ATTEMPT_ENDED, result=str(result), reason=reason)
        state.enter(AttemptStage.ENDED)
        await self._timers.write_status()
        state.roster.broadcast(End(code=int(code), reason=reason))
        await state.roster.wait_until_disconnected(HANG_UP_SECONDS)
        return int(code)
