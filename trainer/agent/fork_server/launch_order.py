"""Launch orders for ranks: command, environment, working directory, cores and GPUs."""

import json
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trainer.agent.control import tcp_transport
from trainer.agent.flight.recorder import FlightSockets
from trainer.agent.fork_server.instrumentation import RankFiles, instrument
from trainer.agent.fork_server.rank_binding import Place, Topology, bind_ranks
from trainer.protocol.command_progress import FOLDER_VARIABLE
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.config_sections.watch_config import AUTO
from trainer.protocol.launchers import NodePlace, place_launcher, starts_once_per_node
from trainer.protocol.messages.agents import StartGeneration
from trainer.protocol.messages.ranks import RankSpec, StartRank
from trainer.protocol.node_identity import NodeIdentity
from trainer.protocol.rank_variables import rank_caches, rank_python
from trainer.protocol.restore_test import RESTORE_PROGRAM, is_restore_program, own_command
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.protocol.secrets.secret_redaction import LISTED

_INTERPRETERS = ("python", "python3")


def with_interpreter(config: JobConfig, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command, run by the ranks' interpreter if it begins with `python` and `env` sets no PATH.
    PATH may lead to another interpreter or to none, since `orch` can run from a virtual environment that is not
    activated.
    """
    program, *words = config.command
    own = program in _INTERPRETERS and "PATH" not in config.env
    if is_restore_program(config.command):
        words[0] = str(RESTORE_PROGRAM)  # an image has it in another folder than the login node
    return (rank_python(environ) if own else program, *words)


def interpreter_first(path: str, python: str) -> str:
    """Return a PATH that resolves `python` and the programs of its environment to this interpreter."""
    own = os.path.dirname(python)
    found = shutil.which("python", path=path)
    same = found is not None and os.path.dirname(os.path.abspath(found)) == own
    return path if same else os.pathsep.join([own, path])


def working_directory(run: RunDir, config: JobConfig) -> Path:
    """Return the command's working directory: the submit folder if known, else the run directory.

    The folder may be absent if its file system is not mounted. In any other, the program would find no checkpoint.
    """
    return Path(config.env.get(FOLDER_VARIABLE) or _from_record(run) or run.path)


def is_per_node(run: RunDir, config: JobConfig) -> bool:
    """Return whether a command is started once per node, and starts its own ranks."""
    command, folder = config.command[own_command(config.command) :], working_directory(run, config)
    return bool(command) and starts_once_per_node(config.launcher, command, folder)


def _from_record(run: RunDir) -> str | None:
    try:
        record = json.loads(run.run.read_bytes())
        found = record["identity"]["submit_dir"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if isinstance(found, str) else None


def free_port(host: str) -> int:
    """Return a port that is free now; the script binds it a moment later."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def place_on_machine(identity: NodeIdentity, config: JobConfig, node_rank: int) -> Place:
    """Return the place of this node's ranks. Simulated nodes share one machine's cores among all ranks of the job."""
    per_node = config.cluster.ranks_per_node
    if traits(identity.kind).simulated_nodes:
        return Place(first=node_rank * per_node, count=per_node, total=config.cluster.world_size)
    return Place(first=0, count=per_node, total=per_node)


def gpus(identity: NodeIdentity, config: JobConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES for a simulated node if there are enough GPUs for all nodes."""
    per_node = config.cluster.gpus_per_node
    if not traits(identity.kind).simulated_nodes or not per_node:
        return {}
    visible = [device for device in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    if len(visible) < per_node * config.cluster.all_nodes:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[identity.node * per_node : (identity.node + 1) * per_node])}


def task_variables(spec: RankSpec, inherited: Mapping[str, str], *, per_node: bool = False) -> dict[str, object]:
    """Return srun's variables of a rank, as if Slurm had started each rank as a task of its own. If `per_node`, the
    command of each node is one task.

    A program may take its rank from them. Slurm's own values describe the agents, of which each node has one.
    """
    if "SLURM_PROCID" not in inherited:
        return {}
    nodes = max(1, spec.world_size // spec.local_world_size)
    if per_node:
        spec = replace(spec, rank=spec.node, local_rank=0, world_size=nodes, local_world_size=1)
    tasks = f"{spec.local_world_size}(x{nodes})" if nodes > 1 else str(spec.local_world_size)
    return {
        "SLURM_PROCID": spec.rank, "SLURM_LOCALID": spec.local_rank, "SLURM_NODEID": spec.node,
        "SLURM_NNODES": nodes, "SLURM_NTASKS": spec.world_size, "SLURM_NPROCS": spec.world_size,
        "SLURM_NTASKS_PER_NODE": spec.local_world_size, "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NUM_TASKS": spec.world_size, "SLURM_STEP_TASKS_PER_NODE": tasks,
    }  # fmt: skip


class RankLauncher:
    def __init__(
        self,
        run: RunDir,
        attempt: AttemptDir,
        config: JobConfig,
        identity: NodeIdentity,
        environ: Mapping[str, str],
        host: str,
        sockets: FlightSockets | None = None,
        topology: Topology | None = None,
        *,
        per_node: bool = False,
    ) -> None:
        """`host` is the address at which the coordinator reaches this agent. `sockets` are for flight servers.
        If `per_node`, the command is started once per node and starts its own ranks.
        """
        self._topology = topology or Topology()
        self._run, self._attempt, self._config, self._identity = run, attempt, config, identity
        self._environ, self._reached_at, self._sockets = environ, host, sockets
        self._per_node, self._hostfile = per_node, ""

    def launch_order(self, start: StartGeneration, local_rank: int, files: RankFiles | None = None) -> StartRank:
        """Return the order for one rank. `files` are those that a program's start-up module opens."""
        config, spec = self._config, self._spec(start, local_rank)
        place = place_on_machine(self._identity, config, start.node_rank)
        cores = self.bind(start.node_rank)[0][local_rank]
        caches = rank_caches(place.first + local_rank, {**self._environ, **config.env})
        order = StartRank(rank=spec.rank, generation=spec.generation, cores=tuple(cores), env=caches, spec=spec)
        if start.master is None:
            return order
        folder, command = working_directory(self._run, config), with_interpreter(config, self._environ)
        at = self._node_place(spec, start.master)
        environ = self._command_environment(spec, at, start) | caches
        if self._per_node:
            own = own_command(command)
            command = (*command[:own], *place_launcher(command[own:], at, {**self._environ, **environ}))
        if files is not None and config.watch.instrument == AUTO:
            watchdog, saves = self._attempt.watchdog_flight(start.generation), self._attempt.program_saves(spec.node)
            first = spec.rank - spec.local_rank
            states = start.states[first : first + spec.local_world_size]
            environ |= instrument(files, {**self._environ, **environ}, watchdog, saves, states)
        return replace(order, spec=None, env=environ, command=command, folder=str(folder))

    def _node_place(self, spec: RankSpec, master: tuple[str, int]) -> NodePlace:
        nodes = self._config.cluster.nodes
        if nodes > 1 and not self._hostfile:
            # Programs open it by path, so it takes no place on any disk.
            descriptor = os.memfd_create("orch-hostfile", os.MFD_CLOEXEC)
            rows = (f"node-{node} slots={spec.local_world_size}\n" for node in range(nodes))
            os.write(descriptor, "".join(rows).encode())
            self._hostfile = f"/proc/{os.getpid()}/fd/{descriptor}"
        host, port = master
        return NodePlace(
            nodes=nodes, ranks=spec.local_world_size, node=spec.node, host=host, port=port, hostfile=self._hostfile
        )

    def bind(self, node_rank: int) -> tuple[list[list[int]], str]:
        """Return the cores of each local rank (empty: not bound) and the reason."""
        if self._per_node:
            return [[]] * self._config.cluster.ranks_per_node, "not bound: the command starts its own ranks"
        if self._config.cluster.bind == "off":
            return [[]] * self._config.cluster.ranks_per_node, "not bound: cluster.bind=off"
        place = place_on_machine(self._identity, self._config, node_rank)
        return bind_ranks(place, os.sched_getaffinity(0), self._topology)

    def _command_environment(self, spec: RankSpec, at: NodePlace, start: StartGeneration) -> dict[str, str]:
        config, inherited = self._config, self._environ
        ranks = {**spec.torchrun_variables(), "MASTER_ADDR": at.host, "MASTER_PORT": at.port}
        threads = max(1, config.cluster.cpus_per_task // config.cluster.ranks_per_node)
        error_file = self._attempt.error_file(spec.rank, spec.generation)
        variables = {
            **(at.variables() if self._per_node else ranks),
            **task_variables(spec, inherited, per_node=self._per_node),
            "TORCHELASTIC_MAX_RESTARTS": config.recovery.restarts_in_place,
            # torch would write the exception to the file without redacting secrets; the log has the same text.
            **({} if LISTED in inherited else {"TORCHELASTIC_ERROR_FILE": error_file}),
            # The script's own rank 0 hosts the store, which is new in every generation.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS") or threads,
            # The last output of a killed rank must reach its log.
            "PYTHONUNBUFFERED": "1",
            "ORCH_RUN": self._run.name,
            "ORCH_RUN_DIR": self._run.path,
            "ORCH_ATTEMPT": self._attempt.number,
            "ORCH_GENERATION": spec.generation,
            "ORCH_NODE_NAME": spec.node_name,
            **({"ORCH_RESUME_PATH": start.resume} if start.resume else {}),
            **({"ORCH_RESUME_EARLIER": 1} if start.is_earlier else {}),
            "PATH": interpreter_first(inherited.get("PATH", os.defpath), rank_python(inherited)),
        }
        return {**{name: str(value) for name, value in variables.items()}, **config.env}

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
            cell_fd=-1,  # filled in by the fork server
            control_fd=-1,
            host=self._host(),
            flight=self._sockets.path(rank, start.generation) if self._sockets else "",
            suspects=start.suspects,
            skip=start.skip,
            fit=start.fit,
            known_as=str(self._run.own_path),
        )

    def _host(self) -> str:
        """Return the address at which peers reach this node's ranks: the named interface's, or else the agent's."""
        interface = self._config.cluster.interface
        return tcp_transport.interface_address(interface) if interface else self._reached_at
