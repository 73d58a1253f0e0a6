"""Evidence of a hang, collected by the agent: stacks, logs, flight records, and the state of processes and node."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.agent.control.tcp_transport import CoordinatorPeer
from trainer.agent.flight import recorder
from trainer.agent.flight.flight_record import newest
from trainer.agent.flight.nccl_ras import query_ras
from trainer.agent.flight.recorder import FlightSockets
from trainer.agent.processes import proc
from trainer.agent.processes.background_tasks import run_detached
from trainer.agent.rank_processes.local_ranks import LocalRank, LocalRanks
from trainer.agent.watch.sampling import Sampler
from trainer.protocol.logs.log_rotation import read_tail
from trainer.protocol.messages.agents import CollectEvidence, EvidenceCollected, FlightRecords, QueryFlights, RasRow
from trainer.protocol.messages.ranks import STACKS
from trainer.protocol.run_dir import AttemptDir
from trainer.protocol.secrets.secret_redaction import in_use

_STACKS_LOOK = 0.05
_MOST_STACKS = 1 << 20


async def ask_for_stacks(pid: int, memory: int) -> bytes:
    """Make the rank write its stacks into `memory`, a memfd, and wait until it has done so. May be cancelled.
    WARNING: both processes share the file position, so it is reset before the signal and never moved by reading.
    """
    os.ftruncate(memory, 0)
    os.lseek(memory, 0, os.SEEK_SET)
    os.kill(pid, STACKS)
    size = 0
    while True:
        await asyncio.sleep(_STACKS_LOOK)
        now = os.fstat(memory).st_size
        if now and now == size:
            return os.pread(memory, _MOST_STACKS, 0)
        size = now


_KERNEL_LINES = 500
_FILES = (
    "loadavg", "uptime", "meminfo", "pressure/cpu", "pressure/io", "pressure/memory", "vmstat", "net/dev", "mounts",
)  # fmt: skip
_GPU = "UTILIZATION,MEMORY,ECC,TEMPERATURE,POWER,CLOCK,PERFORMANCE,PAGE_RETIREMENT,ROW_REMAPPER,PIDS"


def kernel(seconds: float) -> bytes:
    return b"\n".join(_run_tool(["dmesg", "--time-format", "iso"], seconds).splitlines()[-_KERNEL_LINES:])


def memory(seconds: float) -> bytes:
    """Return the figures for load, memory and pressure stalls as the kernel prints them."""
    parts = []
    for name in _FILES:
        try:
            text = (Path("/proc") / name).read_text(errors="replace")
        except OSError as error:  # not every kernel provides pressure figures
            text = f"[{error.strerror}]\n"
        parts.append(f"==> /proc/{name}\n{text}")
    return "\n".join(parts).encode()


def gpus(seconds: float) -> bytes:
    """Return the driver's report on errors, clocks, throttling and processes. Raises OSError if there is no driver."""
    return _run_tool(["nvidia-smi", "-q", "-d", _GPU], seconds)


def _run_tool(command: list[str], seconds: float) -> bytes:
    """Return the output of a program found in this Python's folder or PATH. Raises OSError if there is none."""
    program = shutil.which(command[0], path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}")
    if program is None:
        hint = " (pip install 'orch[stacks]')" if command[0] == "py-spy" else ""
        raise OSError(f"{command[0]} is not installed{hint}")
    try:
        done = subprocess.run(
            [program, *command[1:]], stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} took more than {seconds:.1f} s") from None
    if not done.stdout:
        raise OSError(f"{command[0]}: {done.stderr.decode(errors='replace').strip()[:500] or 'no output'}")
    return done.stdout


NODE_PARTS: dict[str, Callable[[float], bytes]] = {"kernel.txt": kernel, "memory.txt": memory, "gpus.txt": gpus}

FILE = 1 << 20
"""Maximum bytes of one file; only the end of a longer one is kept."""
TOTAL = 32 << 20
"""Maximum bytes that one node writes for one incident."""
_LINES, _TAIL = 100, 256 << 10
_GATHERING = 0.7
"""Share of the time limit spent on collecting an item; the rest is for writing it."""
_SHARES = {"logs": 0.4, "stacks": 0.4, "proc": 0.4, "flight": 0.4}
"""Share of the time limit for each kind of item; the default is `_GATHERING`."""

Find = Callable[[float], Awaitable[bytes]]


class Unavailable(Exception):  # noqa: N818  # not an error: a stopped process cannot answer
    """Raised if an item is not available; the message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A local rank as seen by its agent."""

    rank: int
    pid: int | None
    log: Path
    stacks: int = -1  # memfd that receives its stacks
    socket: str = ""  # address of its flight server
    cell: dict[str, Any] = field(default_factory=dict)  # its last reading, for display


