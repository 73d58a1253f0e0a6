"""What an agent tells its fork server about each rank to start."""

import os
from collections.abc import Mapping

from trainer.agent.control import tcp_transport
from trainer.agent.flight.recorder import FlightSockets
from trainer.agent.fork_server import cpu_binding
from trainer.agent.fork_server.torchrun_command import torchrun_environment, with_interpreter, working_directory
from trainer.contract.config import JobConfig
from trainer.contract.messages.agents import StartGeneration
from trainer.contract.messages.fork_server import StartRank
from trainer.contract.node_identity import NodeIdentity
from trainer.contract.ranks.rank_messages import RankSpec
from trainer.contract.run_dir import AttemptDir, RunDir


class RankLauncher:
    """Writes the orders for the ranks of one node."""

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
        """`host`: where the coordinator reaches this node's agent; `sockets`: where ranks answer for their flights."""
        self._run, self._attempt, self._config, self._identity = run, attempt, config, identity
        self._environ, self._reached_at, self._sockets = environ, host, sockets

    def launch_order(self, start: StartGeneration, local_rank: int) -> StartRank:
        """The order for one rank of this node."""
        config, node_rank = self._config, start.node_rank
        rank = node_rank * config.cluster.ranks_per_node + local_rank
        bound = cpu_binding.cores_of_rank(self._identity, config, node_rank, local_rank, os.sched_getaffinity(0))
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
            run=self._run.name,
        )

    def _host(self) -> str:
        """Where peers reach this node's ranks: on the named interface, else where the coordinator reaches its agent."""
        interface = self._config.cluster.interface
        return tcp_transport.of_interface(interface) if interface else self._reached_at
