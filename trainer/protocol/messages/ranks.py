"""Messages between the agent, the fork server and the ranks of a node, and the packets that carry them."""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, TypeVar, get_args

from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.messages.codec import Direction, encode
from trainer.protocol.plain_data import build

_MAX_INLINE = 1 << 16
"""Maximum size of a message in a packet. Longer messages are sent in a memfd, because the kernel limits packets."""
_IN_MEMORY_FILE = b"m"
"""Packet whose message is in the memfd that is its last descriptor. JSON packets start with a brace instead."""
_MAX_DESCRIPTORS = 8

M = TypeVar("M")


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Return a connected pair that keeps packet boundaries and reports the other side's death as an empty packet."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_packet(link: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    """Send one message of any length. Raises OSError if the other side is gone or is not reading."""
    # A lone surrogate, for example from a file name in an exception, must not suppress the rest.
    data = encode(message).encode(errors="replace")
    with ExitStack() as stack:
        packet, attached = data, list(descriptors)
        if len(data) > _MAX_INLINE:
            file = stack.enter_context(open(os.memfd_create("orch-message"), "wb", buffering=0))
            _write_all(file.fileno(), data)
            packet, attached = _IN_MEMORY_FILE, [*attached, file.fileno()]
        socket.send_fds(link, [packet], attached)


def receive_packet(link: socket.socket, direction: Direction[M]) -> tuple[M | None, list[int]]:
    """Return the next message, or None if the other side is gone, and its non-inheritable descriptors.

    Raises MessageError.
    """
    data, descriptors, _, _ = socket.recv_fds(link, _MAX_INLINE, _MAX_DESCRIPTORS + 1, socket.MSG_CMSG_CLOEXEC)
    if data == _IN_MEMORY_FILE:
        with open(descriptors.pop(), "rb") as file:
            file.seek(0)
            data = file.read()
    return (direction.read(data) if data else None), descriptors


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


@dataclass(frozen=True, kw_only=True, slots=True)
class RendezvousStore:
    """Rendezvous store of a generation, which rank 0 sends and agents forward to every other rank."""

    host: str
    port: int
    key: str  # key of the generation, in hex


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Measurements of a rank before its first step."""

    matmul: float  # floating-point operations per second
    memory: float  # bytes per second
    pairs: tuple[tuple[int, float], ...]  # peer rank, seconds of the exchange


@dataclass(frozen=True, kw_only=True, slots=True)
class Saves:
    """Reason why saves fail, and their size in bytes. The reason is empty if saves work."""

    reason: str
    size: int


FromRank = RendezvousStore | Speeds | Saves | RankEnd
FROM_RANK = Direction[FromRank](*get_args(FromRank))
TO_RANK = Direction[RendezvousStore](RendezvousStore)


STACKS = signal.SIGRTMIN + 6
"""Signal that makes a rank write the stacks of all its threads. NCCL and users use SIGUSR1."""

_MAX_RANK_PACKET = 1 << 18
"""Size of the receive buffer in bytes, which exceeds the largest packet the kernel accepts."""

SPEC_VARIABLE = "ORCH_RANK_SPEC"
"""Environment variable with the RankSpec of a cold-started rank (exec instead of fork)."""


def generation_mark(generation: int) -> str:
    """Return the line at the start of a generation's part of a rank's log, which spans generations."""
    return f"--- generation {generation} ---"


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """Order to start a rank in a generation. Descriptors belong to the started process."""

    run_dir: str
    attempt: int
    generation: int
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: int
    node_name: str
    cell_fd: int  # progress cell (memfd)
    control_fd: int  # SOCK_SEQPACKET pair to the agent
    host: str  # address of this node that peers can reach
    stacks_fd: int = -1  # memfd of the agent for faulthandler's stacks on STACKS; -1: no stacks
    flight: str = ""  # path of the Unix socket of torch's worker server; empty: no server
    arena_fd: int = -1  # memory of the checkpoints' copies (memfd); -1: the rank creates its own
    writer_fd: int = -1  # stream socket to the checkpoint writer that the agent owns; -1: the rank starts its own
    suspects: tuple[int, ...] = ()  # steps of checkpoints that must not be loaded
    skip: tuple[int, ...] = ()  # data positions to skip
    fit: bool = True  # whether ranks measure their nodes before they train
    env: dict[str, str] = field(default_factory=dict)
    known_as: str = ""  # the run folder's own path, if `run_dir` differs from it

    def torchrun_variables(self) -> dict[str, str]:
        """Return torchrun's variables, except the store's address and the variables that the launcher sets."""
        variables = {
            "RANK": self.rank,
            "LOCAL_RANK": self.local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": max(1, self.world_size // self.local_world_size),
            "NODE_RANK": self.node,
            "ROLE_NAME": "default",
            "ROLE_RANK": self.rank,
            "ROLE_WORLD_SIZE": self.world_size,
            "TORCHELASTIC_RESTART_COUNT": self.generation - 1,
            "TORCHELASTIC_RUN_ID": f"{Path(self.known_as or self.run_dir).name}-{self.attempt}",
        }
        return {name: str(value) for name, value in variables.items()}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RankSpec":
        return build(cls, json.loads(text))


def send_message(control: socket.socket, message: object, flags: int = 0) -> None:
    """Send a message to the other end of a control socket. Text that is not valid Unicode is escaped."""
    control.send(encode(message).encode(errors="backslashreplace"), flags)


def report_saves(control: socket.socket, trouble: str, size: int) -> None:
    """Report why saves of `size` bytes fail, or that they work if `trouble` is empty.

    A busy agent may miss the message.
    """
    with contextlib.suppress(OSError):
        send_message(control, Saves(reason=trouble, size=size), socket.MSG_DONTWAIT)


def receive_message(control: socket.socket, direction: Direction[M]) -> M | None:
    """Receive the next message, or None after the other side has closed. Raises MessageError."""
    packet = control.recv(_MAX_RANK_PACKET)
    return direction.read(packet) if packet else None


MOST = 1_000_000
"""Maximum number of ranks accepted in a group."""


def groups_file(socket: str) -> str:
    """Return the path of the JSON file {name: {"name", "desc", "runs"}} for the rank that listens on `socket`."""
    return f"{socket}.groups"


def encode_runs(ranks: Iterable[int]) -> list[list[int]]:
    """Encode ranks in ascending order as runs [first, last, step], so that ten thousand ranks take a few bytes."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and (found[-1][0] == found[-1][1] or rank - found[-1][1] == found[-1][2]):
            found[-1][2] = rank - found[-1][1]
            found[-1][1] = rank
        else:
            found.append([rank, rank, 1])
    return found


