"""Messages between coordinator and agents, their greeting included.

The fields of the greeting keep their names and types in every version, so that two versions can refuse each other.
"""

from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import get_args

from trainer.contract.messages.codec import Direction
from trainer.contract.messages.ranks import Saves, Speeds, Store
from trainer.contract.ranks.progress import StopReason

PROTOCOL = 2
"""Counts up with every change of the messages but new fields that have a default; 0: a process that tells none."""


@cache
def installed_release() -> str:
    """The release of orch that this process runs; empty where it is not installed."""
    try:
        return version("orch")
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Challenge:
    """What the coordinator says first to everybody who connects."""

    nonce: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The answer to a challenge: which agent of which attempt asks to join."""

    nonce: str = ""  # of the agent's own making
    protocol: int = 0
    release: str = ""
    node: int = -1
    name: str = ""
    attempt: int = 0
    switches: tuple[str, ...] = ()  # that lead to the agent's node, the top one first


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """The agent has joined."""

    protocol: int = 0
    release: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """The agent may not join."""

    reason: str
    protocol: int = 0
    release: str = ""


HELLO = Direction[Hello](Hello)
CHALLENGE = Direction[Challenge](Challenge)
ANSWER = Direction[Welcome | Refused](Welcome, Refused)


def why_foreign(agent: Hello, coordinator: Welcome | Refused) -> str:
    """Why the two cannot work together, by what they say of themselves, and what to do; empty: they can."""
    if agent.protocol == coordinator.protocol:
        return ""
    return (
        f"this agent speaks protocol {_spoken(agent)}, the coordinator {_spoken(coordinator)}: "
        "all nodes must start the same installation of orch"
    )


def _spoken(one: Hello | Welcome | Refused) -> str:
    return f"{one.protocol} (orch {one.release or 'of an unknown release'})"


SampleRow = tuple[int, int, str, bool, int, float, float, str, float, bool]
"""A `trainer.agent.watch.hang_limits.RankSample` without the name of its node, in the order of its fields."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One check that failed; `shared`: it is about something that all nodes see, so that nodes can be compared."""

    check: str
    reason: str
    shared: bool
    full: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PreflightReport:
    """What is wrong with the node; `wall` is its time of day, `machine` the identity of its machine.

    `ahead_of_files`: seconds by which its time of day is ahead of the run folder's server's, where that is known.
    """

    faults: tuple[Fault, ...]
    wall: float | None = None
    machine: str = ""
    ahead_of_files: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalReceived:
    """Slurm, or a person, sent the agent a signal."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """The node can start ranks; `warm`: its fork server has imported what they need."""

    warm: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Unready:
    """The fork server has died; the agent starts another one."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Unloadable:
    """The node cannot import the workload."""

    exception: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentFailed:
    """The agent cannot serve its node: a task of it raised, or no fork server stays alive."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressReport:
    """What the ranks of a node do: the slowest one's step and phase, the first one's loss; 0: none runs.

    `samples`, `p99` and `work` hold what has changed since the report before.
    """

    generation: int
    step: int = 0
    phase: str = ""  # not known
    loss: float | str | None = None
    saved: int = 0
    total: int = 0
    restored: int = 0  # step of the checkpoint that the generation began from
    save_seconds: float = 0.0
    step_seconds: float = 0.0
    stepped: bool = False  # every rank has trained a step of this generation
    samples: tuple[SampleRow, ...] = ()
    p99: dict[str, float] = field(default_factory=dict)  # by phase: seconds
    work: tuple[tuple[int, ...], ...] = ()  # rank, steps, nanoseconds in each of `progress.SECTIONS`
    # Of ranks of a pipeline in `samples`: rank, `Moment` as numbers, and the row of `SentMessages`.
    stages: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationStore:
    """Where the ranks of this generation meet: from the agent of rank 0, and on to all agents."""

    generation: int
    store: Store


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpeeds:
    """What one rank has measured."""

    generation: int
    rank: int
    speeds: Speeds


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSaves:
    """Whether the saves of one rank work."""

    generation: int
    rank: int
    saves: Saves


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExit:
    """How one rank ended; `exception`, `message` and `secondary` are what it said itself, if it still could."""

    generation: int
    rank: int
    reported: bool  # it reported how it ends, or is a command, which cannot
    exit_code: int | None = None
    signal: int | None = None
    step: int | None = None  # of a command: not known
    stepped: bool = False
    exception: str | None = None
    message: str | None = None
    secondary: bool = False
    position: int | None = None  # in the data, of the batch of a bad step
    lines: tuple[str, ...] = ()  # the last ones that a command wrote
    written: int = 0  # bytes that a command wrote to its log in this generation
    out_of_memory: str = ""  # how the kernel killed it for lack of memory, in words


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkServerDied:
    """The fork server died with the ranks of this generation that it had started."""

    generation: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationGone:
    """Nothing of this generation is left on the node."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FlightRecords:
    """Flight records of some ranks, each a text; `last`: no more follow in answer to this `serial`."""

    generation: int
    serial: int
    flights: tuple[str, ...] = ()
    unanswered: tuple[int, ...] = ()
    last: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceCollected:
    """The node's part of the evidence is written; `missing`: by name, why something could not be had."""

    generation: int
    incident: str
    missing: dict[str, str] = field(default_factory=dict)


AboutGeneration = (
    ProgressReport | GenerationStore | RankSpeeds | RankSaves | RankExit | ForkServerDied | GenerationGone
    | FlightRecords | EvidenceCollected
)  # fmt: skip
AboutNode = PreflightReport | SignalReceived | Ready | Unready | Unloadable | AgentFailed
FromAgent = AboutNode | AboutGeneration
FROM_AGENT = Direction[FromAgent](*get_args(FromAgent))


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRank:
    """The node trains with this node rank from now on."""

    node_rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StartGeneration:
    """Start the node's ranks."""

    generation: int
    node_rank: int = -1  # filled in for each node
    fit: bool = True  # ranks measure their nodes first: some of these are new to them
    suspects: tuple[int, ...] = ()  # steps whose checkpoints are not to be loaded
    skip: tuple[int, ...] = ()  # positions in the data that are skipped
    master: tuple[str, int] | None = None  # where the ranks of a user's own command meet


@dataclass(frozen=True, kw_only=True, slots=True)
class AskStop:
    """Ask all ranks to save and stop, or to save and go on, within so many seconds."""

    reason: StopReason
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectStop:
    """Ranks will be asked to stop in so many seconds."""

    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryFlights:
    """Send the flight records of the ranks that live, as far as they answer within so many seconds."""

    generation: int
    serial: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectEvidence:
    """Write the node's part of an incident's evidence, all that there is of ranks in `full`; None: of every rank."""

    generation: int
    incident: str
    full: tuple[int, ...] | None
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class InjectFault:
    """Inject a fault of this kind into the rank, or the node, of this number."""

    generation: int = 0
    serial: int = 0  # counts up from 1; 0: not ordered yet
    kind: str
    at: int
    value: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOften:
    """Report more often for so many seconds."""

    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KillGeneration:
    """Kill what is left of this generation."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ping:
    """The coordinator is alive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The attempt is over: end with this exit code."""

    code: int
    reason: str = ""


ToAgent = (
    NodeRank | StartGeneration | GenerationStore | AskStop | ExpectStop | QueryFlights | CollectEvidence | InjectFault
    | ReportOften | KillGeneration | Ping | End
)  # fmt: skip
TO_AGENT = Direction[ToAgent](*get_args(ToAgent))
