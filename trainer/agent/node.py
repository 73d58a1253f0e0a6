"""The agent of one node: obeys the coordinator, owns the nursery and the ranks, reports what happens to them."""

import asyncio
import signal
import sys
import time
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any

from checkpointing.durable import dump_line
from trainer.agent.control.silence import SLICE_SECONDS, Silence
from trainer.agent.control.wire import Message, Peer, WireError
from trainer.agent.evidence.witness import Witness
from trainer.agent.fleet import machine_identity, preflight
from trainer.agent.fleet.roster import SILENCE_SECONDS
from trainer.agent.flight.recorder import Sockets
from trainer.agent.processes import apart, burial, cores, ending, mischief, reports
from trainer.agent.processes.births import Births, Wishes
from trainer.agent.processes.farewell import Parting, farewell, of_shell
from trainer.agent.processes.local_ranks import LocalRank, LocalRanks
from trainer.agent.processes.log_pipes import LogPipes
from trainer.agent.processes.nursery_link import NurseryLink
from trainer.agent.processes.obituaries import Obituaries
from trainer.agent.processes.scribes import Scribes
from trainer.agent.watch.blame import exit_words, signal_name
from trainer.agent.watch.sampling import Sampler, no_writer, report_seconds
from trainer.contract.config import JobConfig
from trainer.contract.events import EventKind, EventLog
from trainer.contract.outcome import AgentEnd, ExitCode
from trainer.contract.place import Place
from trainer.contract.progress import StopReason
from trainer.contract.run_dir import AttemptDir, RunDir

_LOOK_SECONDS = 0.1
_MOST_STILLBORN = 3
_STORE = ("host", "port", "key")


