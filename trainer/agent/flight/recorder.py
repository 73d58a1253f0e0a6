"""Queries of ranks for their flight records over Unix sockets, off their training threads and with a time limit."""

import asyncio
import json
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from checkpointing.storage.trusted_path import is_trusted
from trainer.agent.flight.dump_fields import UNREADABLE
from trainer.agent.flight.flight_record import FlightRecord, parse, read
from trainer.agent.flight.safe_unpickle import MOST as LARGEST
from trainer.agent.flight.safe_unpickle import load
from trainer.protocol.rank_progress.rank_messages import groups_file
from trainer.protocol.run_dir import AttemptDir

HOST, DEVICE = "fr_trace_json", "dump_nccl_trace_json"
"""torch's two recorders: gloo's, always present, and NCCL's, if torch was built with it."""
NOTHING = b""
"""Answer of a server that lacks the requested recorder."""
MOST = 8 << 20
"""Maximum bytes of an answer."""
_LONGEST_PATH = 100
"""Maximum characters of a Unix socket's path; the kernel's limit is 107."""
_UNKNOWN = 404
_REFUSED = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)


class FlightSockets:
    """Private folder for the sockets of this agent's ranks, on the node's local file system."""

    def __init__(self) -> None:
        self._folder = _private_folder()

    def path(self, rank: int, generation: int) -> str:
        """Return the socket path of a rank in a generation; empty if it cannot listen."""
        path = f"{self._folder}/{rank}.{generation}" if self._folder else ""
        return path if len(path) <= _LONGEST_PATH else ""

    def close(self) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _private_folder() -> str:
    """Create a folder below TMPDIR, or /tmp if that is too long or not writable; "" if both fail."""
    for place in (tempfile.gettempdir(), "/tmp"):
        if len(place) > _LONGEST_PATH - 40:
            continue
        with suppress(OSError):
            return tempfile.mkdtemp(prefix="orch-", dir=place)
    return ""


async def flight(rank: int, path: str, seconds: float) -> FlightRecord | None:
    """Return the record of the rank that listens on `path`; None if it does not answer in time."""
    host, device = await asyncio.gather(ask(path, HOST, seconds), ask(path, DEVICE, seconds))
    # Without a GPU record, the host's record would be compared with the other ranks' GPUs.
    if not host or device is None:
        return None
    try:
        return read(rank, host, device or None, _groups(path))
    except UNREADABLE:  # an answer that no known torch version gives
        return None


async def flights(paths: Mapping[int, str], seconds: float) -> tuple[list[FlightRecord], list[int]]:
    """Query all these ranks at once; returns the records and the ranks that gave none."""
    answers = await asyncio.gather(*(flight(rank, path, seconds) for rank, path in paths.items()))
    found = [answer for answer in answers if answer is not None]
    return found, sorted(set(paths) - {answer.rank for answer in found})


async def ask(path: str, handler: str, seconds: float) -> bytes | None:
    """Return the answer of torch's worker server on `path`.
    NOTHING if it lacks the handler; None if it is absent, refuses or is late.
    """
    try:
        async with asyncio.timeout(seconds):
            return await _ask(path, handler)
    except (*_REFUSED, TimeoutError):
        return None


async def _ask(path: str, handler: str) -> bytes | None:
    if not path:
        return None
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        if not _is_ours(writer.get_extra_info("socket")):
            return None
        writer.write(
            f"POST /handler/{handler} HTTP/1.1\r\nHost: rank\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode()
        )
        await writer.drain()
        status, headers = await _head(reader)
        if status == _UNKNOWN:
            return NOTHING
        return await _body(reader, headers) if status == 200 else None
    finally:
        writer.close()


def _is_ours(connection: socket.socket) -> bool:
    """Return whether a process of this user listens there, according to the kernel."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return is_trusted(struct.unpack("3i", told)[1])


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.partition(" ")[2].partition(" ")[0]), headers


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if "chunked" in headers.get("transfer-encoding", ""):
        return await _chunks(reader)
    if "content-length" in headers:
        return await reader.readexactly(_check_size(int(headers["content-length"])))
    body = b""
    while more := await reader.read(65536):
        body += more
        _check_size(len(body))
    return body


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        if size == 0:
            return body
        _check_size(len(body) + size)
        body += await reader.readexactly(size)
        await reader.readexactly(2)


def _check_size(size: int) -> int:
    if not 0 <= size <= MOST:
        raise ValueError(f"an answer of {size} bytes")
    return size


def _groups(path: str) -> Mapping[str, Any]:
    try:
        told = json.loads(Path(groups_file(path)).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def records_of_dead_ranks(attempt: AttemptDir, generation: int) -> list[FlightRecord]:
    """Return the records that this generation's ranks left when an exception or NCCL's watchdog ended them.
    Reads the shared file system. An unreadable record is reported on stderr.
    """
    found: dict[int, FlightRecord] = {}
    for path in attempt.all_last_flights(generation):
        with _its_own_fault(path):
            for line in filter(None, path.read_bytes().splitlines()):
                with _its_own_fault(path):
                    left = json.loads(line)
                    rank = int(left["rank"])
                    found[rank] = read(rank, left, left.get("device"), left.get("groups"))
    for rank, path in attempt.watchdog_flights(generation):
        if rank not in found:
            with _its_own_fault(path):
                found[rank] = parse(rank, load(_bytes(path)))
    return list(found.values())


@contextmanager
def _its_own_fault(path: Path) -> Iterator[None]:
    """Report an unreadable record on stderr and skip it; other ranks' records are still read."""
    try:
        yield
    except (OSError, *UNREADABLE) as error:
        sys.stderr.write(f"orch-agent: a flight record in {path.name} cannot be read: {error!r:.200}\n")


def _bytes(path: Path) -> bytes:
    """Read at most one byte more than the largest accepted pickle."""
    with path.open("rb") as file:
        return file.read(LARGEST + 1)
