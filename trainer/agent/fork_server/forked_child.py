"""A forked rank up to its first line of code: launch order, binding to cores and GPUs, signals."""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from setproctitle import setproctitle

from trainer.agent.control import tcp_transport
from trainer.agent.flight.recorder import FlightSockets
from trainer.agent.fork_server.torchrun_command import torchrun_environment, with_interpreter, working_directory
from trainer.agent.processes.process_tree import AGENT_DIED_SIGNAL, set_pdeathsig
from trainer.protocol.command_progress import FOLDER_VARIABLE
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.messages.agents import StartGeneration
from trainer.protocol.messages.fork_server import StartRank
from trainer.protocol.node_identity import NodeIdentity
from trainer.protocol.rank_progress.progress import WARNINGS, outlive_step_signals, unblock_step_signals
from trainer.protocol.rank_progress.rank_messages import SPEC_VARIABLE, RankSpec, generation_mark
from trainer.protocol.run_dir import AttemptDir, RunDir


def cores_of_rank(
    identity: NodeIdentity, config: JobConfig, node_rank: int, local_rank: int, allowed: Collection[int]
) -> list[int]:
    """Return a contiguous, equal share of the allowed cores; empty (unbound) if there are fewer cores than ranks.
    Simulated nodes share one machine, so its cores are divided among all ranks of the job.
    """
    per_node = config.cluster.ranks_per_node
    simulated = traits(identity.kind).simulated_nodes
    ranks = config.cluster.world_size if simulated else per_node
    mine = node_rank * per_node + local_rank if simulated else local_rank
    cores = sorted(allowed)
    if len(cores) < ranks:
        return []
    return cores[mine * len(cores) // ranks : (mine + 1) * len(cores) // ranks]


def gpus(identity: NodeIdentity, config: JobConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES for a simulated node if there are enough GPUs for all nodes."""
    per_node = config.cluster.gpus_per_node
    if not traits(identity.kind).simulated_nodes or not per_node:
        return {}
    visible = [device for device in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    if len(visible) < per_node * config.cluster.all_nodes:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[identity.node * per_node : (identity.node + 1) * per_node])}


class RankLauncher:
    """Builder of the launch orders for the ranks of one node."""

    def __init__(
        self,
        run: RunDir,
        attempt: AttemptDir,
        config: JobConfig,
        identity: NodeIdentity,
        environ: Mapping[str, str],
        host: str,
        sockets: FlightSockets | None = None,
    ) -> None:
        """`host`: address at which the coordinator reaches this node's agent; `sockets`: the ranks' flight servers."""
        self._run, self._attempt, self._config, self._identity = run, attempt, config, identity
        self._environ, self._reached_at, self._sockets = environ, host, sockets

    def launch_order(self, start: StartGeneration, local_rank: int) -> StartRank:
        """Return the launch order for one rank of this node."""
        config, node_rank = self._config, start.node_rank
        rank = node_rank * config.cluster.ranks_per_node + local_rank
        bound = cores_of_rank(self._identity, config, node_rank, local_rank, os.sched_getaffinity(0))
        if start.master is None:
            return StartRank(
                rank=rank, generation=start.generation, cores=tuple(bound), env={}, spec=self._spec(start, local_rank)
            )
        environ = torchrun_environment(
            run=self._run, attempt=self._attempt, config=config, node_rank=node_rank, generation=start.generation,
            local_rank=local_rank, master=start.master, inherited=self._environ,
        )  # fmt: skip
        return StartRank(
            rank=rank, generation=start.generation, cores=tuple(bound), env=environ, command=with_interpreter(config),
            folder=str(working_directory(self._run, config)),
        )  # fmt: skip

    def _spec(self, start: StartGeneration, local_rank: int) -> RankSpec:
        cluster = self._config.cluster
        rank = start.node_rank * cluster.ranks_per_node + local_rank
        return RankSpec(
            run_dir=str(self._run.path),
            attempt=self._attempt.number,
            generation=start.generation,
            rank=rank,
            local_rank=local_rank,
            world_size=cluster.world_size,
            local_world_size=cluster.ranks_per_node,
            node=start.node_rank,
            node_name=self._identity.name,
            cell_fd=-1,  # the fork server fills in what it receives
            control_fd=-1,
            host=self._host(),
            flight=self._sockets.path(rank, start.generation) if self._sockets else "",
            suspects=start.suspects,
            skip=start.skip,
            fit=start.fit,
            known_as=str(self._run.own_path),
        )

    def _host(self) -> str:
        """Return the address peers use for this node's ranks: the named interface, else the coordinator's route."""
        interface = self._config.cluster.interface
        return tcp_transport.interface_address(interface) if interface else self._reached_at


RankMain = Callable[[RankSpec], int]
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that Python ignores from its start; an executed program expects the defaults."""


def become_rank(
    order: StartRank, descriptors: Sequence[int], parent: int, fork_server_fds: Sequence[int], main: RankMain | None
) -> NoReturn:
    """Turn the calling, freshly forked process into the rank that `order` describes; never returns.
    The fork was made within `block_step_signals`. The first of `descriptors` is its output. `main` is the warm entry
    point; without it the rank is executed cold, or is the user's own command.
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
    """Redirect input from /dev/null and output to the rank's log, after a line that names the generation."""
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
        hint = f"mount it, or name another one: +env.{FOLDER_VARIABLE}=FOLDER"
        sys.stderr.write(f"cannot enter the folder of the submit, {folder}: {why}; {hint}\n")
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
    """Return whether PATH has a file of that name, as shells search it; an unreadable folder counts as empty."""
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
    # Without arena and writer descriptors the rank makes its own.
    cell, control, stacks, arena, writer = (*descriptors, -1, -1)[:5]
    return replace(spec, cell_fd=cell, control_fd=control, stacks_fd=stacks, arena_fd=arena, writer_fd=writer)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a full disk must not change the exit code
            continue
