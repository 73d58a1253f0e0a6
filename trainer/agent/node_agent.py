"""The agent of one node: owns the fork server and the ranks, and reports their state to the coordinator."""

import asyncio
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from trainer.agent.control.control_server import AGENT_TIMEOUT_SECONDS, POLL_SECONDS, PeerTimeout
from trainer.agent.control.tcp_transport import CoordinatorPeer, WireError
from trainer.agent.flight.recorder import FlightSockets
from trainer.agent.fork_server import code_at_start, launch_order
from trainer.agent.fork_server.launch_order import RankLauncher
from trainer.agent.fork_server.link import ForkServerLink
from trainer.agent.fork_server.rank_binding import shorten_cores
from trainer.agent.nodes import preflight, roster
from trainer.agent.nodes.node_setup import prepare_node
from trainer.agent.processes import background_tasks, proc
from trainer.agent.processes.background_tasks import SupervisedTasks, describe_error
from trainer.agent.processes.log_pipes import LogPipes
from trainer.agent.rank_processes import local_ranks
from trainer.agent.rank_processes.checkpoint_writers import CheckpointWriters
from trainer.agent.rank_processes.local_ranks import LocalRank, LocalRanks
from trainer.agent.rank_processes.rank_exit import add_local_facts, complete_end, end_launcher, share_end, write_end
from trainer.agent.watch.evidence import EvidenceCollector
from trainer.agent.watch.hang_limits import ReportSchedule
from trainer.agent.watch.program_notice import ProgramNotice, describe_program
from trainer.agent.watch.program_watch import watch_programs
from trainer.agent.watch.sampling import Sampler, no_writer
from trainer.protocol.config import JobConfig
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.outcome import AgentEnd, ExitCode
from trainer.protocol.failures.rank_end import RankEnd, signal_name
from trainer.protocol.messages import agents
from trainer.protocol.messages.ranks import (
    ForkServerReady,
    FromForkServer,
    ImportFailed,
    RankGone,
    RankSpawned,
    RendezvousStore,
    Saves,
    SpawnFailed,
    Speeds,
    StartRank,
)
from trainer.protocol.node_identity import NodeIdentity
from trainer.protocol.rank_progress.progress import StopReason
from trainer.protocol.rank_variables import rank_python
from trainer.protocol.run_dir import AttemptDir, RunDir

_LOOK_SECONDS, _MAX_STARTUP_FAILURES = 0.1, 3


