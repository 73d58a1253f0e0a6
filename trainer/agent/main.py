"""One agent: the entry point that submitit calls on every node."""

import asyncio
import contextlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from setproctitle import setproctitle

from checkpointing.durable import read_json
from trainer.agent.control import address
from trainer.agent.control.wire import Peer, WireError, connect
from trainer.agent.coordination.coordinator import Coordinator
from trainer.agent.coordination.gate import Refused, wait_for_go
from trainer.agent.node import NodeAgent
from trainer.agent.processes import lineage
from trainer.agent.watch.blame import signal_name
from trainer.contract.config import JobConfig, load
from trainer.contract.events import EventKind, EventLog
from trainer.contract.launch import LaunchToken
from trainer.contract.outcome import ExitCode
from trainer.contract.place import Place, discover
from trainer.contract.run_dir import AttemptDir, RunDir

_HEARD = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
_CONNECT_SECONDS = 60.0


class SurvivingLog(EventLog):
    """An event log whose failure is told on stderr and ends nothing: a full disk must not kill what computes."""

    def write(self, kind: EventKind, /, **data: Any) -> None:
        try:
            super().write(kind, **data)
        except OSError as error:
            sys.stderr.write(f"orch-agent: event {kind} {data} is lost: {error}\n")


def run_agent(run_dir: str, attempt: str) -> NoReturn:
    """Lead or follow this node through one attempt; ends the process with the agent's exit code.

    Leaves by `os._exit`: submitit would otherwise write its own result file and could turn the exit code into 1, and
    a thread that waits for a hung file system would keep the interpreter from leaving.
    """
    code: int = ExitCode.RETRY
    # Never closed, as asyncio.run would: that waits for every thread, and one may wait for a hung file system.
    runner = asyncio.Runner()
    early: list[int] = []
    try:
        # At once: submitit's handlers would requeue the job by themselves.
        for number in _HEARD:
            signal.signal(number, lambda received, _: early.append(received))
        signal.signal(signal.SIGCONT, signal.SIG_IGN)
        # Titles must not cover the environment, by which the processes of a job are found.
        os.environ.setdefault("SPT_NOENV", "1")
        setproctitle("orch-agent")
        run = RunDir(Path(run_dir))
        code = runner.run(Agent(run, run.attempt(int(attempt)), early).live())
    except BaseException:  # noqa: BLE001  # outermost edge
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Agent:
    """One node's part in one attempt."""

    def __init__(self, run: RunDir, attempt: AttemptDir, early: list[int]) -> None:
        self._run, self._attempt, self._early = run, attempt, early
        self._started = time.monotonic()
        self._node: NodeAgent | None = None
        self._main: asyncio.Task[Any] | None = None

    async def live(self) -> int:
        """From the gate to the exit code."""
        self._main = asyncio.current_task()
        self._listen()
        lineage.adopt_orphans()
        try:
            place = discover()
        except (RuntimeError, OSError, KeyError, ValueError) as error:
            sys.stderr.write(f"orch-agent: {error}\n")
            return ExitCode.NEVER_RETRY
        try:
            self._follow_job(place)
            _say_also(self._attempt.agent_log(place.node))
            token = await wait_for_go(self._attempt.go, place, self._attempt.number)
            config = await asyncio.to_thread(self._config, place)
            return await self._work(place, config, token)
        except Refused as refusal:
            return self._refuse(place, str(refusal))
        except asyncio.CancelledError:
            sys.stderr.write("orch-agent: told to end before it began, or its job is gone\n")
            return ExitCode.RETRY

    def _config(self, place: Place) -> JobConfig:
        try:
            config = load(self._run.config)
        except (OSError, ValueError, TypeError) as error:
            raise Refused(f"cannot read the run's configuration: {error}") from error
        if config.cluster.all_nodes != place.nodes:
            raise Refused(f"the job has {place.nodes} node(s), the run is configured for {config.cluster.all_nodes}")
        return config

    # -- signals and the job -----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _HEARD:
            loop.add_signal_handler(number, self._signalled, number)
        for early in self._early:
            loop.call_soon(self._signalled, early)

    def _signalled(self, number: int) -> None:
        sys.stderr.write(f"orch-agent: got {signal_name(number)}\n")
        if self._node is not None:
            self._node.signalled(number)
        elif self._main is not None:
            # Nothing has begun, so there is nothing to save.
            self._main.cancel()

    def _follow_job(self, place: Place) -> None:
        """On one machine the job is submitit's process: when it is gone, so is the job, and nobody else would know."""
        if place.kind != "local":
            return
        handle = os.pidfd_open(int(place.job_id.partition("-")[0]))
        asyncio.get_running_loop().add_reader(handle, self._job_gone, handle)

    def _job_gone(self, handle: int) -> None:
        asyncio.get_running_loop().remove_reader(handle)
        sys.stderr.write("orch-agent: the local job's process is gone\n")
        if self._main is not None:
            self._main.cancel()

    def _refuse(self, place: Place, reason: str) -> int:
        sys.stderr.write(f"orch-agent: refuses to train: {reason}\n")
        # Under its own name: the attempt's agents may be another job's.
        source = f"refused-{place.job_id}-{place.node:04d}"
        log = SurvivingLog(self._attempt.event_file(source), source, self._attempt.number)
        log.write(EventKind.DECISION, action="refuse", reason=reason)
        log.close()
        return ExitCode.NEVER_RETRY

    # -- work --------------------------------------------------------------------------------------------------------

    async def _work(self, place: Place, config: JobConfig, token: LaunchToken) -> int:
        events = self._log(f"agent-{place.node:04d}")
        self._node = NodeAgent(
            run=self._run, attempt=self._attempt, config=config, place=place, events=events, environ=os.environ
        )
        leading = await self._lead(place, config, token) if place.node == 0 else None
        peer = await self._join(place)
        try:
            code = await self._node.serve(peer)
        finally:
            await peer.close()
        return code if leading is None else await leading

    def _log(self, source: str) -> EventLog:
        return SurvivingLog(self._attempt.event_file(source), source, self._attempt.number)

    async def _lead(self, place: Place, config: JobConfig, token: LaunchToken) -> "asyncio.Task[int]":
        """Node 0 leads: its coordinator runs in this loop."""
        coordinator = Coordinator(
            run=self._run, attempt=self._attempt, config=config, place=place, events=self._log("coordinator"),
            token=token, started=self._started,
        )  # fmt: skip
        try:
            host = address.reachable(place.kind, config.cluster.interface)
        except RuntimeError as error:
            raise Refused(str(error)) from error
        await coordinator.open(host)
        return asyncio.get_running_loop().create_task(coordinator.run())

    async def _join(self, place: Place) -> Peer:
        """Connect to the coordinator, as often as it takes for file system and network to show it."""
        give_up = time.monotonic() + _CONNECT_SECONDS
        while True:
            try:
                found = await asyncio.to_thread(read_json, self._attempt.coordinator)
                hello = {"token": found["token"], "node": place.node, "name": place.name}
                return await connect(found["host"], found["port"], {**hello, "attempt": self._attempt.number})
            except WireError as error:
                raise Refused(str(error)) from error
            except (OSError, ValueError, TypeError, KeyError) as error:
                problem = error
            if time.monotonic() >= give_up:
                raise RuntimeError(f"cannot reach the coordinator within {_CONNECT_SECONDS:.0f} s: {problem}")
            await asyncio.sleep(0.2)


def _say_also(log: Path) -> None:
    """Copy what is said on stderr into the agent's log as well: submitit's files are not for users."""
    sys.stderr = _Both(sys.stderr, log)


class _Both:
    """Writes to two streams; a log that cannot be written does not silence the other."""

    def __init__(self, first: Any, log: Path) -> None:
        self._first = first
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            os.write(self._log, text.encode(errors="replace"))
        return int(self._first.write(text))

    def flush(self) -> None:
        self._first.flush()

    def fileno(self) -> int:
        return int(self._first.fileno())
