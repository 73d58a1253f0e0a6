"""The fork server: a process that has imported torch and the workload but touched no GPU, and that forks ranks.
The agent starts it as `python -P -m trainer.agent.fork_server.server LINK AGENT RUN_DIR [REASON CODE]`: the descriptor
of its socket, the agent's PID, the run directory and, if it must not stay warm, the reason and its record of the user's
code as JSON.
"""

import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

from checkpointing.process_title import set_title
from checkpointing.python_command import module_command
from trainer.agent.fork_server.code_at_start import record_code
from trainer.agent.processes import proc
from trainer.agent.processes.proc import AGENT_DIED_SIGNAL, set_pdeathsig
from trainer.protocol.command_progress import FOLDER_VARIABLE
from trainer.protocol.config import JobConfig, load
from trainer.protocol.failures.missing_installation import describe_missing
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.messages.ranks import (
    SPEC_VARIABLE,
    TO_FORK_SERVER,
    CodeAtStart,
    ForkServerReady,
    FromForkServer,
    ImportFailed,
    RankGone,
    RankSpawned,
    RankSpec,
    SignalRanks,
    SpawnFailed,
    StartRank,
    ToForkServer,
    generation_mark,
    receive_packet,
    send_packet,
)
from trainer.protocol.node_identity import process_state
from trainer.protocol.rank_progress.progress import (
    WARNINGS,
    block_step_signals,
    outlive_step_signals,
    unblock_step_signals,
)
from trainer.protocol.run_dir import AttemptDir
from trainer.protocol.secrets.secret_redaction import in_use

RankMain = Callable[[RankSpec], int]


_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores from startup; an executed program expects the defaults."""


def become_rank(
    order: StartRank, descriptors: Sequence[int], parent: int, fork_server_fds: Sequence[int], main: RankMain | None
) -> NoReturn:
    """Turn the calling, freshly forked process into the rank that `order` describes; never returns.
    The caller must have forked within `block_step_signals`. The first of `descriptors` is the output. `main` is the
    warm entry point; without it the rank starts cold, or runs the user's own command.
    """
    code: int = ExitCode.ERROR
    try:
        _detach_from_fork_server(parent, fork_server_fds)
        output, *others = descriptors
        _redirect(output, order.generation)
        os.environ.update(order.env)
        if order.cores:
            os.sched_setaffinity(0, order.cores)
        if order.spec is None:
            _run_command(order.command, order.folder)
        spec = _with_descriptors(order.spec, others)
        if main is None:
            _run_cold(spec)
        outlive_step_signals()
        set_title(f"orch-rank-{spec.rank}")
        code = main(spec)
    except BaseException:  # noqa: BLE001  # outermost edge
        traceback.print_exc()
    finally:
        _flush()
        # Not sys.exit: this process must not run the fork server's atexit handlers or flush its buffers.
        os._exit(code)


def _detach_from_fork_server(parent: int, fork_server_fds: Sequence[int]) -> None:
    set_pdeathsig(parent, signal.SIGKILL)
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(AGENT_DIED_SIGNAL, signal.SIG_DFL)
    for descriptor in fork_server_fds:
        os.close(descriptor)


def _redirect(output: int, generation: int) -> None:
    """Redirect input from /dev/null, and output to the rank's log after writing a line with the generation."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.write(output, f"{generation_mark(generation)}\n".encode())
    for descriptor, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    os.close(nothing)
    os.close(output)


def _run_command(command: Sequence[str], folder: str) -> NoReturn:
    # The agent handles warning signals. SIGTERM asks a user program to stop.
    for number in WARNINGS:
        signal.signal(number, signal.SIG_IGN)
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    unblock_step_signals()
    try:
        os.chdir(folder)
    except OSError as error:
        why = error.strerror
        hint = f"mount it, or set another one: +env.{FOLDER_VARIABLE}=FOLDER"
        sys.stderr.write(f"cannot enter the submit folder {folder}: {why}; {hint}\n")
        _flush()
        os._exit(ExitCode.STORAGE)
    try:
        os.execvpe(command[0], list(command), os.environ)
    except OSError as error:
        absent = isinstance(error, FileNotFoundError) or not _is_found(command[0])
        why = os.strerror(errno.ENOENT) if absent else error.strerror
        sys.stderr.write(f"cannot start {command[0]!r} in {folder}: {why}\n")
        _flush()
        os._exit(127 if absent else 126)


def _is_found(program: str) -> bool:
    """Return whether a file with that name is in PATH, skipping unreadable folders as a shell does."""
    if os.sep in program:
        return True
    return any(os.path.isfile(os.path.join(place, program)) for place in os.get_exec_path())


