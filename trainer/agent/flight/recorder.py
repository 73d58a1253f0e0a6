"""Flight records of ranks: queries to live ranks over Unix sockets, and safe reading of the dumps left by dead ones.

A pickle is a program whose opcodes may import and call anything. `load` reads the opcodes (`pickletools`) and accepts
only those for plain values.
"""

import asyncio
import json
import pickletools
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from checkpointing.storage.trusted_path import is_trusted
from trainer.agent.flight.flight_record import UNREADABLE, FlightRecord, parse, read
from trainer.protocol.messages.ranks import groups_file
from trainer.protocol.run_dir import AttemptDir

MAX_PICKLE_BYTES = 64 << 20
"""Maximum bytes of a dump."""
_STEPS = 20_000_000
"""Maximum number of opcodes executed."""
_NODES, _DEEPEST = 3_000_000, 50
"""Maximum number of values and nesting depth of a dump; a value referenced twice counts twice."""
_LETTERS = 256 << 20
"""Maximum characters of all strings; shared strings count repeatedly, since a reader copies them."""
_MARK = object()

_VALUES = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE",
})  # fmt: skip
_MAKE: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_LIST": list, "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUT = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GET = frozenset({"GET", "BINGET", "LONG_BINGET"})
_IGNORED = frozenset({"PROTO", "FRAME"})


def load_plain_values(data: bytes) -> Any:
    """Return the content of a pickle of dicts, lists, tuples, strings and numbers; raises ValueError for others."""
    if len(data) > MAX_PICKLE_BYTES:
        raise ValueError(f"pickle size {len(data):,} exceeds {MAX_PICKLE_BYTES:,} bytes")
    machine = _Machine()
    try:
        for steps, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if steps > _STEPS:
                raise ValueError("pickle has too many opcodes")
            if opcode.name == "STOP":
                return _check_expansion(machine.result())
            machine.do(opcode.name, argument)
    except (IndexError, KeyError, TypeError, UnicodeError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a pickle of plain values: {error!r}") from error
    raise ValueError("pickle has no end")


def _check_expansion(value: Any) -> Any:
    """Return the value; raises ValueError if it expands hugely: a list containing itself, or repeated references."""
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


class _Machine:
    """Stack of a pickle, for the opcodes that only build plain values."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _MAKE:
            stack.append(_MAKE[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _TUPLES:
            stack.append(tuple(self._pop(_TUPLES[name])))
        elif name in _PUT:
            self._memo[int(argument)] = self._top()
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif name in _GET:
            stack.append(self._memo[int(argument)])
        elif name not in _IGNORED:
            self._gather(name)

    def _gather(self, name: str) -> None:
        match name:
            case "APPEND":
                (value,) = self._pop(1)
                self._top(list).append(value)
            case "APPENDS":
                values = self._to_mark()
                self._top(list).extend(values)
            case "SETITEM":
                values = self._pop(2)
                self._set(values)
            case "SETITEMS":
                self._set(self._to_mark())
            case "LIST":
                self._stack.append(self._to_mark())
            case "TUPLE":
                self._stack.append(tuple(self._to_mark()))
            case "DICT":
                values = self._to_mark()
                self._stack.append({})
                self._set(values)
            case _:
                raise ValueError(f"pickle opcode not allowed: {name}")

    def _set(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise ValueError("pickle has a key without a value")
        self._top(dict).update(zip(values[::2], values[1::2], strict=True))

    def _pop(self, count: int) -> list[Any]:
        values = self._stack[-count:]
        if len(values) < count or any(value is _MARK for value in values):
            raise ValueError("pickle stack is empty")
        del self._stack[-count:]
        return values

    def _to_mark(self) -> list[Any]:
        at = max(place for place, value in enumerate(self._stack) if value is _MARK)
        values = self._stack[at + 1 :]
        del self._stack[at:]
        return values

    def _top(self, kind: type = object) -> Any:
        value = self._stack[-1]
        if value is _MARK or not isinstance(value, kind):
            raise ValueError(f"pickle uses a {type(value).__name__} as a {kind.__name__}")
        return value

    def result(self) -> Any:
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise ValueError("pickle must contain exactly one value")
        return self._stack[0]


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
    except UNREADABLE:  # an answer that no known torch version sends
        return None


async def flights(paths: Mapping[int, str], seconds: float) -> tuple[list[FlightRecord], list[int]]:
    """Query all these ranks at once; returns the records and the ranks that returned none."""
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
        raise ValueError(f"response size {size} is outside 0 to {MOST} bytes")
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
