"""What a rank and its writer say to each other over a stream socket: a JSON header, and bytes beside it.

A message is a 4-byte length, the header, and as many bytes as the header's `blob` says.
"""

import json
import os
import socket
import struct
import threading
from typing import Any

from checkpointing.format.manifest import FileEntry
from checkpointing.tiers.copy_files import CopyOrder
from checkpointing.writer.write_orders import WriteOrder, WriteResult

_LENGTH = struct.Struct("<I")
_LONGEST_HEADER = 1 << 28

Message = tuple[dict[str, Any], bytes]


class MessageStream:
    """One end of the socket, which it owns; any thread may send, one reads."""

    def __init__(self, stream: socket.socket) -> None:
        stream.settimeout(None)  # a program's `socket.setdefaulttimeout` is for its own sockets
        self._stream, self._lock = stream, threading.Lock()

    def send(self, header: dict[str, Any], blob: bytes = b"") -> None:
        """Send one message whole; raises OSError when the other side is gone."""
        data = json.dumps({**header, "blob": len(blob)}, separators=(",", ":")).encode()
        with self._lock:
            self._stream.sendall(_LENGTH.pack(len(data)) + data)
            if blob:
                self._stream.sendall(blob)

    def receive(self) -> Message | None:
        """The next message; None when the other side is gone, or does not speak like this."""
        try:
            head = self._exactly(_LENGTH.size)
            length = _LENGTH.unpack(head)[0] if head else 0
            data = self._exactly(length) if 0 < length <= _LONGEST_HEADER else b""
            header = json.loads(data) if data else None
            blob = self._exactly(header["blob"]) if header else b""
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return (header, blob) if header and len(blob) == header["blob"] else None

    def _exactly(self, size: int) -> bytes:
        """`size` bytes, or none when the stream ends before."""
        pieces, left = [], size
        while left:
            piece = self._stream.recv(min(left, 1 << 20))
            if not piece:
                return b""
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def disconnect(self) -> None:
        """End the conversation for both sides, and wake a reader; the descriptor stays until `close`."""
        try:
            self._stream.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other side was faster
            return

    def close(self) -> None:
        self._stream.close()


def encode_error(error: BaseException) -> dict[str, Any]:
    """An error as it travels."""
    if isinstance(error, OSError) and error.errno is not None:
        named = error.filename if isinstance(error.filename, (str, bytes, type(None))) else str(error.filename)
        return {"errno": error.errno, "text": error.strerror, "file": os.fsdecode(named) if named else None}
    return {"errno": None, "text": f"{type(error).__name__}: {error}"[:4000], "file": None}


def decode_error(fault: dict[str, Any]) -> OSError:
    """The error that travelled, with its errno; one that had none is an OSError without one."""
    if fault["errno"] is None:
        return OSError(fault["text"])
    return OSError(fault["errno"], fault["text"], *([fault["file"]] if fault["file"] else []))


def decode_write_order(fields: dict[str, Any]) -> WriteOrder:
    files = tuple((name, offset, size) for name, offset, size in fields["files"])
    places = tuple((name, offset) for name, offset in fields["places"])
    return WriteOrder(**{**fields, "files": files, "places": places})


def decode_copy_order(fields: dict[str, Any]) -> CopyOrder:
    return CopyOrder(**{**fields, "files": tuple(decode_entry(entry) for entry in fields["files"])})


def decode_entry(fields: dict[str, Any]) -> FileEntry:
    return FileEntry(**{**fields, "chunks": tuple(fields["chunks"])})


def decode_write_result(fields: dict[str, Any]) -> WriteResult:
    files = tuple(decode_entry(entry) for entry in fields["files"])
    return WriteResult(**{**fields, "files": files, "filled": tuple(fields["filled"])})
