"""Digests of the bytes that are handed to write, chunk by chunk: xxh3-128, 8 MiB chunks."""

from types import TracebackType
from typing import Any, Protocol

import xxhash

CHUNK = 8 << 20

Bytes = bytes | bytearray | memoryview


class Sink(Protocol):
    """A file being written: `close` makes it durable, `abort` gives it up without waiting for the disk."""

    def write(self, data: Bytes) -> int: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


def digest(data: Bytes) -> str:
    """xxh3-128 as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def filled_digest(data: Bytes, size: int = CHUNK) -> str:
    """Of `data` with zeros after it, `size` bytes in all."""
    state = xxhash.xxh3_128(data)
    state.update(bytes(size - len(data)))
    return state.hexdigest()


class DigestSink:
    """Passes bytes on to a sink and digests the very same ones; remembers the first OSError it saw.

    The memory of the error matters because torch's zip writer buries it under a RuntimeError of its own.
    """

    def __init__(self, sink: Sink, chunk_size: int = CHUNK) -> None:
        self._sink, self._chunk_size = sink, chunk_size
        self._hash, self._filled = xxhash.xxh3_128(), 0
        self._chunks: list[str] = []
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Digest and pass on one piece, whatever bytes-like form it has; returns its length in bytes."""
        view = memoryview(data).cast("B")
        self._absorb(view)
        try:
            self._sink.write(view)
        except OSError as error:
            self.error = self.error or error
            raise
        return len(view)

    def _absorb(self, view: memoryview) -> None:
        self.size += len(view)
        while len(view):
            piece = view[: self._chunk_size - self._filled]
            self._hash.update(piece)
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == self._chunk_size:
                self._seal_chunk()

    def _seal_chunk(self) -> None:
        self._chunks.append(self._hash.hexdigest())
        self._hash.reset()
        self._filled = 0

    def flush(self) -> None:
        """torch.save calls it after every tensor; the disk is only waited for in `close`."""

    def tell(self) -> int:
        return self.size

    @property
    def chunks(self) -> tuple[str, ...]:
        """Digests of all chunks so far, the unfinished last one included."""
        last = (self._hash.hexdigest(),) if self._filled else ()
        return (*self._chunks, *last)

    def __enter__(self) -> "DigestSink":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._sink.close()
        else:
            self._sink.abort()
