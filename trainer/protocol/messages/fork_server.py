"""Messages between an agent and its fork server."""

from dataclasses import dataclass, field
from typing import Annotated, get_args

from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.messages.codec import Direction
from trainer.protocol.rank_progress.rank_messages import RankSpec

_MOST_WORDS = 1 << 22
"""Maximum arguments or variables of a program: the 6 MiB that Linux allows cannot hold more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRank:
    """Start a rank; the descriptors of its log and of its `spec` are sent along."""

    rank: int
    generation: int
    cores: tuple[int, ...] = ()  # CPU cores to bind to; empty: not bound
    env: Annotated[dict[str, str], _MOST_WORDS]
    command: Annotated[tuple[str, ...], _MOST_WORDS] = ()  # a user's own program
    folder: str = ""  # working folder of the command
    spec: RankSpec | None = None  # for a rank of orch


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalRanks:
    """Signal the process groups of all ranks."""

    number: int


ToForkServer = StartRank | SignalRanks
TO_FORK_SERVER = Direction[ToForkServer](*get_args(ToForkServer))


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkServerReady:
    """The fork server can start ranks; `warm`: it has imported the workload, else `reason` gives the cause.

    `code`: digest of the user's code, on the first node; `code_changes`: description of its changes; `code_files`: the
    digests of the changed files; `code_packages`: the versions of changed packages.
    """

    warm: bool
    reason: str
    seconds: float
    code: str = ""
    code_changes: str = ""
    code_files: dict[str, str] = field(default_factory=dict)
    code_packages: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportFailed:
    """The workload cannot be imported: the fork server ends."""

    exception: str
    message: str
    traceback: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpawned:
    """A rank was started; its pidfd is sent along."""

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