class NodeAgent:
    """Everything between one connection to the coordinator and the processes of this node."""

    def __init__(
        self, *, run: RunDir, attempt: AttemptDir, config: JobConfig, place: Place, events: EventLog,
        environ: Mapping[str, str], logs: LogPipes,
    ) -> None:  # fmt: skip
        self._run, self._attempt, self._config, self._place = run, attempt, config, place
        self._events, self._environ, self._logs = events, environ, logs
        self.spared: tuple[int, ...] = ()  # children of this process that are no rank's
        self._link: NurseryLink | None = None
        self._ranks: LocalRanks | None = None
        self._sampler: Sampler | None = None
        self._sockets = Sockets()
        self._scribes: Scribes | None = None
        self._seat: int | None = None  # of a spare: none
        self._stillborn = 0
        self._wishes = Wishes()
        self._told_command = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._obituaries = Obituaries(self._spawn)
        self._early: list[int] = []
        self._peer: Peer
        self._births: Births
        self._witness: Witness

    async def serve(self, peer: Peer) -> int:
        """Work until the coordinator says it is over, or is lost; returns the agent's exit code."""
        self._peer = peer
        self._witness = Witness(self._attempt, self._place.node, self._sockets)
        self._births = Births(
            self._run, self._attempt, self._config, self._place, self._environ, peer.host, self._sockets
        )
        for number in self._early:
            self.signalled(number)
        try:
            # Whoever says nothing is lost, and a driver or a file system may keep the examination for longer.
            self._spawn(self._watch())
            self._spawn(self._examine())
            return await self._listen()
        finally:
            for task in self._tasks:
                task.cancel()
            await self._leave()

    async def _examine(self) -> None:
        """Tell what is wrong with this node; a fit one gets its nursery."""
        faults = await apart.begin(lambda: preflight.examine(self._run.path, self._config))
        reasons = "; ".join(fault.reason for fault in faults)
        self._events.write(
            EventKind.PREFLIGHT, node=self._place.node, name=self._place.name, ok=not faults, reason=reasons
        )
        told = [fault.to_json() for fault in faults]
        self._peer.send("fit", faults=told, wall=time.time(), machine=machine_identity.identity())
        if not faults:
            self._start_nursery()

    def signalled(self, number: int) -> None:
        """Slurm, or a person, sent this agent a signal: the coordinator decides what it means."""
        if hasattr(self, "_peer"):
            self._peer.send("signal", name=signal_name(number))
        else:
            self._early.append(number)

    async def _listen(self) -> int:
        silence = Silence(time.monotonic())
        while True:
            try:
                message = await asyncio.wait_for(self._peer.receive(), SLICE_SECONDS)
            except TimeoutError:
                if silence.lasted(time.monotonic()) < SILENCE_SECONDS:
                    continue
                return await self._lost_coordinator(AgentEnd.SILENT, f"it was silent for {SILENCE_SECONDS:.0f} s")
            except WireError as error:
                return await self._lost_coordinator(AgentEnd.GONE, str(error))
            if message is None:
                return await self._lost_coordinator(AgentEnd.GONE, "the connection ended")
            silence.heard(time.monotonic())
            if message["say"] == "end":
                return int(message["code"])
            self._obey(message)

    async def _lost_coordinator(self, end: AgentEnd, reason: str) -> int:
        self._events.write(EventKind.DECISION, action="leave", reason=f"the coordinator is lost: {reason}")
        _note(f"the coordinator is lost ({reason}): ending this node's ranks")
        await reports.leave(self._attempt, self._place, end, reason)
        return ExitCode.RETRY

    def _obey(self, message: Message) -> None:
        match message["say"]:
            case "seat":
                self._sit(message["seat"])
            case "start":
                self._sit(message["seat"])
                self._wishes = Wishes.from_message(message)
                self._begin(message["generation"], message["master"])
            case "store" if self._ranks and self._ranks.generation == message["generation"]:
                self._ranks.tell(dump_line({"word": "store"} | {key: message[key] for key in _STORE}).encode(), but=0)
            case "ask":
                self._ask(StopReason(message["reason"]), message["seconds"])
            case "due" if self._ranks is not None:
                self._ranks.expect_stop(time.monotonic() + message["seconds"])
            case "flight" | "evidence" | "stacks" if self._ranks is not None and self._sampler is not None:
                self._spawn(self._witness.testify(message, self._ranks, self._sampler, self._peer))
            case "drill" if self._ranks is not None and mischief.is_ours(message, self._ranks, self._seat):
                step = self._ranks.summary()["step"]
                rank = None if message["kind"] in mischief.OF_AGENTS else message["at"]
                self._events.write(EventKind.DRILL, kind=message["kind"], rank=rank, node=self._place.name, step=step)
                mischief.commit(message, self._ranks)
            case "kill":
                self._kill(message["generation"])

    # -- the nursery -------------------------------------------------------------------------------------------------

    def _start_nursery(self) -> None:
        self._link = NurseryLink(
            run_dir=self._run.path,
            environ={**self._environ, **self._config.env, **cores.gpus(self._place, self._config, self._environ)},
            output=self._output(),
            on_packet=self._hear_nursery,
            on_lost=self._lost_nursery,
        )

    def _sit(self, seat: int) -> None:
        """Take this seat for good. Writers begin before step 1; a user's own script saves in its own way."""
        if self._seat == seat:
            return
        self._seat = seat
        if not self._config.command:
            self._scribes = Scribes(self._local_ranks(), {**self._environ, **self._config.env}, self._output())

    def _output(self) -> int:
        return self._logs.descriptor(self._attempt.agent_log(self._place.node))

    def _local_ranks(self) -> range:
        assert self._seat is not None
        per_node = self._config.cluster.ranks_per_node
        return range(self._seat * per_node, (self._seat + 1) * per_node)

    def _hear_nursery(self, packet: dict[str, Any], descriptors: list[int]) -> None:
        match packet["say"]:
            case "ready":
                self._stillborn = 0
                facts = {key: packet[key] for key in ("warm", "reason", "seconds")}
                self._events.write(EventKind.NURSERY, node=self._place.node, **facts)
                self._peer.send("ready", warm=packet["warm"])
            case "unloadable":
                self._stillborn = _MOST_STILLBORN
                _note(packet["traceback"])
                self._peer.send("unloadable", exception=packet["exception"], message=packet["message"])
            case "born":
                self._born(packet, descriptors[0])
            case "exit":
                self._exited(packet["rank"], packet["exit_code"], packet["signal"])
            case "gone":
                self._gone(packet["rank"])
            case "unborn":
                assert self._link is not None
                self._link.kill(f"rank {packet['rank']} could not be started: {packet['reason']}")

    def _lost_nursery(self, reason: str) -> None:
        self._events.write(EventKind.NURSERY, node=self._place.node, warm=False, reason=f"died: {reason}", seconds=0.0)
        self._peer.send("unready", reason=reason)
        self._spawn(self._bury_and_replace(reason))

    async def _bury_and_replace(self, reason: str) -> None:
        """Ranks of a dead nursery are this process's children now: end them, collect them, then begin anew."""
        ranks = self._ranks
        if ranks is not None:
            if not ranks.all_gone():
                # Who ended before the nursery did is heard first.
                await self._obituaries.all_told()
                self._peer.send("broken", generation=ranks.generation, reason=reason)
            spare = self._spare()
            await burial.bury(ranks, self._exited, self._gone, spare)
        self._stillborn += 1
        if self._stillborn < _MOST_STILLBORN:
            self._start_nursery()
        elif self._stillborn == _MOST_STILLBORN:
            self._peer.send("barren", reason=f"its nursery died {_MOST_STILLBORN} times in a row: {reason}")

    def _spare(self) -> tuple[int, ...]:
        return (*self.spared, *(self._scribes.pids() if self._scribes is not None else ()))

    # -- a generation ------------------------------------------------------------------------------------------------

    def _begin(self, generation: int, master: list[Any] | None) -> None:
        self._forget_ranks()
        self._events.generation = generation
        assert self._seat is not None
        ranks = self._ranks = LocalRanks(generation, self._local_ranks())
        writer = self._scribes.pid_of if self._scribes is not None else no_writer
        self._sampler = Sampler(ranks, self._place.name, writer)
        if self._link is None or self._link.lost:
            # It died when the other nodes were ready: its replacement belongs to the next generation.
            ranks.never_began()
            self._peer.send("broken", generation=generation, reason="before its ranks were started")
            return
        for local_rank, local in enumerate(ranks.by_rank.values()):
            order = self._births.order(self._seat, local_rank, ranks.generation, master, self._wishes)
            # A nursery that is lost in here tells so itself, and what was not started is buried with it.
            self._start_rank(order, local, local_rank)
            self._listen_to(local)
            assert local.theirs is not None
            local.theirs.close()
            local.theirs = None

    def _start_rank(self, order: dict[str, Any], local: LocalRank, local_rank: int) -> None:
        assert self._link is not None
        output = self._logs.descriptor(self._attempt.rank_log(local.rank))
        if self._scribes is None:
            self._link.start_rank(order, [output, *(local.descriptors() if order["spec"] else ())])
            return
        with self._scribes.connection(local_rank) as ends:
            self._link.start_rank(order, [output, *local.descriptors(), *ends])

    def _listen_to(self, local: LocalRank) -> None:
        loop, ranks = asyncio.get_running_loop(), self._ranks
        assert ranks is not None

        def read() -> None:
            message = local.hear()
            if message is None:
                loop.remove_reader(local.control)
            elif message.get("word") == "store":
                self._peer.send("store", generation=ranks.generation, **{name: message[name] for name in _STORE})
            elif message.get("word") == "fitness":
                figures = {key: message[key] for key in ("matmul", "memory", "pairs")}
                self._peer.send("fitness", generation=ranks.generation, rank=local.rank, **figures)

        loop.add_reader(local.control, read)

    def _born(self, packet: dict[str, Any], handle: int) -> None:
        assert self._ranks is not None
        local = self._ranks.by_rank[packet["rank"]]
        local.pid, local.handle = packet["pid"], handle
        asyncio.get_running_loop().add_reader(handle, self._died, self._ranks, local)

    def _died(self, ranks: LocalRanks, local: LocalRank) -> None:
        """The kernel says that this rank is dead; its nursery says how within milliseconds, if it can."""
        assert local.handle is not None
        asyncio.get_running_loop().remove_reader(local.handle)

        def doubt() -> None:
            if not local.ended and ranks is self._ranks and self._link is not None:
                self._link.kill(f"it did not collect rank {local.rank}")

        asyncio.get_running_loop().call_later(ending.OBEY_SECONDS, doubt)

    def _exited(self, rank: int, exit_code: int | None, number: int | None) -> None:
        """A rank has ended: tell everything that is known about it."""
        assert self._ranks is not None
        local = self._ranks.by_rank[rank]
        local.ended = True
        generation, command = self._ranks.generation, bool(self._config.command)
        if command:
            exit_code, number = of_shell(exit_code, number)
        reason = "killed by its agent" if self._ranks.killed else exit_words(exit_code, number)
        self._events.write(
            EventKind.RANK_EXITED, rank=rank, node=self._place.name, exit_code=exit_code, signal=number, reason=reason
        )
        self._peer.send("progress", generation=generation, **self._ranks.summary())
        left = Parting.of(local)
        end = partial(farewell, self._attempt, generation, left, exit_code, number, command=command, logs=self._logs)
        self._obituaries.add(end, partial(self._tell_end, self._ranks, local))

    def _tell_end(self, ranks: LocalRanks, local: LocalRank, known: dict[str, Any]) -> None:
        if ranks is self._ranks:
            self._peer.send("exit", generation=ranks.generation, rank=local.rank, **known)
            local.told = True
            self._tell_gone(ranks)

    def _gone(self, rank: int) -> None:
        """Nothing is left of this rank, its own children included."""
        assert self._ranks is not None
        self._ranks.by_rank[rank].gone = True
        self._tell_gone(self._ranks)

    def _tell_gone(self, ranks: LocalRanks) -> None:
        if ranks.all_told():
            self._peer.send("gone", generation=ranks.generation)

    # -- stopping ----------------------------------------------------------------------------------------------------

    def _ask(self, reason: StopReason, seconds: float | None) -> None:
        if self._ranks is None:
            return
        self._ranks.ask(reason, 0.0 if seconds is None else time.monotonic() + seconds)
        stopping = reason > StopReason.SAVE_AND_GO_ON
        if self._config.command and stopping and not self._told_command and self._link is not None:
            self._told_command = True
            self._link.signal_ranks(signal.SIGTERM)

    def _kill(self, generation: int) -> None:
        ranks = self._ranks
        if ranks is None or ranks.generation != generation or ranks.all_told():
            self._peer.send("gone", generation=generation)
            return
        ranks.killed = True
        if self._link is not None:  # without one they are being buried
            politely = bool(self._config.command) and not self._told_command
            self._spawn(ending.end(ranks, self._link, politely=politely))

    async def _leave(self) -> None:
        """Leave no process behind."""
        clean = self._link is None or await self._link.stop()
        if self._ranks is not None and not clean:
            spare = self._spare()
            await burial.bury(self._ranks, lambda *_: None, lambda _: None, spare)
        self._forget_ranks()
        self._sockets.close()
        if self._scribes is not None:
            await self._scribes.close()

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

    async def _watch(self) -> None:
        """Look ten times a second, report now and then, and at once when a generation has made its first step."""
        told, waited = 0, 0.0
        pause = report_seconds(self._config.cluster.all_nodes)
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            waited += _LOOK_SECONDS
            ranks, sampler = self._ranks, self._sampler
            if ranks is None or sampler is None:
                if waited >= pause:
                    waited = 0.0
                    self._peer.send("progress", generation=0)
                continue
            summary = ranks.summary()
            first = told != ranks.generation and summary["stepped"]
            told = ranks.generation if first else told
            if first or waited >= pause:
                waited = 0.0
                self._peer.send("progress", generation=ranks.generation, **summary, **sampler.report())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()  # our own bug: the loop's handler reports it


def _note(text: str) -> None:
    sys.stderr.write(f"orch-agent: {text}\n")
    sys.stderr.flush()
