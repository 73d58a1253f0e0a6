"""Digests of written bytes: xxh3-128, one for each 8 MiB chunk.

xxhash is imported late: an agent reads the format of checkpoints, also in images that lack it.
"""

from types import TracebackType
from typing import Any, Protocol

CHUNK = 8 << 20

Bytes = bytes | bytearray | memoryview


class Sink(Protocol):
    """A file being written. `close` makes it durable; `abort` abandons it without waiting for the disk."""

    def write(self, data: Bytes) -> int: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


def digest(data: Bytes) -> str:
    """Return the xxh3-128 digest as 32 hex digits."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)


def filled_digest(data: Bytes, size: int = CHUNK) -> str:
    """Return the digest of `data` padded with zeros to `size` bytes."""
    import xxhash

    state = xxhash.xxh3_128(data)
    state.update(bytes(size - len(data)))
    return state.hexdigest()


class DigestSink:
    """Wrapper around a sink that digests all bytes as it passes them on."""

    def __init__(self, sink: Sink, chunk_size: int = CHUNK) -> None:
        import xxhash

        self._sink, self._chunk_size = sink, chunk_size
        self._hash, self._filled = xxhash.xxh3_128(), 0
        self._chunks: list[str] = []
        self.size = 0

    def write(self, data: Any) -> int:
        """Digest and pass on one bytes-like object; return its length in bytes."""
        view = memoryview(data).cast("B")
        self._absorb(view)
        self._sink.write(view)
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

    @property
    def chunks(self) -> tuple[str, ...]:
        """The digests of all chunks so far, including the unfinished last one."""
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
