"""What an agent gives a rank at its start, and the few messages on their control socket."""

import contextlib
import json
import signal
import socket
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from trainer.contract.messages.codec import Direction, encode
from trainer.contract.messages.ranks import Saves

STACKS = signal.SIGRTMIN + 6
"""The signal on which a rank writes the stacks of all its threads; NCCL and users take SIGUSR1."""

_MAX_PACKET = 1 << 18
"""Bytes of a message: more than the kernel takes in one packet."""

SPEC_VARIABLE = "ORCH_RANK_SPEC"
"""Environment variable with the RankSpec of a rank that was started cold (exec instead of fork)."""


M = TypeVar("M")


def generation_mark(generation: int) -> str:
    """The line that opens a generation's part of a rank's log, which goes on over generations."""
    return f"--- generation {generation} ---"


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """One rank of one generation. Descriptors are those of the started process."""

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
    stacks_fd: int = -1  # where faulthandler writes stacks on STACKS (memfd of the agent); -1: nowhere
    flight: str = ""  # path of the Unix socket on which torch's worker server answers; empty: none
    arena_fd: int = -1  # memory of the checkpoints' copies (memfd); -1: the rank makes its own
    writer_fd: int = -1  # stream socket to the checkpoint writer that the agent owns; -1: the rank starts its own
    suspects: tuple[int, ...] = ()  # steps whose checkpoints must not be loaded
    skip: tuple[int, ...] = ()  # positions in the data that are skipped
    fit: bool = True  # whether ranks measure their nodes before they train
    env: dict[str, str] = field(default_factory=dict)
    run: str = ""  # its name, where `run_dir` does not end with it

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "RankSpec":
        fields = json.loads(text)
        return cls(**{**fields, "suspects": tuple(fields["suspects"]), "skip": tuple(fields["skip"])})


def send_message(control: socket.socket, message: object, flags: int = 0) -> None:
    """Send one message to the other end of a control socket; what is no Unicode in it arrives as it was."""
    control.send(encode(message).encode(errors="backslashreplace"), flags)


def report_saves(control: socket.socket, trouble: str, size: int) -> None:
    """Say why saves of so many bytes fail, or, with an empty text, that they work.

    An agent that is too busy misses it.
    """
    with contextlib.suppress(OSError):
        send_message(control, Saves(reason=trouble, size=size), socket.MSG_DONTWAIT)


def receive_message(control: socket.socket, direction: Direction[M]) -> M | None:
    """The next message; None when the other side has closed. Raises MessageError."""
    packet = control.recv(_MAX_PACKET)
    return direction.read(packet) if packet else None