def decode_runs(encoded: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Decode ranks from runs. Equal results share one object, because ten thousand ranks list the same groups.

    Raises ValueError for malformed runs or more than `MOST` ranks.
    """
    return _decode_runs(tuple(tuple(run) for run in encoded))


@lru_cache(maxsize=8192)
def _decode_runs(encoded: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    ranges = [range(first, last + 1, max(1, step)) for first, last, step in encoded]
    if sum(map(len, ranges)) > MOST:
        raise ValueError(f"a group of more than {MOST:,} ranks")
    return tuple(rank for one in ranges for rank in one)


_MOST_WORDS = 1 << 22
"""Maximum number of a program's arguments or variables. The 6 MiB that Linux allows cannot hold more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRank:
    """Start a rank. The packet contains the descriptors of its log and of its `spec`."""

    rank: int
    generation: int
    cores: tuple[int, ...] = ()  # CPU cores to bind to; empty: not bound
    env: Annotated[dict[str, str], _MOST_WORDS]
    command: Annotated[tuple[str, ...], _MOST_WORDS] = ()  # a user's own program
    folder: str = ""  # working folder of the command
    spec: RankSpec | None = None  # for a rank that orch runs


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalRanks:
    """Signal the process groups of all ranks."""

    number: int


ToForkServer = StartRank | SignalRanks
TO_FORK_SERVER = Direction[ToForkServer](*get_args(ToForkServer))


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeAtStart:
    """Digest of the user's code, description of the changes, digests of changed files and package versions.

    All are empty if there is nothing to report.
    """

    digest: str = ""
    changes: str = ""
    files: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkServerReady:
    """The fork server can start ranks. If `warm`, it has imported the workload; otherwise `reason` says why not."""

    warm: bool
    reason: str
    seconds: float
    code: CodeAtStart = field(default_factory=CodeAtStart)  # of the first node


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportFailed:
    """The workload cannot be imported, and the fork server exits."""

    exception: str
    message: str
    traceback: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpawned:
    """A rank was started. The packet contains its pidfd."""

    rank: int
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SpawnFailed:
    """A rank could not be started."""

    rank: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGone:
    """All processes of a rank, including its children, are gone."""

    rank: int


FromForkServer = ForkServerReady | ImportFailed | RankSpawned | SpawnFailed | RankEnd | RankGone
FROM_FORK_SERVER = Direction[FromForkServer](*get_args(FromForkServer))
