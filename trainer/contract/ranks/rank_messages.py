"""Data that an agent and its ranks exchange: start order, variables, messages and outcome files."""

import contextlib
import json
import signal
import socket
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from checkpointing.storage.durable import dump_line, fsync_dir, open_regular
from trainer.contract.failures.outcome import RankOutcome
from trainer.contract.logs.line_file import MAX_READ_BYTES, LineFile
from trainer.contract.messages.codec import Direction, encode
from trainer.contract.messages.ranks import Saves
from trainer.contract.run_dir import AttemptDir

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


_MAX_TEXT = 1 << 16
"""Characters of one text in an error file that are kept."""


def append_outcome(attempt: AttemptDir, outcome: RankOutcome) -> None:
    """Keep how a rank ended, durably; raises OSError."""
    _append(attempt.rank_outcomes(outcome.node), outcome.to_line())


def all_outcomes(attempt: AttemptDir) -> list[tuple[RankOutcome, Path]]:
    """Every outcome with its file, those of older versions (a file for each) included; what is torn is skipped."""
    return [(outcome, path) for path in attempt.all_rank_outcomes() for outcome in _read(path)]


def find_outcome(attempt: AttemptDir, node: str, rank: int, generation: int) -> RankOutcome | None:
    """What a rank of this node kept of its end; None when it was killed. Reads the file of its node only."""
    found = [one for one in _read(attempt.rank_outcomes(node)) if (one.rank, one.generation) == (rank, generation)]
    return found[-1] if found else None


def pack_error_file(attempt: AttemptDir, node: str, rank: int, generation: int) -> None:
    """Move the error file of a command's rank, where it left one, into the file of its node; raises OSError."""
    path = attempt.error_file(rank, generation)
    try:
        with open_regular(path) as stream:
            error = json.loads(stream.read(MAX_READ_BYTES))
    except (FileNotFoundError, ValueError, RecursionError):
        return
    line = {"rank": rank, "generation": generation, "error": _shorten_texts(error)}
    _append(attempt.rank_errors(node), dump_line(line))
    path.unlink()


def _shorten_texts(value: Any) -> Any:
    """Keep the beginning of each text that torch's `@record` wrote: a message may hold a whole data set."""
    if isinstance(value, dict):
        return {key: _shorten_texts(item) for key, item in value.items()}
    return value[:_MAX_TEXT] if isinstance(value, str) else value


def _append(path: Path, line: str) -> None:
    file = LineFile(path)
    try:
        file.append(line)
        file.sync()
    finally:
        file.close()
    fsync_dir(path.parent)


def _read(path: Path) -> Iterator[RankOutcome]:
    try:
        with open_regular(path) as stream:
            block = stream.read(MAX_READ_BYTES)
    except OSError:
        return
    for line in block.splitlines():
        try:
            outcome = RankOutcome(**_renamed(json.loads(line)))
        except (ValueError, TypeError, RecursionError):  # torn by a kill
            continue
        numbers = (outcome.rank, outcome.generation, outcome.step, outcome.exit_code)
        if all(isinstance(each, int) for each in numbers) and isinstance(outcome.time, (int, float)):
            yield outcome


def _renamed(fields: Any) -> dict[str, Any]:
    """Run directories from before the field was renamed have `echo` for `secondary`."""
    return {("secondary" if key == "echo" else key): value for key, value in dict(fields).items()}


MOST = 1_000_000
"""Ranks of one group that are believed."""


def groups_file(socket: str) -> str:
    """JSON {name: {"name", "desc", "runs"}} of the rank that listens on `socket`."""
    return f"{socket}.groups"


def encode_runs(ranks: Iterable[int]) -> list[list[int]]:
    """Ranks in ascending order as runs [first, last, step]: ten thousand of them in a few bytes."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and (found[-1][0] == found[-1][1] or rank - found[-1][1] == found[-1][2]):
            found[-1][2] = rank - found[-1][1]
            found[-1][1] = rank
        else:
            found.append([rank, rank, 1])
    return found


def decode_runs(encoded: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """The ranks that `runs` was given; equal ones are one object, for ten thousand ranks name the same groups.

    Raises ValueError when it is no list of runs, or one of more than `MOST` ranks.
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
    """All of them but where the store is and what the launcher sets for itself."""
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
