"""What happens in a forked child between `fork` and the first line of the rank's own code."""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from setproctitle import setproctitle

from trainer.agent.processes.process_tree import AGENT_DIED_SIGNAL, set_pdeathsig
from trainer.contract.failures.outcome import ExitCode
from trainer.contract.messages.fork_server import StartRank
from trainer.contract.ranks.rank_messages import SPEC_VARIABLE, RankSpec, generation_mark
from trainer.contract.ranks.step_signals import WARNINGS, outlive_step_signals, unblock_step_signals

RankMain = Callable[[RankSpec], int]
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""What an interpreter ignores from its start; a program that it becomes expects the defaults."""


def become_rank(
    order: StartRank,
    descriptors: Sequence[int],
    parent: int,
    fork_server_fds: Sequence[int],
    main: RankMain | None,
) -> NoReturn:
    """Turn the calling, just forked process into the rank that `order` describes; never returns.

    The fork was made within `block_step_signals`.

    The first of `descriptors` is where it prints to. `main` is the warm entry point; without one the rank is executed
    cold, or is the user's own command.
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
        setproctitle(f"orch-rank-{spec.rank}")
        code = main(spec)
    except BaseException:  # noqa: BLE001  # outermost edge
        traceback.print_exc()
    finally:
        _flush()
        # Not sys.exit: the fork server's atexit handlers and buffers are not this process's to run.
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
    """Input from nowhere, output to the rank's log, below a line that names the generation."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.write(output, f"{generation_mark(generation)}\n".encode())
    for descriptor, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    os.close(nothing)
    os.close(output)


def _run_command(command: Sequence[str], folder: str) -> NoReturn:
    # The agent answers warnings. SIGTERM is how a user's program is asked to stop.
    for number in WARNINGS:
        signal.signal(number, signal.SIG_IGN)
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    unblock_step_signals()
    os.chdir(folder)
    try:
        os.execvpe(command[0], list(command), os.environ)
    except OSError as error:
        absent = isinstance(error, FileNotFoundError) or not _is_found(command[0])
        why = os.strerror(errno.ENOENT) if absent else error.strerror
        sys.stderr.write(f"cannot start {command[0]!r} in {folder}: {why}\n")
        _flush()
        os._exit(127 if absent else 126)


def _is_found(program: str) -> bool:
    """Whether there is a file of that name, as shells look for it: a folder that may not be read has none."""
    if os.sep in program:
        return True
    return any(os.path.isfile(os.path.join(place, program)) for place in os.get_exec_path())


def _run_cold(spec: RankSpec) -> NoReturn:
    for descriptor in (spec.cell_fd, spec.control_fd, spec.stacks_fd, spec.arena_fd, spec.writer_fd):
        if descriptor >= 0:
            os.set_inheritable(descriptor, True)
    os.environ[SPEC_VARIABLE] = spec.to_json()
    os.execve(sys.executable, [sys.executable, "-P", "-m", "trainer.worker.cold_rank"], os.environ)


def _with_descriptors(spec: RankSpec, descriptors: Sequence[int]) -> RankSpec:
    # Arena and writer may be missing: then the rank makes its own.
    cell, control, stacks, arena, writer = (*descriptors, -1, -1)[:5]
    return replace(spec, cell_fd=cell, control_fd=control, stacks_fd=stacks, arena_fd=arena, writer_fd=writer)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a full disk must not change the exit code
            continue
