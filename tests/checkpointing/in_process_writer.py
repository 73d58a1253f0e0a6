"""A writer that runs orders in threads of the test's process, on a storage that the test has made."""

from concurrent.futures import Future

from checkpointing.format.commit import write_file
from checkpointing.format.manifest import FileEntry
from checkpointing.storage.backends import Storage, open_storage
from checkpointing.tiers.copy_files import Copied, CopyOrder, copy_files
from checkpointing.writer.arena import Arena
from checkpointing.writer.write_orders import OrderThreads, WriteOrder, WriteResult, write_files


class InProcessWriter:
    """Runs the orders of a writer process on one storage, or on each order's own place."""

    alive = True

    def __init__(self, storage: Storage | None = None, arena: Arena | None = None) -> None:
        self.arena = arena if arena is not None else Arena.create()
        self._storage, self._orders = storage, OrderThreads()

    def write(self, order: WriteOrder) -> "Future[WriteResult]":
        return self._orders.start(
            lambda cancel_token: write_files(order, self.arena, cancel_token, self._storage),
            reads_memory_for=order.place,
        )

    def put(self, place: str, folder: str, name: str, blob: bytes) -> "Future[FileEntry]":
        storage = self._storage if self._storage is not None else open_storage(place)
        return self._orders.start(lambda _: write_file(storage, folder, name, blob))

    def copy(self, order: CopyOrder) -> "Future[Copied]":
        return self._orders.start(
            lambda cancel_token: copy_files(order, stopped=cancel_token.is_cancelled, sleep=cancel_token.sleep)
        )

    def ping(self) -> "Future[None]":
        return self._orders.start(lambda _: None)

    def warm(self) -> "Future[None]":
        return self._orders.start(lambda _: self.arena.populate())

    def replacement(self) -> "InProcessWriter":
        return self

    def cancel(self) -> None:
        self._orders.cancel()

    def close(self) -> None:
        self._orders.quiesce(2.0)
        self.arena.close()
