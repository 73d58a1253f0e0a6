"""Ranks that are threads of one process, and a writer for them: faster than real ranks."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from checkpointing.engine.collectives.group import result_or_failed
from checkpointing.storage.backends import Storage
from checkpointing.tiers.copy_files import Copied, CopyOrder, copy_files
from checkpointing.writer.write_orders import OrderThreads


class ThreadGroup:
    """Where the ranks of one group meet; a missing rank breaks it for all after `patience` seconds."""

    def __init__(self, size: int, patience: float = 20.0) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=patience)
        self._table: list[Any] = [None] * size

    def members(self) -> "list[Member]":
        return [Member(self, rank) for rank in range(self.size)]

    def exchange(self, rank: int, value: Any) -> list[Any]:
        try:
            self._table[rank] = value
            self._barrier.wait()
            reported = list(self._table)
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RuntimeError("the group is broken") from error
        return reported

    def abandon(self) -> None:
        """What a rank that died causes for its peers."""
        self._barrier.abort()


@dataclass
class Member:
    """One rank's end of a hall, with the methods of a process group."""

    thread_group: ThreadGroup
    rank: int
    closed: bool = False
    leads_node: bool = True

    @property
    def size(self) -> int:
        return self.thread_group.size

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def looks_after(self, *, shared: bool) -> bool:
        return self.leads if shared else self.leads_node

    def all_gather(self, value: Any) -> list[Any]:
        return self.thread_group.exchange(self.rank, value)

    def broadcast(self, value: Any) -> Any:
        return self.thread_group.exchange(self.rank, value)[0]

    def from_leader(self, act: Callable[[], Any]) -> Any:
        return self.broadcast(result_or_failed(act) if self.leads else None)

    def gather(self, value: Any) -> list[Any] | None:
        found = self.all_gather(value)
        return found if self.leads else None

    def scatter(self, values: Sequence[Any] | None) -> Any:
        return self.broadcast(values)[self.rank]

    def minimum(self, numbers: Sequence[int]) -> list[int]:
        return [min(column) for column in zip(*self.all_gather(list(numbers)), strict=True)]

    def close(self) -> None:
        self.closed = True


@dataclass
class ThreadedWriter:
    """Copies in threads of this process, between the storages that a test has made."""

    storages: Mapping[str, Storage]
    orders: list[CopyOrder] = field(default_factory=list)
    before: Callable[[CopyOrder], None] = lambda order: None
    _threads: OrderThreads = field(default_factory=OrderThreads)

    def copy(self, order: CopyOrder) -> "Future[Copied]":
        self.orders.append(order)

        def act(cancel_token: Any) -> Copied:
            self.before(order)
            return copy_files(
                order,
                source=self.storages[order.source],
                target=self.storages[order.target],
                stopped=cancel_token.is_cancelled,
                sleep=lambda seconds: None,
            )

        return self._threads.start(act)


def together(acts: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run the acts of all ranks in parallel; raises what any of them raised."""
    results: list[Any] = [None] * len(acts)

    def run(at: int) -> None:
        try:
            results[at] = acts[at]()
        except (AssertionError, OSError, RuntimeError) as error:
            results[at] = error

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive(), "a rank does not come to an end"
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
