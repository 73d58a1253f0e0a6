"""Flight records of ranks: queries to live ranks over Unix sockets, and safe reading of dumps left by dead ranks.

A pickle is a program whose opcodes can import and call anything. Before a dump is unpickled, its opcodes are checked
(`pickletools`); only those that build plain values are allowed.
"""

import asyncio
import json
import pickle
import pickletools
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from checkpointing.storage.trusted_path import is_trusted
from trainer.agent.flight.flight_record import UNREADABLE, FlightRecord, parse, read
from trainer.agent.processes.background_tasks import run_detached
from trainer.protocol.messages.ranks import groups_file
from trainer.protocol.run_dir import AttemptDir

MAX_PICKLE_BYTES = 64 << 20
"""Maximum bytes of a dump."""
_STEPS = 20_000_000
"""Maximum number of opcodes executed."""
_NODES, _DEEPEST = 3_000_000, 50
"""Maximum number of values and nesting depth of a dump; a value referenced twice counts twice."""
_LETTERS = 256 << 20
"""Maximum characters of all strings together; shared strings count every time, since a reader copies them."""
_VALUES = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT", "BINUNICODE", "UNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "MARK",
    "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "LIST", "DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "PUT", "BINPUT",
    "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET", "PROTO", "FRAME", "STOP",
})  # fmt: skip
"""Opcodes that only build plain values. None of them imports, calls or constructs anything else."""


def load_plain_values(data: bytes) -> Any:
    """Return the content of a pickle of dicts, lists, tuples, strings and numbers. Raises ValueError otherwise."""
    if len(data) > MAX_PICKLE_BYTES:
        raise ValueError(f"pickle size {len(data):,} exceeds {MAX_PICKLE_BYTES:,} bytes")
    try:
        for steps, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if steps > _STEPS:
                raise ValueError("pickle has too many opcodes")
            if opcode.name not in _VALUES:
                raise ValueError(f"pickle opcode not allowed: {opcode.name}")
            # The memo is an array as long as its largest index.
            if opcode.name.endswith("PUT") and (argument or 0) > steps:
                raise ValueError(f"pickle memo index {argument:,} is too large")
        return _check_expansion(pickle.loads(data))
    except (pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"not a pickle of plain values: {error!r}") from error


def _check_expansion(value: Any) -> Any:
    """Return the value. Raises ValueError if a list contains itself, or if repeated references make the value huge."""
    count, letters, level = 0, 0, [value]
    for _ in range(_DEEPEST):
        count += len(level)
        letters += sum(len(one) for one in level if isinstance(one, str))
        if count > _NODES or letters > _LETTERS:
            raise ValueError("pickle has too many values")
        inner = [one for one in level if isinstance(one, list | tuple | dict)]
        if not inner:
            return value
        if count + sum(map(len, inner)) > _NODES:
            raise ValueError("pickle has too many values")
        level = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
    raise ValueError("pickle is nested too deeply")


HOST, DEVICE = "fr_trace_json", "dump_nccl_trace_json"
"""torch's two recorders: gloo's, always present, and NCCL's, if torch was built with it."""
NOTHING = b""
"""Answer of a server that lacks the requested recorder."""
MAX_ANSWER_BYTES = 8 << 20
_LONGEST_PATH = 100
"""Maximum characters of a Unix socket's path; the kernel's limit is 107."""


class FlightSockets:
    """Private folder for the sockets of this agent's ranks, on the node's local file system."""

    def __init__(self) -> None:
        self._folder = _private_folder()

    def path(self, rank: int, generation: int) -> str:
        """Return the socket path of a rank in a generation, or "" if the rank cannot listen."""
        path = f"{self._folder}/{rank}.{generation}" if self._folder else ""
        return path if len(path) <= _LONGEST_PATH else ""

    def close(self) -> None:
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _private_folder() -> str:
    """Create a folder below TMPDIR, or below /tmp if that is too long or not writable. Return "" if both fail."""
    for place in (tempfile.gettempdir(), "/tmp"):
        if len(place) > _LONGEST_PATH - 40:
            continue
        with suppress(OSError):
            return tempfile.mkdtemp(prefix="orch-", dir=place)
    return ""


async def flight(rank: int, path: str, seconds: float) -> FlightRecord | None:
    """Return the record of the rank that listens on `path`, or None if it gives no usable answer in time."""
    host, device = await asyncio.gather(ask(path, HOST, seconds), ask(path, DEVICE, seconds))
    # Without a GPU record, this rank's host record would be compared with other ranks' GPU records.
    if not host or device is None:
        return None
    try:
        return read(rank, host, device or None, _groups(path))
    except UNREADABLE:  # an answer that no known torch version sends
        return None


async def flights(paths: Mapping[int, str], seconds: float) -> tuple[list[FlightRecord], list[int]]:
    """Query all these ranks concurrently. Return the records, and the ranks that returned none."""
    answers = await asyncio.gather(*(flight(rank, path, seconds) for rank, path in paths.items()))
    found = [answer for answer in answers if answer is not None]
    return found, sorted(set(paths) - {answer.rank for answer in found})


async def ask(path: str, handler: str, seconds: float) -> bytes | None:
    """Return the answer of torch's worker server on `path`, NOTHING if the server lacks the handler, or None if the
    server is absent, refuses or is late.
    """
    try:
        return await run_detached(lambda: _ask(path, handler, seconds), seconds) if path else None
    except (OSError, ValueError, HTTPException):  # TimeoutError is an OSError
        return None


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("rank", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
        owner = struct.unpack("3i", self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if not is_trusted(owner[1]):
            raise PermissionError(f"another user's process listens on {self._path}")


def _ask(path: str, handler: str, seconds: float) -> bytes | None:
    with closing(_UnixConnection(path, seconds)) as connection:
        connection.request("POST", f"/handler/{handler}")
        response = connection.getresponse()
        if response.status == HTTPStatus.NOT_FOUND:
            return NOTHING
        body = response.read(MAX_ANSWER_BYTES + 1)
        # `length` counts missing bytes. No dump is empty.
        complete = bool(body) and not response.length and len(body) <= MAX_ANSWER_BYTES
        return body if response.status == HTTPStatus.OK and complete else None


def _groups(path: str) -> Mapping[str, Any]:
    try:
        groups = json.loads(Path(groups_file(path)).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return groups if isinstance(groups, dict) else {}


def records_of_dead_ranks(attempt: AttemptDir, generation: int) -> list[FlightRecord]:
    """Return the records that ranks of this generation left when an exception or NCCL's watchdog ended them.
    Reads the shared file system. An unreadable record is reported on stderr.
    """
    found: dict[int, FlightRecord] = {}
    for path in attempt.all_last_flights(generation):
        with _report_unreadable(path):
            for line in filter(None, path.read_bytes().splitlines()):
                with _report_unreadable(path):
                    left = json.loads(line)
                    rank = int(left["rank"])
                    found[rank] = read(rank, left, left.get("device"), left.get("groups"))
    for rank, path in attempt.watchdog_flights(generation):
        if rank not in found:
            with _report_unreadable(path):
                found[rank] = parse(rank, load_plain_values(_bytes(path)))
    return list(found.values())


@contextmanager
def _report_unreadable(path: Path) -> Iterator[None]:
    """Report an unreadable record on stderr and skip it; other ranks' records are still read."""
    try:
        yield
    except (OSError, *UNREADABLE) as error:
        sys.stderr.write(f"orch-agent: cannot read a flight record in {path.name}: {error!r:.200}\n")


def _bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_PICKLE_BYTES + 1)
