"""What an agent tells its fork server about each rank to start."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.agent.control import address
from trainer.agent.control.tcp_transport import Message
from trainer.agent.flight.recorder import FlightSockets
from trainer.agent.fork_server import cpu_binding
from trainer.agent.fork_server.torchrun_command import torchrun_environment, working_directory
from trainer.contract.config import JobConfig
from trainer.contract.node_identity import NodeIdentity
from trainer.contract.ranks.rank_messages import RankSpec
from trainer.contract.run_dir import AttemptDir, RunDir


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """What the coordinator wants of a generation beyond its being born."""

    suspects: tuple[int, ...] = ()  # steps whose checkpoints are not to be loaded
    skip: tuple[int, ...] = ()  # positions in the data that are skipped
    fit: bool = True  # ranks measure their nodes: some of these are new to them

    @classmethod
    def from_message(cls, message: Message) -> "GenerationOptions":
        return cls(
            suspects=tuple(message.get("suspects", ())),
            skip=tuple(message.get("skip", ())),
            fit=bool(message.get("fit", True)),
        )


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

    def launch_order(
        self, node_rank: int, local_rank: int, generation: int, master: Sequence[Any] | None, options: GenerationOptions
    ) -> dict[str, Any]:
        """The order for one rank of this node; `master` is where the ranks of a user's own command meet."""
        config = self._config
        rank = node_rank * config.cluster.ranks_per_node + local_rank
        order: dict[str, Any] = {
            "rank": rank,
            "generation": generation,
            "cores": cpu_binding.cores_of_rank(self._identity, config, node_rank, local_rank, os.sched_getaffinity(0)),
            "env": {},
            "command": [],
            "cwd": "",
            "spec": None,
        }
        if master is None:
            return {**order, "spec": asdict(self._spec(node_rank, local_rank, generation, options))}
        order["command"] = list(config.command)
        order["cwd"] = str(working_directory(self._run, config))
        order["env"] = torchrun_environment(
            run=self._run, attempt=self._attempt, config=config, node_rank=node_rank, generation=generation,
            local_rank=local_rank, master=(master[0], master[1]), inherited=self._environ,
        )  # fmt: skip
        return order

    def _spec(self, node_rank: int, local_rank: int, generation: int, options: GenerationOptions) -> RankSpec:
        cluster = self._config.cluster
        rank = node_rank * cluster.ranks_per_node + local_rank
        return RankSpec(
            run_dir=str(self._run.path),
            attempt=self._attempt.number,
            generation=generation,
            rank=rank,
            local_rank=local_rank,
            world_size=cluster.world_size,
            local_world_size=cluster.ranks_per_node,
            node=node_rank,
            node_name=self._identity.name,
            cell_fd=-1,  # the fork server fills in what it receives
            control_fd=-1,
            host=self._host(),
            flight=self._sockets.path(rank, generation) if self._sockets else "",
            suspects=options.suspects,
            skip=options.skip,
            fit=options.fit,
            run=self._run.name,
        )

    def _host(self) -> str:
        """Where peers reach this node's ranks: on the named interface, else where the coordinator reaches its agent."""
        interface = self._config.cluster.interface
        return address.of_interface(interface) if interface else self._reached_at