def _run_cold(spec: RankSpec) -> NoReturn:
    for descriptor in (spec.cell_fd, spec.control_fd, spec.stacks_fd, spec.arena_fd, spec.writer_fd):
        if descriptor >= 0:
            os.set_inheritable(descriptor, True)
    os.environ[SPEC_VARIABLE] = spec.to_json()
    os.execve(sys.executable, module_command("trainer.worker.cold_rank"), os.environ)


def _with_descriptors(spec: RankSpec, descriptors: Sequence[int]) -> RankSpec:
    # Without arena and writer descriptors the rank creates its own.
    cell, control, stacks, arena, writer = (*descriptors, -1, -1)[:5]
    return replace(spec, cell_fd=cell, control_fd=control, stacks_fd=stacks, arena_fd=arena, writer_fd=writer)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a full disk must not change the exit code
            continue


class ForkServer:
    """Main loop of the fork server: forks ranks, reaps them, kills their process groups, and reports each event."""

    def __init__(self, link: socket.socket, main: RankMain | None) -> None:
        self._link, self._main = link, main
        self._leaders: dict[int, int] = {}  # PID of an unreaped rank -> rank
        self._groups: dict[int, int] = {}  # process group with a reaped leader, maybe with members -> rank
        self._empty: dict[int, int] = {}  # empty process group not yet reported as gone -> rank
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()  # `select` fails above descriptor 1,023, and imports may use up lower ones
        for descriptor in (link.fileno(), self._wake_in):
            self._poll.register(descriptor, select.POLLIN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
        signal.signal(proc.AGENT_DIED_SIGNAL, self._on_agent_died)

    def serve(self) -> None:
        """Serve the agent until it is gone, then kill all remaining processes."""
        try:
            while self._serve_once():
                pass
        except BrokenPipeError:
            pass
        self._signal_all(signal.SIGKILL)
        give_up = time.monotonic() + 2.0
        while (self._leaders or self._groups or self._empty) and time.monotonic() < give_up:
            self._reap(silent=True)
            time.sleep(0.01)

    def _serve_once(self) -> bool:
        """Wait for an event and handle it. Return False once the agent is gone."""
        # Group members that are not our children die without notifying us, so poll.
        patience = 10 if self._groups or self._empty else None  # ms
        ready = {descriptor for descriptor, _ in self._poll.poll(patience)}
        if self._wake_in in ready:
            os.read(self._wake_in, 4096)
        self._reap()
        if self._link.fileno() in ready:
            order, descriptors = receive_packet(self._link, TO_FORK_SERVER)
            if order is None:
                return False
            self._handle(order, descriptors)
        return True

    def _handle(self, order: ToForkServer, descriptors: list[int]) -> None:
        match order:
            case StartRank():
                self._start(order, descriptors)
            case SignalRanks():
                self._signal_all(order.number)

    def _send(self, message: FromForkServer, descriptors: Sequence[int] = ()) -> None:
        send_packet(self._link, message, descriptors)

    def _start(self, order: StartRank, descriptors: list[int]) -> None:
        rank, parent = order.rank, os.getpid()
        ends = (self._link.fileno(), self._wake_in, self._wake_out)
        try:
            with block_step_signals():
                pid = os.fork()
                if pid == 0:
                    become_rank(order, descriptors, parent, ends, self._main)
        except OSError as error:
            self._send(SpawnFailed(rank=rank, reason=f"fork failed: {error.strerror}"))
            return
        finally:
            if os.getpid() == parent:
                for descriptor in descriptors:
                    os.close(descriptor)
        self._leaders[pid] = rank
        handle = os.pidfd_open(pid)
        try:
            self._send(RankSpawned(rank=rank, pid=pid), [handle])
        finally:
            os.close(handle)

    def _signal_all(self, number: int) -> None:
        for group in (*self._leaders, *self._groups):
            # A child that has not yet created its group can be reached only through its PID.
            if not proc.kill_group(group, number) and group in self._leaders:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(group, number)

    def _reap(self, *, silent: bool = False) -> None:
        """Reap dead children, and kill the rest of each dead rank's process group."""
        while (info := _next_dead()) is not None:
            pid = info.si_pid
            if pid in self._leaders:
                # Kill before reaping: the zombie still owns the group's number.
                proc.kill_group(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if pid in self._leaders:
                rank = self._groups[pid] = self._leaders.pop(pid)
                if not silent:
                    self._send(_rank_end(rank, info))
        for group in [group for group in self._groups if not proc.kill_group(group, 0)]:
            self._empty[group] = self._groups.pop(group)
        # Reported last: once no rank is alive, any child still left must have left its rank's group.
        if self._empty and (self._leaders or self._groups or not proc.kill_children()):
            for rank in self._empty.values():
                if not silent:
                    self._send(RankGone(rank=rank))
            self._empty.clear()

    def _on_agent_died(self, *_: object) -> NoReturn:
        """Handle the agent's death: kill the ranks, then the orphans that their deaths reparent to this process."""
        # The kernel sends the signal for every dying thread of the agent; one is enough.
        signal.signal(proc.AGENT_DIED_SIGNAL, signal.SIG_IGN)
        self._signal_all(signal.SIGKILL)
        give_up = time.monotonic() + 1.5
        while proc.kill_children() and time.monotonic() < give_up:
            while (info := _next_dead()) is not None:
                os.waitpid(info.si_pid, 0)
            time.sleep(0.002)
        os._exit(0)


def _next_dead() -> os.waitid_result | None:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


def _rank_end(rank: int, info: os.waitid_result) -> RankEnd:
    exited = info.si_code == os.CLD_EXITED
    return RankEnd(
        rank=rank, exit_code=info.si_status if exited else None, signal=None if exited else info.si_status,
        reported=False,
    )  # fmt: skip


def fork_unsafe_reason() -> str:
    """Return why forking this process would be unsafe, or "" if it is safe."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"importing the workload started {threads - 1} thread(s)"
    started = sum(process_state(pid) not in ("Z", "") for pid in proc.children())
    if started:
        # A process has only one parent: ranks could not wait for it, and it would end with the first generation.
        return f"importing the workload started {started} process(es)"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "importing the workload initialized CUDA"
    return ""


def _import_workload(config: JobConfig, link: socket.socket) -> tuple[RankMain, frozenset[str]]:
    """Import torch and the workload, and return the entry point and the modules imported before the workload.
    On failure, report the error and exit. Imported objects never become garbage. Scanning them would take a quarter of
    the import time now and slow every collection in a rank later, so they are frozen before ranks are forked (see
    `gc.freeze`).
    """
    gc.disable()
    try:
        # Imported late, since this imports torch: seconds on a laptop, tens of seconds on a busy file system.
        from trainer.worker.main import rank_main
        from trainer.worker.startup.preimport import import_lazy_parts, import_workload

        import_lazy_parts()
        gc.freeze()
        gc.enable()
        ours = frozenset(sys.modules)
        # The collector stays enabled: a module may have its own reasons to disable it.
        import_workload(config)
    except BaseException as error:  # noqa: BLE001  # outermost edge
        text = in_use().text
        message = str(
            traceback.TracebackException(type(error), error, None)
        )  # independent of the error's own `__str__`
        words = f"it called sys.exit({error.code!r})" if isinstance(error, SystemExit) else message + _torch_hint(error)
        missing = describe_missing(error)
        failed = ImportFailed(
            exception=type(error).__name__,
            message=text(words)[:4000] + missing,
            traceback=text(traceback.format_exc())[-16000:],
        )
        send_packet(link, failed)
        sys.exit(1)
    gc.freeze()
    main: RankMain = rank_main
    return main, ours


def _torch_hint(error: BaseException) -> str:
    """Describe the installed torch version if it lacks the imported name."""
    torch, cause = sys.modules.get("torch"), error.__cause__ or error
    if torch is None or not isinstance(cause, ImportError) or (cause.name or "").partition(".")[0] != "torch":
        return ""
    return f"; the installed torch {torch.__version__} lacks it: install a version that has it"


def main(arguments: list[str]) -> None:
    outlive_step_signals()
    descriptor, agent, attempt = int(arguments[0]), int(arguments[1]), AttemptDir(Path(arguments[2]))
    cold, *recorded = arguments[3:] or [""]
    # No ranks exist to clean up during the import, and a handler would have to wait for the import.
    proc.set_pdeathsig(agent, signal.SIGKILL)
    proc.become_subreaper()
    set_title("orch-forkserver")
    started = time.monotonic()
    link = socket.socket(fileno=descriptor)
    link.set_inheritable(False)
    config = load(attempt.run, attempt.number)
    rank_main, ours = (None, frozenset[str]()) if config.command or cold else _import_workload(config, link)
    code = CodeAtStart(**json.loads(recorded[0])) if cold else record_code(attempt, config, ours)
    if rank_main is not None and (reason := fork_unsafe_reason()):
        # A process with threads must not fork, so restart without importing anything.
        proc.kill_children()
        link.set_inheritable(True)
        program = module_command("trainer.agent.fork_server.server")
        os.execv(sys.executable, [*program, *arguments[:3], reason, json.dumps(asdict(code))])
    fork_server = ForkServer(link, rank_main)
    proc.set_pdeathsig(agent, proc.AGENT_DIED_SIGNAL)
    why = cold or ("" if rank_main else "the ranks are the user's own command")
    seconds = time.monotonic() - started
    send_packet(link, ForkServerReady(warm=rank_main is not None, reason=why, seconds=seconds, code=code))
    fork_server.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
