"""Data exchanged by an agent and its ranks: start order, variables, messages and outcome files."""

import contextlib
import json
import signal
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import TypeVar

from trainer.protocol.messages.codec import Direction, encode
from trainer.protocol.messages.ranks import Saves

STACKS = signal.SIGRTMIN + 6
"""Signal on which a rank writes the stacks of all its threads; NCCL and users take SIGUSR1."""

_MAX_PACKET = 1 << 18
"""Size of the receive buffer in bytes: more than the kernel accepts in a packet."""

SPEC_VARIABLE = "ORCH_RANK_SPEC"
"""Environment variable with the RankSpec of a cold-started rank (exec instead of fork)."""


M = TypeVar("M")


def generation_mark(generation: int) -> str:
    """Return the line that opens a generation's part of a rank's log, which continues over generations."""
    return f"--- generation {generation} ---"


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """Start order of a rank in a generation. Descriptors belong to the started process."""

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
    arena_fd: int = -1  # memory of the checkpoints' copies (memfd); -1: the rank makes its own
    writer_fd: int = -1  # stream socket to the checkpoint writer that the agent owns; -1: the rank starts its own
    suspects: tuple[int, ...] = ()  # steps of checkpoints that must not be loaded
    skip: tuple[int, ...] = ()  # data positions to skip
    fit: bool = True  # whether ranks measure their nodes before they train
    env: dict[str, str] = field(default_factory=dict)
    known_as: str = ""  # the run folder's own path, if `run_dir` is another way to it

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RankSpec":
        fields = json.loads(text)
        return cls(**{**fields, "suspects": tuple(fields["suspects"]), "skip": tuple(fields["skip"])})


def send_message(control: socket.socket, message: object, flags: int = 0) -> None:
    """Send a message to the other end of a control socket; text that is not valid Unicode arrives unchanged."""
    control.send(encode(message).encode(errors="backslashreplace"), flags)


def report_saves(control: socket.socket, trouble: str, size: int) -> None:
    """Report why saves of `size` bytes fail, or, with an empty text, that they work.

    A busy agent may miss the message.
    """
    with contextlib.suppress(OSError):
        send_message(control, Saves(reason=trouble, size=size), socket.MSG_DONTWAIT)


def receive_message(control: socket.socket, direction: Direction[M]) -> M | None:
    """Receive the next message; None after the other side has closed. Raises MessageError."""
    packet = control.recv(_MAX_PACKET)
    return direction.read(packet) if packet else None


MOST = 1_000_000
"""Maximum number of ranks accepted in a group."""


def groups_file(socket: str) -> str:
    """Return the path of the JSON {name: {"name", "desc", "runs"}} of the rank that listens on `socket`."""
    return f"{socket}.groups"


def encode_runs(ranks: Iterable[int]) -> list[list[int]]:
    """Encode ranks in ascending order as runs [first, last, step]: ten thousand ranks take a few bytes."""
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

    Raises ValueError for malformed runs, or more than `MOST` ranks.
    """
    return _decode_runs(tuple(tuple(run) for run in encoded))


@lru_cache(maxsize=8192)
def _decode_runs(encoded: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    ranges = [range(first, last + 1, max(1, step)) for first, last, step in encoded]
    if sum(map(len, ranges)) > MOST:
        raise ValueError(f"a group of more than {MOST:,} ranks")
    return tuple(rank for one in ranges for rank in one)


def place_variables(
    *, rank: int, local_rank: int, world_size: int, local_world_size: int, node_rank: int, generation: int, run_id: str
) -> dict[str, str]:
    """Return torchrun's variables, except the store's address and the variables that the launcher sets."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": node_rank,
        "GROUP_WORLD_SIZE": max(1, world_size // local_world_size),
        "NODE_RANK": node_rank,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "TORCHELASTIC_RESTART_COUNT": generation - 1,
        "TORCHELASTIC_RUN_ID": run_id,
    }
    return {name: str(value) for name, value in variables.items()}