async def collect(
    folder: Path, node: int, ranks: Sequence[Subject], full: Collection[int], seconds: float, *, most: int = TOTAL
) -> dict[str, Any]:
    """Write the evidence available within `seconds`. Only ranks in `full` get more than cells and logs.
    Return {written: names, missing: {name: reason}}. Threads that nothing waits for handle late items, so a hung file
    system delays neither the agent nor its exit.
    """
    until = time.monotonic() + seconds
    bundle = _Bundle(folder, until, most)
    parts = dict(_parts(node, ranks, full))
    await asyncio.gather(*(_keep(bundle, name, find, seconds) for name, find in parts.items()))
    return {"written": sorted(bundle.written), "missing": dict(sorted(bundle.missing.items()))}


def _parts(node: int, ranks: Sequence[Subject], full: Collection[int]) -> Iterator[tuple[str, Find]]:
    """Yield each item's file name and how to collect it, most informative first, since the total size is limited."""
    for one in (one for one in ranks if one.rank in full):
        name = f"rank-{one.rank:05d}"
        yield f"stacks/{name}.txt", partial(_stacks, one)
        yield f"stacks/{name}.py-spy.txt", partial(_py_spy, one)
        yield f"proc/{name}.json", partial(_proc, one)
        yield f"flight/{name}.json", partial(_flight, one)
    cells = {str(one.rank): {"pid": one.pid, **one.cell} for one in ranks}
    yield f"node-{node:04d}/cells.json", partial(_cells, cells)
    for file, look in NODE_PARTS.items():
        yield f"node-{node:04d}/{file}", partial(_read_detached, look)
    for one in ranks:
        yield f"logs/rank-{one.rank:05d}.txt", partial(_read_detached, partial(_tail, one.log))


class _Bundle:
    """The files of one node, within the time and size limits."""

    def __init__(self, folder: Path, until: float, most: int) -> None:
        self._folder, self._until, self._left = folder, until, most
        self._left_for_logs = most // 2  # logs are quick to read and exist for every rank; better evidence has priority
        self.written: list[str] = []
        self.missing: dict[str, str] = {}

    async def write(self, name: str, found: bytes) -> None:
        kept = in_use().data(found)[-FILE:]
        is_log = name.startswith("logs/")
        if len(kept) > (min(self._left, self._left_for_logs) if is_log else self._left):
            raise Unavailable("the bundle is full")
        self._left -= len(kept)
        self._left_for_logs -= len(kept) * is_log
        await run_detached(lambda: _write(self._folder / name, kept), max(0.05, self._until - time.monotonic()))
        self.written.append(name)


async def _keep(bundle: _Bundle, name: str, find: Find, seconds: float) -> None:
    share = seconds * _SHARES.get(name.partition("/")[0], _GATHERING)
    try:
        async with asyncio.timeout(share):
            found = await find(share)
    except TimeoutError:
        bundle.missing[name] = f"not collected within {share:.1f} s"
        return
    except (OSError, Unavailable) as error:
        bundle.missing[name] = str(error)
        return
    try:
        await bundle.write(name, found)
    except TimeoutError:
        bundle.missing[name] = "collected, but not written in time"
    except (OSError, Unavailable) as error:
        bundle.missing[name] = f"collected, but not written: {error}"


