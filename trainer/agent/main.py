"""The agent: entry point on every node.
Runs as `python -P -u -m trainer.agent.main RUN_DIR SUBMISSION`. A payload is a pickle, so its author can run code as
the user. So it is read through the descriptor of a run directory that the user owns, not by name.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from checkpointing.process_title import set_title
from checkpointing.storage.durable import read_json
from checkpointing.storage.storage_errors import explain_disk_error, is_disk_error
from checkpointing.storage.trusted_path import NotPrivate, pin_path
from trainer.agent.attempt_state.attempt_state import RunningAttempt
from trainer.agent.control import tcp_transport
from trainer.agent.control.tcp_transport import CoordinatorPeer, ForeignProtocol, WireError, connect
from trainer.agent.coordination.coordinator import Coordinator
from trainer.agent.coordination.launch_gate import LaunchRefused, wait_for_go, wait_for_next_go
from trainer.agent.node_agent import NodeAgent
from trainer.agent.processes import proc, watchdog
from trainer.agent.processes.background_tasks import (
    HungFileSystem,
    RepeatedRead,
    SupervisedTasks,
    WriteBehind,
    read_file,
    report_exceptions,
    settle,
)
from trainer.agent.processes.log_pipes import LogPipes
from trainer.protocol.config import JobConfig, config_digest, load
from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.outcome import AgentEnd, ExitCode
from trainer.protocol.failures.rank_end import signal_name
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.logs.line_file import LineFile
from trainer.protocol.logs.log_rotation import LogsConfig
from trainer.protocol.messages.agents import PROTOCOL, Hello, installed_release
from trainer.protocol.node_identity import NodeIdentity, discover
from trainer.protocol.rank_progress.progress import STEP_SIGNALS, block_step_signals
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.protocol.secrets import run_secrets
from trainer.protocol.secrets.secret_redaction import in_use

BEAT_SECONDS = 0.5


class WatchdogClient:
    """The watchdog process and its heartbeat. It must be created in the event loop, and exits with this process."""

    def __init__(self, *, seconds: float, report: Path, node: int, name: str) -> None:
        theirs, self._ours = os.pipe()
        os.set_blocking(self._ours, False)
        words = [str(theirs), str(os.getpid()), str(seconds), str(report), str(node), name]
        command = [sys.executable, "-I", "-S", watchdog.__file__, *words]
        with block_step_signals():  # Slurm signals every process of a step
            self._process = subprocess.Popen(command, pass_fds=[theirs], stdin=subprocess.DEVNULL)
        os.close(theirs)
        self._tasks = SupervisedTasks()
        self._tasks.spawn(self._beat())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _beat(self) -> None:
        while True:
            # A watchdog that does not read is suspended or gone, which must not end this agent.
            with suppress(BlockingIOError, BrokenPipeError):
                os.write(self._ours, b".")
            await asyncio.sleep(BEAT_SECONDS)

    def close(self) -> None:
        """Stop the watchdog when the agent ends normally."""
        self._tasks.cancel()
        os.close(self._ours)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)


_WRITABLE_BY_OTHERS = 0o022


def main(arguments: list[str]) -> int:
    """Run the payload if it may be loaded. An agent ends the process itself."""
    if (folder := _enter(*arguments)) is None:
        return ExitCode.NEVER_RETRY
    from submitit.core.submission import process_job  # not needed if the payload's arguments are known

    process_job(folder)
    return ExitCode.FINISHED


def start(attempt: str, run_dir: str, submission: str) -> int:
    """Run the agent without a payload, which only a Python with submitit can load. It ends the process itself."""
    if _enter(run_dir, submission) is not None:
        run_agent(run_dir, attempt)
    return ExitCode.NEVER_RETRY


def _enter(run_dir: str, submission: str) -> Path | None:
    """Enter the run directory and return the submission folder in it, or None if the directory may not be used."""
    os.umask(os.umask(0o077) | _WRITABLE_BY_OTHERS)  # a site's 0002 would let the group write to new files
    try:
        place = pin_path(Path(run_dir))
        folder = place / Path(submission).relative_to(run_dir)
        os.chdir(place)
    except OSError as error:
        sys.stderr.write(f"orch-agent: refuses to start: {error.strerror}: {run_dir}\n")
        return None
    if place != Path(run_dir):
        _write_log_there(folder)
    return folder


def _write_log_there(folder: Path) -> None:
    """Redirect output to log files under Slurm.
    Slurm must not open them by name (see `orchestrator/scheduler/slurm/sbatch.py`). Local jobs already have them.
    """
    if "SLURM_JOB_ID" not in os.environ or os.environ.get("SUBMITIT_EXECUTOR") != "slurm":
        return
    stem = f"{os.environ['SLURM_JOB_ID']}_{os.environ.get('SLURM_PROCID', '0')}_log"
    for descriptor, name in ((1, f"{stem}.out"), (2, f"{stem}.err")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        opened = os.open(folder / name, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


_CONNECT_SECONDS = 60.0
_READ_SECONDS = 60.0
"""Time limit for reading the configuration or the secrets."""
_DRILL_SECONDS = 1.0
_STDERR_SECONDS = 1.0
"""Time limit for flushing stderr at the end, after the events."""


class NonBlockingEventLog(EventLog):
    """Event log that reports failures on stderr without ending anything, and tolerates a hung file system.
    An event's time and number are set by the call, not when the line is written.
    """

    def __init__(self, path: Path, source: str, attempt: int) -> None:
        file = LineFile(path)
        self.behind = WriteBehind(file.append, _lost_event, file.close)
        super().__init__(path, source, attempt, lines=self.behind)

    def write(self, kind: EventKind, /, **data: Any) -> None:
        super().write(kind, **data)
        if kind is EventKind.DRILL:  # the drill may kill this process next
            self.behind.flush(_DRILL_SECONDS)


def _lost_event(line: str, why: str) -> None:
    sys.stderr.write(f"orch-agent: event {line} is lost: {why}\n")


def run_agent(run_dir: str, attempt: str) -> NoReturn:
    """Run this node's agent, and on node 0 the coordinator, for one attempt, and end the process with its exit code.
    It exits through `os._exit`: otherwise submitit would write its own result file and could change the exit code to 1,
    and a thread waiting for a hung file system would keep the interpreter from exiting.
    """
    code: int = ExitCode.RETRY
    # Not asyncio.run, which closes the loop: that waits for every thread, and one may hang on a file system.
    runner = asyncio.Runner()
    early: list[int] = []
    agent: Agent | None = None
    try:
        # This comes first, since submitit's handlers would requeue the job on their own.
        for number in STEP_SIGNALS:
            signal.signal(number, lambda received, _: early.append(received))
        signal.signal(signal.SIGCONT, signal.SIG_DFL)  # the default only continues the process
        set_title("orch-agent")
        run = RunDir(pin_path(Path(run_dir)), known_as=Path(run_dir))
        agent = Agent(run, run.attempt(int(attempt)), early)
        code = runner.run(agent.live())
    except NotPrivate as error:
        sys.stderr.write(f"orch-agent: refuses to start: {error.strerror}: {run_dir}\n")
        code = ExitCode.NEVER_RETRY
    except BaseException:  # noqa: BLE001  # outermost edge
        traceback.print_exc()
    finally:
        try:
            if agent is not None:
                agent.settle()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


class Agent:
    def __init__(self, run: RunDir, attempt: AttemptDir, early: list[int]) -> None:
        self._run, self._attempt, self._early = run, attempt, early
        self._started = time.monotonic()
        self._node: NodeAgent | None = None
        self._main: asyncio.Task[Any] | None = None
        self._event_writers: list[WriteBehind] = []
        self._stderr_writers: list[WriteBehind] = []
        self._node_logs = LogPipes()

    def settle(self) -> None:
        """Flush all events and messages before the end, as far as the file system responds."""
        settle(self._event_writers)
        settle(self._stderr_writers, _STDERR_SECONDS)
        self._node_logs.close(_STDERR_SECONDS)

    async def live(self) -> int:
        self._main = asyncio.current_task()
        report_exceptions(self._on_error)
        self._listen()
        proc.become_subreaper()
        try:
            identity = discover()
        except (RuntimeError, OSError, KeyError, ValueError) as error:
            sys.stderr.write(f"orch-agent: {error}\n")
            return ExitCode.NEVER_RETRY
        try:
            self._follow_job(identity)
            token = None
            if identity.restarts > 0 and identity.expedited:
                token = await wait_for_next_go(self._run, identity, self._attempt.number)
                self._attempt = self._run.attempt(token.attempt)
            self._stderr_writers += copy_stderr_to_log(
                self._node_logs.descriptor(self._attempt.agent_log(identity.node))
            )
            token = token or await wait_for_go(self._attempt.go, identity, self._attempt.number)
            config = await read_file(lambda: self._config(identity, token), self._run.path, _READ_SECONDS)
            run_secrets.enter(await read_file(lambda: self._secrets(config), self._run.path, _READ_SECONDS))
            self._node_logs.limit(config.logs)
            return await self._work(identity, config, token)
        except LaunchRefused as refusal:
            return self._refuse(identity, str(refusal))
        except HungFileSystem as error:
            sys.stderr.write(f"orch-agent: cannot start: {error}\n")
            return ExitCode.STORAGE
        except OSError as error:
            if not is_disk_error(error):
                raise
            words = explain_disk_error(error, self._run.path)
            sys.stderr.write(f"orch-agent: cannot start: {words}\n")
            return ExitCode.STORAGE
        except asyncio.CancelledError:
            sys.stderr.write("orch-agent: asked to end before it started, or its job is gone\n")
            return ExitCode.RETRY

    def _config(self, identity: NodeIdentity, token: LaunchToken) -> JobConfig:
        try:
            path = self._run.attempt_config(self._attempt.number)
            digest, config = config_digest(path), load(self._run, self._attempt.number)
        except (OSError, ValueError, TypeError) as error:
            raise LaunchRefused(f"cannot read the run's configuration: {error}") from error
        if token.config_digest not in ("", digest):
            raise LaunchRefused(f"{path} was edited: type `orch resume {self._run.name} KEY=VALUE`")
        if config.cluster.all_nodes != identity.nodes:
            raise LaunchRefused(
                f"the job has {identity.nodes} node(s), the run is configured for {config.cluster.all_nodes}"
            )
        return config

    def _secrets(self, config: JobConfig) -> dict[str, str]:
        try:
            return run_secrets.values_for_job(self._run, config)
        except (OSError, run_secrets.SecretsRefused) as error:
            raise LaunchRefused(f"cannot read the run's secrets: {error}") from error

    # -- signals and the job -----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in STEP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        for early in self._early:
            loop.call_soon(self._on_signal, early)

    def _on_signal(self, number: int) -> None:
        sys.stderr.write(f"orch-agent: got {signal_name(number)}\n")
        if self._node is not None:
            self._node.on_signal(number)
        elif self._main is not None:
            # Nothing has started, so there is nothing to save.
            self._main.cancel()

    def _on_error(self, error: BaseException) -> None:
        """End the attempt because of an exception raised in a task, callback or thread of this process."""
        if self._node is not None:
            self._node.fail(error)

    def _follow_job(self, identity: NodeIdentity) -> None:
        """Watch the local job's process (submitit's): if it is gone, so is the job, and nothing else would notice."""
        if not traits(identity.kind).simulated_nodes:
            return
        handle = os.pidfd_open(int(identity.job_id.partition("-")[0]))
        asyncio.get_running_loop().add_reader(handle, self._job_gone, handle)

    def _job_gone(self, handle: int) -> None:
        asyncio.get_running_loop().remove_reader(handle)
        sys.stderr.write("orch-agent: the local job's process is gone\n")
        if self._main is not None:
            self._main.cancel()

    def _refuse(self, identity: NodeIdentity, reason: str) -> int:
        sys.stderr.write(f"orch-agent: refuses to train: {reason}\n")
        # This file has its own name, since the attempt's agents may belong to another job.
        source = f"refused-{identity.job_id}-{identity.node:04d}"
        self._log(source).write(EventKind.DECISION, action="refuse", reason=reason)
        return ExitCode.NEVER_RETRY

    # -- work --------------------------------------------------------------------------------------------------------

    async def _work(self, identity: NodeIdentity, config: JobConfig, token: LaunchToken) -> int:
        events = self._log(f"agent-{identity.node:04d}")
        self._node = NodeAgent(
            run=self._run,
            attempt=self._attempt,
            config=config,
            identity=identity,
            events=events,
            environ=os.environ,
            logs=self._node_logs,
        )
        watchdog = WatchdogClient(
            seconds=config.detection.hang.agent, report=self._attempt.agent_report(identity.node), node=identity.node,
            name=identity.name,
        )  # fmt: skip
        self._node.other_children = (watchdog.pid,)
        try:
            return await self._serve(self._node, identity, config, token)
        finally:
            watchdog.close()

    async def _serve(self, node: NodeAgent, identity: NodeIdentity, config: JobConfig, token: LaunchToken) -> int:
        leading = await self._lead(identity, config, token) if identity.node == 0 else None
        peer = await self._join(identity)
        try:
            code = await node.serve(peer)
        finally:
            await peer.close()
        return code if leading is None else await leading

    def _log(self, source: str) -> EventLog:
        log = NonBlockingEventLog(self._attempt.event_file(source), source, self._attempt.number)
        self._event_writers.append(log.behind)
        return log

    async def _lead(self, identity: NodeIdentity, config: JobConfig, token: LaunchToken) -> "asyncio.Task[int]":
        state = RunningAttempt(
            run=self._run, attempt=self._attempt, config=config, identity=identity, events=self._log("coordinator"),
            token=token, started=self._started,
        )  # fmt: skip
        coordinator = Coordinator(state)
        try:
            host = tcp_transport.rendezvous_address(identity.kind, config.cluster.interface)
        except RuntimeError as error:
            raise LaunchRefused(str(error)) from error
        await coordinator.open(host)
        return asyncio.get_running_loop().create_task(coordinator.run())

    async def _join(self, identity: NodeIdentity) -> CoordinatorPeer:
        """Connect to the coordinator, retrying until the file system and the network make it reachable."""
        give_up, place = time.monotonic() + _CONNECT_SECONDS, self._attempt
        address_file = RepeatedRead(lambda: read_json(place.coordinator), place.coordinator)
        outcome_file = RepeatedRead(lambda: place.outcome.exists(), place.outcome)
        hello = Hello(
            protocol=PROTOCOL, release=installed_release(), node=identity.node, name=identity.name,
            attempt=self._attempt.number, switches=identity.switches,
        )  # fmt: skip
        while True:
            try:
                found = await address_file.result(give_up - time.monotonic())
                return await connect(found["host"], found["port"], found["token"], hello)
            except HungFileSystem:
                raise
            except ForeignProtocol as error:
                await proc.write_agent_report(self._attempt, identity, AgentEnd.REFUSED, str(error))
                raise LaunchRefused(str(error)) from error
            except WireError as error:
                raise LaunchRefused(str(error)) from error
            except (OSError, ValueError, TypeError, KeyError) as error:
                problem = error
            if await outcome_file.result(give_up - time.monotonic()):
                raise LaunchRefused("the attempt ended before this node had joined it")
            if time.monotonic() >= give_up:
                raise RuntimeError(f"cannot reach the coordinator within {_CONNECT_SECONDS:.0f} s: {problem}")
            await asyncio.sleep(0.2)


def copy_stderr_to_log(descriptor: int) -> list[WriteBehind]:
    """Copy stderr to the agent's log as well, since submitit's files are not meant for users.
    Both are in the run directory, whose file system may hang, so both are written in the background. Submitit's file is
    never rotated, so it gets only the first messages.
    """
    stderr = sys.stderr
    left = LogsConfig().max_bytes

    def shown(text: str) -> None:
        nonlocal left
        if left > 0:
            left -= len(text)
            stderr.write(text if left > 0 else "orch-agent: the rest is in the agent's log only\n")
            stderr.flush()

    both = [
        WriteBehind(shown, _drop_lost_stderr),
        WriteBehind(lambda text: os.write(descriptor, text.encode(errors="replace")), _drop_lost_stderr),
    ]
    sys.stderr = _TeeStderr(stderr.fileno, both)
    return both


def _drop_lost_stderr(text: str, why: str) -> None:
    """Do nothing: there is nowhere left to report the loss."""


class _TeeStderr:
    """Replacement for stderr that writes to two logs; if one cannot be written, the other still is."""

    def __init__(self, fileno: Callable[[], int], both: Sequence[WriteBehind]) -> None:
        self.fileno, self._both = fileno, both

    def write(self, text: str) -> int:
        shown = in_use().text(text)
        for one in self._both:
            one.append(shown)
        return len(text)

    def flush(self) -> None:
        """Do nothing: this class buffers nothing, and callers must not wait."""