class NodeAgent:
    """Connects the coordinator to the processes of this node."""

    def __init__(
        self, *, run: RunDir, attempt: AttemptDir, config: JobConfig, identity: NodeIdentity, events: EventLog,
        environ: Mapping[str, str], logs: LogPipes,
    ) -> None:  # fmt: skip
        self._run, self._attempt, self._config, self._node = run, attempt, config, identity
        self._events, self._environ, self._logs = events, environ, logs
        self.other_children: tuple[int, ...] = ()  # children of this process other than ranks
        self._link: ForkServerLink | None = None
        self._ranks: LocalRanks | None = None
        self._sampler: Sampler | None = None
        self._sockets = FlightSockets()
        self._writers: CheckpointWriters | None = None
        self._node_rank: int | None = None  # None for a spare
        self._per_node = False  # whether the command is started once and starts this node's ranks
        self._startup_failures, self._stop_signal_sent, self._failed, self._warm = 0, False, False, False
        self._reports = ReportSchedule(identity.node, config.cluster.all_nodes, time.monotonic())
        self._tasks = SupervisedTasks()
        self._last_exit_report: asyncio.Task[None] | None = None
        self._early: list[int] = []
        self._waits = ""  # what the node's preparation waits for
        self._bound: dict[str, str] = {}  # rank -> cores
        self._notice: ProgramNotice | None = None
        self._peer: CoordinatorPeer
        self._launcher: RankLauncher
        self._evidence: EvidenceCollector

    async def serve(self, peer: CoordinatorPeer) -> int:
        """Serve until the coordinator ends the attempt or is lost, and return the agent's exit code."""
        self._peer = peer
        self._evidence = EvidenceCollector(
            self._attempt, self._node.node, self._sockets, on_gpus=bool(self._config.cluster.gpus_per_node)
        )
        for number in self._early:
            self.on_signal(number)
        try:
            # These run while listening: a silent agent counts as lost, and a driver or file system may delay preflight
            # longer.
            self._tasks.spawn(self._report_progress())
            self._tasks.spawn(self._run_preflight())
            return await self._listen()
        except Exception as error:  # noqa: BLE001  # outermost edge: the coordinator gets the cause
            self.fail(error)
            raise
        finally:
            self._tasks.cancel()
            await self._shut_down()

    def fail(self, error: BaseException) -> None:
        """Report an exception in this agent, once. An agent without one of its tasks would only seem alive."""
        if not self._failed:
            self._failed = True
            reason = f"the agent of {self._node.name} failed: {describe_error(error)}"
            self._peer.send(agents.AgentFailed(reason=reason))

    async def _run_preflight(self) -> None:
        """Report this node's faults or, if it has none, start its fork server."""
        folder = self._run.path
        faults = await self._prepare()
        faults += await background_tasks.start_detached(lambda: preflight.examine(folder, self._config))
        ahead = await background_tasks.start_detached(lambda: preflight.ahead_of_files(folder))
        reasons = "; ".join(fault.reason for fault in faults)
        node = self._node
        self._events.write(EventKind.PREFLIGHT, node=node.node, name=node.name, ok=not faults, reason=reasons)
        machine, wall = roster.identity(), time.time()
        self._peer.send(agents.PreflightReport(faults=tuple(faults), wall=wall, machine=machine, ahead_of_files=ahead))
        if not faults:
            self._start_fork_server()

    async def _prepare(self) -> list[agents.PreflightFault]:
        """Prepare the node for its ranks, and return the faults."""
        gpus = launch_order.gpus(self._node, self._config, self._environ)
        visible = {**self._environ, **self._config.env, **gpus}.get("CUDA_VISIBLE_DEVICES")

        def note_wait(lock: Path) -> None:
            self._waits = f"waits for another process that unpacks {self._config.cluster.stage.archive} (lock {lock})"
            _log(self._waits)

        prepared, faults = await background_tasks.start_detached(
            lambda: prepare_node(self._config, self._run.name, self._environ, visible, note_wait)
        )
        self._waits = ""
        per_node = await background_tasks.start_detached(lambda: launch_order.is_per_node(self._run, self._config))
        self._environ = {**self._environ, **prepared.variables}
        self._launcher = RankLauncher(
            self._run, self._attempt, self._config, self._node, self._environ, self._peer.host, self._sockets,
            prepared.topology, per_node=per_node,
        )  # fmt: skip
        self._per_node = per_node
        if prepared.variables:
            found = prepared.to_json()
            self._events.write(EventKind.NODE_PREPARED, node=self._node.node, name=self._node.name, **found)
            staged = f"staged {found['staged']} in {found['seconds']} s; " if prepared.staged else ""
            _log(staged + " ".join(f"{name}={value}" for name, value in prepared.variables.items()))
        return faults

    def on_signal(self, number: int) -> None:
        """Forward a signal from Slurm or a person to the coordinator, which decides what it means."""
        if hasattr(self, "_peer"):
            self._peer.send(agents.SignalReceived(name=signal_name(number)))
        else:
            self._early.append(number)

    async def _listen(self) -> int:
        timeout = PeerTimeout(time.monotonic())
        while True:
            try:
                message = await asyncio.wait_for(self._peer.receive(), POLL_SECONDS)
            except TimeoutError:
                if timeout.seconds_silent(time.monotonic()) < AGENT_TIMEOUT_SECONDS:
                    continue
                return await self._lost_coordinator(AgentEnd.SILENT, f"it was silent for {AGENT_TIMEOUT_SECONDS:.0f} s")
            except WireError as error:
                return await self._lost_coordinator(AgentEnd.GONE, str(error))
            if message is None:
                return await self._lost_coordinator(AgentEnd.GONE, "the connection ended")
            timeout.record_message(time.monotonic())
            if isinstance(message, agents.End):
                return message.code
            self._handle(message)

    async def _lost_coordinator(self, end: AgentEnd, reason: str) -> int:
        self._events.write(EventKind.DECISION, action="leave", reason=f"the coordinator is lost: {reason}")
        _log(f"the coordinator is lost ({reason}): ending this node's ranks")
        await proc.write_agent_report(self._attempt, self._node, end, reason)
        return ExitCode.RETRY

    def _handle(self, message: agents.ToAgent) -> None:
        ranks = self._ranks
        match message:
            case agents.NodeRank():
                self._take_node_rank(message.node_rank)
            case agents.StartGeneration():
                self._take_node_rank(message.node_rank)
                self._start_generation(message)
            case agents.AskStop():
                self._ask_stop(message.reason, message.seconds)
            case agents.ReportOften():
                self._reports.attend(message.seconds, time.monotonic())
            case agents.KillGeneration():
                self._kill(message.generation)
            case agents.GenerationStore() if ranks is not None and ranks.generation == message.generation:
                ranks.forward_store(message.store)
            case agents.ExpectStop() if ranks is not None:
                ranks.expect_stop(time.monotonic() + message.seconds)
            case agents.QueryFlights() | agents.CollectEvidence() if ranks is not None and self._sampler is not None:
                self._tasks.spawn(self._evidence.collect(message, ranks, self._sampler, self._peer))
            case agents.InjectFault() if ranks is not None and local_ranks.is_here(message, ranks, self._node_rank):
                self._inject(message, ranks)

    def _inject(self, order: agents.InjectFault, ranks: LocalRanks) -> None:
        if ranks.awaits_program(order) and ranks is self._ranks:  # the fault is for the rank, not for its launcher
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._inject, order, ranks)
            return
        step = None if self._config.command else ranks.summary().step
        rank = None if order.kind in local_ranks.AGENT_KINDS else order.at
        self._events.write(EventKind.DRILL, kind=order.kind, rank=rank, node=self._node.name, step=step)
        local_ranks.inject(order, ranks)

    # -- the fork server ---------------------------------------------------------------------------------------------

    def _start_fork_server(self) -> None:
        self._link = ForkServerLink(
            attempt=self._attempt,
            environ={**self._environ, **self._config.env, **launch_order.gpus(self._node, self._config, self._environ)},
            output=self._output(),
            on_message=self._on_fork_server_message,
            on_lost=self._on_fork_server_lost,
            # A program's fork server imports nothing of the ranks, so it keeps the agent's interpreter.
            python=sys.executable if self._config.command else rank_python(self._environ),
        )

    def _take_node_rank(self, node_rank: int) -> None:
        """Take this node rank and start its writers before step 1. A user's own program needs no writers."""
        if self._node_rank == node_rank:
            return
        self._node_rank = node_rank
        if not self._config.command:
            self._writers = CheckpointWriters(
                self._local_ranks(), {**self._environ, **self._config.env}, self._output()
            )

    def _output(self) -> int:
        return self._logs.descriptor(self._attempt.agent_log(self._node.node))

    def _local_ranks(self) -> range:
        assert self._node_rank is not None
        per_node = self._config.cluster.ranks_per_node
        return range(self._node_rank * per_node, (self._node_rank + 1) * per_node)

    def _on_fork_server_message(self, message: FromForkServer, descriptors: list[int]) -> None:
        match message:
            case ForkServerReady():
                self._startup_failures = 0
                code_at_start.write_events(self._events, self._node.node, message)
                self._warm = message.warm
                self._peer.send(agents.Ready(warm=message.warm))
            case ImportFailed():
                self._startup_failures = _MAX_STARTUP_FAILURES
                _log(message.traceback)
                self._peer.send(agents.Unloadable(exception=message.exception, message=message.message))
            case RankSpawned():
                self._on_spawned(message, descriptors[0])
            case RankEnd():
                self._on_ended(message)
            case RankGone():
                self._gone(message.rank)
            case SpawnFailed():
                assert self._link is not None
                self._link.kill(f"rank {message.rank} could not be started: {message.reason}")

    def _on_fork_server_lost(self, reason: str) -> None:
        died = {"warm": False, "reason": f"died: {reason}", "seconds": 0.0}
        self._events.write(EventKind.FORK_SERVER, node=self._node.node, **died)
        self._peer.send(agents.Unready(reason=reason))
        self._tasks.spawn(self._replace_fork_server(reason))

    async def _replace_fork_server(self, reason: str) -> None:
        """Kill and reap the ranks of a dead fork server, now children of this process, then start a new one."""
        ranks = self._ranks
        if ranks is not None:
            if not ranks.all_gone():
                # First report ranks that exited before the fork server.
                await _finish(self._last_exit_report)
                self._peer.send(agents.ForkServerDied(generation=ranks.generation, reason=reason))
            await local_ranks.kill_orphaned_ranks(ranks, self._on_ended, self._gone, self._pids_of_helpers())
        self._startup_failures += 1
        if self._startup_failures < _MAX_STARTUP_FAILURES:
            self._start_fork_server()
        elif self._startup_failures == _MAX_STARTUP_FAILURES:
            again = f"its fork server died {_MAX_STARTUP_FAILURES} times in a row: {reason}"
            self._peer.send(agents.AgentFailed(reason=again))

    def _pids_of_helpers(self) -> tuple[int, ...]:
        return (*self.other_children, *(self._writers.pids() if self._writers is not None else ()))

    # -- a generation ------------------------------------------------------------------------------------------------

    def _start_generation(self, start: agents.StartGeneration) -> None:
        self._forget_ranks()
        self._events.generation = start.generation
        ranks = self._ranks = LocalRanks(start.generation, self._local_ranks(), per_node=self._per_node)
        writer = self._writers.writer_pid if self._writers is not None else no_writer
        programs = watch_programs(self._attempt, self._config, ranks, self._logs) if self._config.command else None
        self._sampler = Sampler(ranks, self._node.name, writer, programs=programs)
        if self._link is None or self._link.lost:
            # It died after the other nodes were ready; its replacement is for the next generation.
            ranks.mark_never_started()
            self._peer.send(agents.ForkServerDied(generation=start.generation, reason="before its ranks were started"))
            return
        self._report_binding(start.node_rank, ranks)
        if self._per_node:
            self._tasks.spawn(local_ranks.share_log(self._attempt, ranks))
        for local_rank, local in enumerate(ranks.by_rank.values()):
            if local_rank == 0 or not self._per_node:
                order = self._launcher.launch_order(start, local_rank, ranks.files(self._sockets))
                # If the fork server is lost here, `_on_fork_server_lost` runs next and kills these ranks as orphans.
                self._start_rank(order, local, local_rank)
            self._watch_control_socket(local)
            local.close_theirs()
        if start.generation > 1 and not self._warm and self._node.node == 0:  # its ranks import everything again
            self._tasks.spawn(code_at_start.note_changes(self._attempt, self._config, self._events))

    def _report_binding(self, node_rank: int, ranks: LocalRanks) -> None:
        cores, reason = self._launcher.bind(node_rank)
        named = {str(rank): shorten_cores(each) for rank, each in zip(ranks.by_rank, cores, strict=True)}
        if named != self._bound:
            self._bound = named
            at = {"node": self._node.node, "name": self._node.name}
            self._events.write(EventKind.RANKS_BOUND, **at, reason=reason, cores=named)

    def _start_rank(self, order: StartRank, local: LocalRank, local_rank: int) -> None:
        assert self._link is not None
        output = self._logs.descriptor(self._attempt.rank_log(local.rank))
        if self._writers is None:
            self._link.start_rank(order, [output, *(local.descriptors() if order.spec is not None else ())])
            return
        with self._writers.connection(local_rank) as ends:
            self._link.start_rank(order, [output, *local.descriptors(), *ends])

    def _watch_control_socket(self, local: LocalRank) -> None:
        loop, ranks = asyncio.get_running_loop(), self._ranks
        assert ranks is not None

        def read() -> None:
            match message := local.receive_message():
                case None:
                    loop.remove_reader(local.control)
                case RendezvousStore():
                    self._peer.send(agents.GenerationStore(generation=ranks.generation, store=message))
                case Speeds():
                    self._peer.send(agents.RankSpeeds(generation=ranks.generation, rank=local.rank, speeds=message))
                case Saves():
                    self._peer.send(agents.RankSaves(generation=ranks.generation, rank=local.rank, saves=message))

        loop.add_reader(local.control, read)

    def _on_spawned(self, spawned: RankSpawned, handle: int) -> None:
        assert self._ranks is not None
        local = self._ranks.by_rank[spawned.rank]
        local.handle = handle
        for one in self._ranks.ranks_of_process(spawned.rank):
            one.pid = spawned.pid
        asyncio.get_running_loop().add_reader(handle, self._on_pid_dead, self._ranks, local)

    def _on_pid_dead(self, ranks: LocalRanks, local: LocalRank) -> None:
        """Await the exit report of a rank that the kernel reports as dead, and kill a fork server that sends none."""
        assert local.handle is not None
        asyncio.get_running_loop().remove_reader(local.handle)

        def doubt() -> None:
            if not local.ended and ranks is self._ranks and self._link is not None:
                self._link.kill(f"it did not collect rank {local.rank}")

        asyncio.get_running_loop().call_later(local_ranks.OBEY_SECONDS, doubt)

    def _on_ended(self, end: RankEnd) -> None:
        """Report everything known about a rank's end."""
        assert self._ranks is not None
        ranks, command = self._ranks, bool(self._config.command)
        for one in ranks.ranks_of_process(end.rank):
            one.ended = True
        first_dead = ranks.first_dead() if ranks.per_node and end.exit_code else None
        end = end if first_dead is None else replace(end, rank=first_dead)
        local = ranks.by_rank[end.rank]
        end = add_local_facts(end, local, ranks, self._node.name, command=command)
        if not ranks.per_node:  # otherwise the launcher's report is read first
            write_end(self._events, end, ranks)
        self._peer.send(ranks.summary())
        self._last_exit_report = self._tasks.spawn(self._report_end(ranks, local, end, self._last_exit_report))

    async def _report_end(
        self, ranks: LocalRanks, local: LocalRank, end: RankEnd, before: asyncio.Task[None] | None
    ) -> None:  # fmt: skip
        """Complete and report a rank's end, but report earlier exits first, since the first one matters most."""
        command = bool(self._config.command)
        end = await complete_end(self._attempt, end, ranks, command=command, logs=self._logs)
        await _finish(before)
        if ranks.per_node:
            write_end(self._events, end, ranks)
        if ranks is self._ranks:
            for each in share_end(end, ranks):
                self._peer.send(each)
                ranks.by_rank[each.rank].reported = True
            self._send_gone(ranks)

    def _gone(self, rank: int) -> None:
        """Record that this rank and all of its children are gone."""
        assert self._ranks is not None
        for one in self._ranks.ranks_of_process(rank):
            one.gone = True
        self._send_gone(self._ranks)

    def _send_gone(self, ranks: LocalRanks) -> None:
        if ranks.all_reported():
            self._peer.send(agents.GenerationGone(generation=ranks.generation))

    # -- stopping ----------------------------------------------------------------------------------------------------

    def _ask_stop(self, reason: StopReason, seconds: float) -> None:
        if self._ranks is None:
            return
        self._ranks.ask(reason, time.monotonic() + seconds)
        # A signal would kill a program's data loader workers before it has saved.
        stopping = reason > StopReason.SAVE_AND_GO_ON and not self._ranks.answer_requests()
        if self._config.command and stopping and not self._stop_signal_sent and self._link is not None:
            self._stop_signal_sent = True
            self._link.signal_ranks(signal.Signals[f"SIG{self._config.watch.stop_signal}"])

    def _kill(self, generation: int) -> None:
        ranks = self._ranks
        if ranks is None or ranks.generation != generation or ranks.all_reported():
            self._peer.send(agents.GenerationGone(generation=generation))
            return
        ranks.killed = True
        if self._link is not None:  # without a fork server they are already being killed as orphans
            politely = bool(self._config.command) and not self._stop_signal_sent
            self._tasks.spawn(local_ranks.kill_generation(ranks, self._link, politely=politely))

    async def _shut_down(self) -> None:
        clean = self._link is None or await self._link.stop()
        if self._ranks is not None and not clean:
            helpers = self._pids_of_helpers()
            await local_ranks.kill_orphaned_ranks(self._ranks, lambda *_: None, lambda _: None, helpers)
        self._forget_ranks()
        self._sockets.close()
        if self._writers is not None:
            await self._writers.close()

    def _forget_ranks(self) -> None:
        loop = asyncio.get_running_loop()
        for local in self._ranks.by_rank.values() if self._ranks is not None else ():
            loop.remove_reader(local.control)
            if local.handle is not None:
                loop.remove_reader(local.handle)
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = self._sampler = None

    # -- reporting ---------------------------------------------------------------------------------------------------

    async def _report_progress(self) -> None:
        """Check ten times a second whether a report is due, and report immediately after a generation's first step."""
        reported = 0
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now, ranks, sampler = time.monotonic(), self._ranks, self._sampler
            if ranks is None or sampler is None:
                if self._reports.due(now):
                    self._peer.send(agents.ProgressReport(generation=0, waits=self._waits))
                continue
            if ranks.find_programs() and self._link is not None:
                self._tasks.spawn(end_launcher(ranks, self._attempt, self._link))
            self._note_program(ranks, now)
            summary = ranks.summary()
            first = reported != ranks.generation and summary.stepped
            reported = ranks.generation if first else reported
            if self._reports.due(now, closely=sampler.sees_halted(), at_once=first):
                self._peer.send(sampler.report(summary))

    def _note_program(self, ranks: LocalRanks, now: float) -> None:
        """Report once how the program is watched, and again only if that changes."""
        if not self._config.command or self._node.node:
            return
        local = next(iter(ranks.by_rank.values()))
        notice = describe_program(
            local.cell.program(), instrument=self._config.watch.instrument, stepped=local.has_stepped(),
            seconds=now - ranks.started,
        )  # fmt: skip
        if notice is not None and (self._notice is None or notice.instrumented != self._notice.instrumented):
            self._notice = notice
            self._events.write(EventKind.PROGRAM_WATCHED, **asdict(notice))


async def _finish(task: asyncio.Task[None] | None) -> None:
    if task is not None and not task.done():
        await asyncio.wait([task])


def _log(text: str) -> None:
    sys.stderr.write(f"orch-agent: {text}\n")
