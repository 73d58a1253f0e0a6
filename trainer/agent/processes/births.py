"""What an agent tells its nursery about each rank that is to be born."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer.agent.control import address
from trainer.agent.control.wire import Message
from trainer.agent.flight.recorder import Sockets
from trainer.agent.processes import cores
from trainer.agent.processes.command import environment, folder
from trainer.contract.config import JobConfig
from trainer.contract.place import Place
from trainer.contract.rank import RankSpec
from trainer.contract.run_dir import AttemptDir, RunDir


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the coordinator wants of a generation beyond its being born."""

    suspects: tuple[int, ...] = ()  # steps whose checkpoints are not to be loaded
    skip: tuple[int, ...] = ()  # positions in the data that are left out
    fit: bool = True  # ranks measure their nodes: some of these are new to them

    @classmethod
    def from_message(cls, message: Message) -> "Wishes":
        return cls(
            suspects=tuple(message.get("suspects", ())),
            skip=tuple(message.get("skip", ())),
            fit=bool(message.get("fit", True)),
        )


class Births:
    """Writes the orders for the ranks of one node."""

    def __init__(
        self,
        run: RunDir,
        attempt: AttemptDir,
        config: JobConfig,
        place: Place,
        environ: Mapping[str, str],
        host: str,
        sockets: Sockets | None = None,
    ) -> None:
        """`host`: where the coordinator reaches this node's agent; `sockets`: where ranks answer for their flights."""
        self._run, self._attempt, self._config, self._place = run, attempt, config, place
        self._environ, self._reached_at, self._sockets = environ, host, sockets

    def order(
        self, seat: int, local_rank: int, generation: int, master: Sequence[Any] | None, wishes: Wishes
    ) -> dict[str, Any]:
        """The order for one rank of this seat; `master` is where the ranks of a user's own command meet."""
        config = self._config
        rank = seat * config.cluster.ranks_per_node + local_rank
        order: dict[str, Any] = {
            "rank": rank,
            "generation": generation,
            "cores": cores.of_rank(self._place, config, seat, local_rank, os.sched_getaffinity(0)),
            "env": {},
            "command": [],
            "cwd": "",
            "spec": None,
        }
        if master is None:
            return {**order, "spec": asdict(self._spec(seat, local_rank, generation, wishes))}
        order["command"] = list(config.command)
        order["cwd"] = str(folder(self._run, config))
        order["env"] = environment(
            run=self._run, attempt=self._attempt, config=config, seat=seat, generation=generation,
            local_rank=local_rank, master=(master[0], master[1]), inherited=self._environ,
        )  # fmt: skip
        return order

    def _spec(self, seat: int, local_rank: int, generation: int, wishes: Wishes) -> RankSpec:
        cluster = self._config.cluster
        rank = seat * cluster.ranks_per_node + local_rank
        return RankSpec(
            run_dir=str(self._run.path),
            attempt=self._attempt.number,
            generation=generation,
            rank=rank,
            local_rank=local_rank,
            world_size=cluster.world_size,
            local_world_size=cluster.ranks_per_node,
            node=seat,
            node_name=self._place.name,
            cell_fd=-1,  # the nursery fills in what it receives
            control_fd=-1,
            host=self._host(),
            flight=self._sockets.path(rank, generation) if self._sockets else "",
            suspects=wishes.suspects,
            skip=wishes.skip,
            fit=wishes.fit,
        )

    def _host(self) -> str:
        """Where peers reach this node's ranks: on the named interface, else where the coordinator reaches its agent."""
        interface = self._config.cluster.interface
        return address.of_interface(interface) if interface else self._reached_at