def _write(path: Path, found: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(found)


# -- collection of each item


async def _cells(cells: dict[str, Any], seconds: float) -> bytes:
    return json.dumps(cells, indent=1).encode()


async def _read_detached(look: Callable[[float], bytes], seconds: float) -> bytes:
    return await run_detached(lambda: look(seconds), seconds)


def _tail(path: Path, seconds: float) -> bytes:
    return b"".join(read_tail(path, _TAIL).splitlines(keepends=True)[-_LINES:])


def _live_pid(one: Subject, *, answers: bool = False) -> int:
    """Return the PID of a live process. If `answers`, it must not be stopped: querying a stopped process blocks."""
    signs = proc.read_activity(one.pid) if one.pid is not None else None
    if one.pid is None or signs is None or signs.state in "ZX":
        raise Unavailable("the process is dead")
    if answers and signs.state in "Tt":
        raise Unavailable("the process is stopped and handles no signal")
    return one.pid


async def _stacks(one: Subject, seconds: float) -> bytes:
    """Return stacks written by faulthandler in the process, or else by torch's worker server if it has no handler."""
    pid = _live_pid(one, answers=True)
    if one.stacks >= 0 and proc.catches_signal(pid, STACKS):  # a signal without a handler would kill it
        return await ask_for_stacks(pid, one.stacks)
    if answer := await recorder.ask(one.socket, "dump_traceback", seconds * 0.9):
        return answer
    raise Unavailable("the process is not ready for the signal (yet)")


async def _py_spy(one: Subject, seconds: float) -> bytes:
    """Return stacks read from outside the process, without stopping it. This works for a stopped process too."""
    command = ["py-spy", "dump", "--nonblocking", "--pid", str(_live_pid(one))]
    return await _read_detached(partial(_run_tool, command), seconds)


async def _proc(one: Subject, seconds: float) -> bytes:
    if one.pid is None or (description := await run_detached(lambda: proc.describe(one.pid or 0), seconds)) is None:
        raise Unavailable("no such process")
    return json.dumps(description, indent=1).encode()


async def _flight(one: Subject, seconds: float) -> bytes:
    _live_pid(one, answers=True)
    recorders = (recorder.HOST, recorder.DEVICE)
    host, device = await asyncio.gather(*(recorder.ask(one.socket, name, seconds * 0.9) for name in recorders))
    if not host:
        raise Unavailable("its flight server did not answer" if one.socket else "it has no flight server")
    # Two full records exceed one file, so the newest entries of each are kept.
    if device == recorder.NOTHING:
        return newest(host, FILE)
    gpu = newest(device, FILE // 2 - 64) if device is not None else b'"its flight server did not answer in time"'
    return b'{"device": %s, "host": %s}' % (gpu, newest(host, FILE // 2 - 64))


_AT_ONCE = 4
"""Flight records per message: `flight_record.WIRE` bytes each, plus quoting."""
_MAX_MISSING = 100
"""Maximum number of missing parts reported to the coordinator."""


class EvidenceCollector:
    """Handles the coordinator's evidence queries. It always sends an answer, even if evidence is missing."""

    def __init__(self, attempt: AttemptDir, node: int, sockets: FlightSockets, *, on_gpus: bool = False) -> None:
        self._attempt, self._node, self._sockets, self._on_gpus = attempt, node, sockets, on_gpus

    async def collect(
        self, order: QueryFlights | CollectEvidence, ranks: LocalRanks, sampler: Sampler, peer: CoordinatorPeer
    ) -> None:
        match order:
            case QueryFlights():
                await self._send_flight_records(order, ranks, sampler, peer)
            case CollectEvidence():
                await self._send_bundle(order, ranks, sampler, peer)

    async def _send_flight_records(
        self, query: QueryFlights, ranks: LocalRanks, sampler: Sampler, peer: CoordinatorPeer
    ) -> None:
        generation, asked = ranks.generation, [local.rank for local in ranks.by_rank.values() if not local.ended]
        paths = {rank: self._sockets.path(rank, generation) for rank in asked}
        pids = {sampler.training_pid(ranks.by_rank[rank]): rank for rank in asked}
        (flights, unanswered), ras = await asyncio.gather(
            recorder.flights(paths, query.seconds), self._ask_ras(pids, query.seconds)
        )
        answer = FlightRecords(generation=generation, serial=query.serial)
        # Sent in batches, since all records of a node with many ranks would not fit into one line.
        for first in range(0, len(flights), _AT_ONCE):
            batch = tuple(flight.to_json() for flight in flights[first : first + _AT_ONCE])
            peer.send(replace(answer, flights=batch))
        peer.send(replace(answer, unanswered=tuple(unanswered), ras=ras, last=True))

    async def _ask_ras(self, pids: Mapping[int | None, int], seconds: float) -> tuple[RasRow, ...]:
        """Return what NCCL's RAS knows about these processes; nothing if it does not answer, or without GPUs."""
        if not self._on_gpus:
            return ()
        try:
            found = await run_detached(lambda: query_ras(seconds * 0.9), seconds)
        except TimeoutError:
            return ()
        return tuple((pids[one.pid], one.launched, one.most, one.missing) for one in found.values() if one.pid in pids)

    async def _send_bundle(
        self, order: CollectEvidence, ranks: LocalRanks, sampler: Sampler, peer: CoordinatorPeer
    ) -> None:
        folder, generation = self._attempt.incident(order.incident), ranks.generation
        full = ranks.by_rank if order.full is None else order.full
        seen = {one.rank: asdict(one) for one in sampler.samples()}
        subjects = [self._subject(local, generation, seen[rank], sampler) for rank, local in ranks.by_rank.items()]
        found = await collect(folder, self._node, subjects, full, order.seconds)
        missing = dict(list(found["missing"].items())[:_MAX_MISSING])
        peer.send(EvidenceCollected(generation=generation, incident=order.incident, missing=missing))

    def _subject(self, local: LocalRank, generation: int, seen: dict[str, Any], sampler: Sampler) -> Subject:
        return Subject(
            rank=local.rank,
            pid=None if local.ended else sampler.training_pid(local),
            log=self._attempt.rank_log(local.log_rank),
            stacks=local.stacks,
            socket=self._sockets.path(local.rank, generation),
            cell={**asdict(local.last), "phase": local.last.phase.name.lower(), "seen": seen},
        )
