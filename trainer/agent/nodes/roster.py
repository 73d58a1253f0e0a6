"""The agents of a job, their machines and their node ranks.
Node rank n runs the global ranks from n x ranks_per_node on, whichever node has that node rank. Nodes without a node
rank are spares: they wait with a warm fork server until they replace a node. Nodes under one switch get neighbouring
node ranks, so that the neighbouring ranks of a shard group communicate through as few switches as possible.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from trainer.agent.control.control_server import (
    AGENT_TIMEOUT_SECONDS,
    LATE_SECONDS,
    STALLED_TIMEOUT_SECONDS,
    AgentJoined,
    AgentLost,
    InboxMessage,
)
from trainer.agent.control.tcp_transport import AgentPeer, WireError
from trainer.protocol.messages.agents import (
    FromAgent,
    Hello,
    NodeRank,
    PreflightFault,
    PreflightReport,
    ProgressReport,
    StartGeneration,
    ToAgent,
)
from trainer.protocol.node_identity import boot_id


def identity() -> str:
    """Return the identity of the running kernel, equal for all its processes, or "" if unknown."""
    try:
        return boot_id()
    except OSError:
        return ""


LEADER = 0
"""Node whose agent is the coordinator; it has node rank 0, and a spare cannot replace it."""

NodeRanks = dict[int, int]
"""Map from node rank to node."""


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """Assignment of the node rank of `instead` to `node`."""

    node_rank: int
    node: int
    instead: int


Switches = Mapping[int, tuple[str, ...]]
"""Map from node to the switches above it, topmost first; empty if unknown."""


def assign_node_ranks_to(
    count: int, fit: Collection[int], switches: Switches = MappingProxyType({})
) -> tuple[NodeRanks | None, str]:
    """Return the initial assignment, or None if too few nodes are fit.
    The leader comes first, then its nearest nodes in the network, then others. Equally near nodes, and nodes without
    known switches, are taken in ascending order.
    """
    if LEADER not in fit:
        return None, f"node {LEADER}, which leads the job, cannot train"
    if len(fit) < count:
        return None, f"{len(fit)} node(s) can train, {count} are needed"
    chosen = sorted(fit, key=_by_switch(fit, switches))[:count]
    return dict(enumerate(chosen)), f"{count} of {len(fit)} node(s) that can train have a node rank"


def _by_switch(nodes: Collection[int], switches: Switches) -> Callable[[int], tuple[int, ...]]:
    """Return a sort key that groups nodes by switch; switches are ordered by their lowest node."""
    lowest: dict[tuple[str, ...], int] = {}
    for node in sorted(nodes):
        path = switches.get(node, ())
        for depth in range(1, len(path) + 1):
            lowest.setdefault(path[:depth], node)

    def key(node: int) -> tuple[int, ...]:
        path = switches.get(node, ())
        return *(lowest[path[:depth]] for depth in range(1, len(path) + 1)), node

    return key


def replacements(
    node_ranks: Mapping[int, int], fit: Collection[int], ready: Collection[int]
) -> tuple[tuple[Replacement, ...], str]:
    """Return the spares that replace nodes that are no longer fit, or no moves if there are too few spares.
    The other nodes keep their node ranks, so their ranks find copies of their state in their own node's memory.
    """
    vacant = [node_rank for node_rank, node in sorted(node_ranks.items()) if node not in fit]
    if not vacant:
        return (), "no node needs to be replaced"
    if node_ranks[min(node_ranks)] not in fit:
        return (), f"node {node_ranks[min(node_ranks)]}, which leads the job, is lost"
    spares = sorted(set(fit) - set(node_ranks.values()), key=lambda node: (node not in ready, node))
    if len(spares) < len(vacant):
        return (), f"{len(vacant)} node(s) must be replaced, {len(spares)} spare node(s) are left"
    moves = tuple(
        Replacement(node_rank=node_rank, node=node, instead=node_ranks[node_rank])
        for node_rank, node in zip(vacant, spares[: len(vacant)], strict=True)
    )
    return moves, f"{len(moves)} of {len(spares)} spare node(s) take a node rank"


LOOK_SECONDS = 1.0
_NO_PLACE = "this attempt has no place for this agent"
_NOTHING_REPORTED = ProgressReport(generation=-1)


@dataclass(kw_only=True)
class Member:
    node: int
    name: str
    peer: AgentPeer
    last_message_at: float
    has_sent: bool = False  # it has sent a message after its hello
    faults: list[PreflightFault] | None = None
    ready: bool = False
    gone: int = 0  # newest generation with no process left on this node
    lost: str = ""  # reason for its loss
    machine: str = ""  # identity of its machine, if known
    switches: tuple[str, ...] = ()  # switches above it, topmost first
    ahead: float = 0.0  # seconds by which its clock leads the coordinator's, including network delay
    ahead_of_files: float | None = None  # seconds by which it leads the clock of the run folder's server
    excluded: str = ""  # why its node must not train although its agent answers
    progress: ProgressReport = _NOTHING_REPORTED  # newest report

    @property
    def usable(self) -> bool:
        return not self.lost and not self.excluded


class Roster:
    """The agents that have joined. It turns their connections into messages for the coordinator's inbox."""

    def __init__(
        self, nodes: int, attempt: int, deliver: Callable[[int, InboxMessage], None], *, node_ranks: int | None = None,
        rejoin: float = 5.0,
    ) -> None:  # fmt: skip
        """`node_ranks` is the number of training nodes; the others are spares. For `rejoin`, see `Timeouts`."""
        self._nodes, self._attempt, self._deliver, self._rejoin_seconds = nodes, attempt, deliver, rejoin
        self._wanted = nodes if node_ranks is None else node_ranks
        self._assigned = False
        self._last_tick: float | None = None
        self._moved: float | None = None  # when a rank last moved; None before any was started
        self._given_up: set[int] = set()  # nodes that will not join
        self.members: dict[int, Member] = {}
        self.node_ranks: NodeRanks = dict(enumerate(range(self._wanted)))  # provisional until all nodes are examined

    def admit(self, hello: Hello, peer: AgentPeer) -> str:
        """Admit an authenticated agent, one per node of this attempt, and return the reason for a refusal, or ""."""
        node, name = hello.node, hello.name
        if not 0 <= node < self._nodes or hello.attempt != self._attempt:
            return _NO_PLACE
        member = self.members.get(node)
        if member is None:
            self.members[node] = Member(
                node=node, name=name, peer=peer, last_message_at=time.monotonic(), switches=hello.switches
            )
            self._deliver(node, AgentJoined())
            return ""
        if member.has_sent or member.lost:
            return _NO_PLACE
        # It did not receive a welcome in time and is connecting again.
        member.peer.drop()
        member.peer, member.name, member.last_message_at = peer, name, time.monotonic()
        return ""

    async def serve(self, hello: Hello, peer: AgentPeer) -> None:
        """Deliver the messages of one agent until it is gone."""
        member = self.members[hello.node]
        reason = "its connection ended"
        try:
            broken = await self._receive(member, peer)
            if not broken and not member.has_sent:
                await asyncio.sleep(self._rejoin_seconds)
            reason = broken or reason
        finally:
            if member.peer is peer:
                self._deliver(member.node, AgentLost(reason=reason))

    async def _receive(self, member: Member, peer: AgentPeer) -> str:
        """Receive messages until the connection ends, and return the reason if one cannot be read."""
        try:
            while (message := await peer.receive()) is not None and member.peer is peer:
                self._note(member, message, time.monotonic())
                self._deliver(member.node, message)
        except WireError as error:
            return f"it sent {error}"
        return ""

    def _note(self, member: Member, message: FromAgent, now: float) -> None:
        """Record the time of a message. A report that differs from the previous one means that ranks are moving."""
        member.last_message_at, member.has_sent = now, True
        if isinstance(message, ProgressReport) and _place(message) != _place(member.progress):
            self._moved = now

    def record_preflight(self, node: int, report: PreflightReport, wall: float) -> None:
        """Record an agent's preflight report; `wall` is the coordinator's time of day."""
        member = self.members[node]
        member.faults, member.machine = list(report.faults), report.machine
        member.ahead_of_files = report.ahead_of_files
        member.ahead = 0.0 if report.wall is None else report.wall - wall

    def present_members(self) -> list[Member]:
        return [member for member in self.members.values() if not member.lost]

    def training_members(self) -> list[Member]:
        """Return the training members that are not lost, by node rank."""
        found = (self.members.get(node) for _, node in sorted(self.node_ranks.items()))
        return [member for member in found if member is not None and not member.lost]

    def spares(self) -> list[Member]:
        training = set(self.node_ranks.values())
        return [member for member in self._usable() if member.node not in training]

    def _usable(self) -> list[Member]:
        """Return the members that passed preflight and are neither lost nor excluded."""
        return [member for member in self.members.values() if member.usable and member.faults == []]

    def _suffice(self, nodes: Collection[int]) -> bool:
        return assign_node_ranks_to(self._wanted, nodes)[0] is not None

    def enough(self) -> bool:
        return self._suffice([member.node for member in self.present_members()])

    def can_train(self) -> bool:
        """Return whether enough nodes for all node ranks have passed preflight, including the leader."""
        return self._suffice([member.node for member in self._usable()])

    def could_train(self) -> bool:
        """Return whether enough nodes could train if every outstanding preflight passed."""
        gone = {node for node, member in self.members.items() if not member.usable or member.faults}
        return self._suffice(set(range(self._nodes)) - gone - self._given_up)

    def give_up(self, node: int) -> None:
        self._given_up.add(node)

    def assign_node_ranks(self) -> str:
        """If there are enough nodes, assign node ranks and send them. Return the reason in any case."""
        switches = {member.node: member.switches for member in self._usable()}
        node_ranks, reason = assign_node_ranks_to(self._wanted, list(switches), switches)
        if node_ranks is None:
            return reason
        self.node_ranks, self._assigned = node_ranks, True
        for node_rank, node in sorted(node_ranks.items()):
            self.members[node].peer.send(NodeRank(node_rank=node_rank))
        return reason

    def replace_nodes(self) -> tuple[tuple[Replacement, ...], str]:
        """Give the node ranks of lost or excluded nodes to spares. If that fails, return no moves and the reason."""
        fit = [member.node for member in self._usable()]
        moves, reason = replacements(self.node_ranks, fit, [node for node in fit if self.members[node].ready])
        for move in moves:
            self.node_ranks[move.node_rank] = move.node
            self.members[move.node].peer.send(NodeRank(node_rank=move.node_rank))
        return moves, reason

    def is_needed(self, node: int) -> bool:
        """Return whether losing this node keeps the job from continuing unchanged."""
        return node in self.node_ranks.values() if self._assigned else not self.could_train()

    def find_node(self, name: str | None) -> int | None:
        return next((member.node for member in self.present_members() if member.name == name), None)

    def missing_nodes(self) -> list[int]:
        return [node for node in range(self._nodes) if node not in self.members]

    def complete(self) -> bool:
        return not self.missing_nodes()

    def all_examined(self) -> bool:
        return all(member.faults is not None for member in self.present_members())

    def unexamined_nodes(self) -> list[str]:
        return [member.name for member in self.present_members() if member.faults is None]

    def unready_nodes(self) -> list[str]:
        return [member.name for member in self.training_members() if not member.ready]

    def all_ready(self) -> bool:
        """Return whether every training node has a fork server that can start ranks."""
        return len(self.training_members()) == len(self.node_ranks) and not self.unready_nodes()

    def all_gone(self, generation: int, *, but: Collection[str] = ()) -> bool:
        """Return whether this generation is gone from every training node that is not lost.
        `but` names nodes to ignore.
        """
        return all(member.gone >= generation for member in self.training_members() if member.name not in but)

    def tick(self, now: float) -> None:
        """Detect pauses of the coordinator; called once a second.
        After a pause all timeouts restart, since the whole job may have been paused.
        """
        if self._last_tick is not None and now - self._last_tick > LOOK_SECONDS + LATE_SECONDS:
            for member in self.members.values():
                member.last_message_at = now
            self._moved = None if self._moved is None else now
        self._last_tick = now

    def find_timed_out(self, now: float) -> tuple[Member, str] | None:
        """Return an agent that has been silent for too long, and the reason. The limit is lower while no rank moves."""
        # Relative to the newest message from any agent, so that a suspended coordinator does not lose all of them.
        latest = min(now, max((member.last_message_at for member in self.present_members()), default=now))
        standing = self._moved is not None and now - self._moved > STALLED_TIMEOUT_SECONDS
        patience = STALLED_TIMEOUT_SECONDS if standing else AGENT_TIMEOUT_SECONDS
        quiet = next((member for member in self.present_members() if latest - member.last_message_at > patience), None)
        if quiet is None:
            return None
        also = " while no rank moved" if standing else ""
        return quiet, f"it has been silent for {now - quiet.last_message_at:.0f} s{also}"

    def broadcast(self, message: ToAgent) -> None:
        for member in self.present_members():
            member.peer.send(message)

    def start_generation(self, start: StartGeneration) -> None:
        """Order every training node to start its ranks, and send its node rank."""
        self._moved = time.monotonic()
        for node_rank, node in self.node_ranks.items():
            if not self.members[node].lost:
                self.members[node].peer.send(replace(start, node_rank=node_rank))

    def names(self) -> list[str]:
        """Return the names of all joined nodes: training ones by node rank, then others that are not lost."""
        order = [node for _, node in sorted(self.node_ranks.items())]
        order += sorted({member.node for member in self.present_members()} - set(order))
        return [self.members[node].name for node in order if node in self.members]

    def describe_waits(self) -> str:
        """Return which unexamined node's preparation waits, and for what, or "" if none does."""
        waiting = [member for member in self.present_members() if member.faults is None and member.progress.waits]
        more = f"; so do {len(waiting) - 1} other node(s)" if len(waiting) > 1 else ""
        return f"{waiting[0].name} {waiting[0].progress.waits}{more}" if waiting else ""

    async def wait_until_disconnected(self, seconds: float) -> None:
        """Wait until every agent has disconnected, for at most `seconds`."""
        give_up = time.monotonic() + seconds
        while any(not member.peer.hung_up() for member in self.present_members()) and time.monotonic() < give_up:
            await asyncio.sleep(0.01)


def _place(report: ProgressReport) -> tuple[int, int, str]:
    return report.generation, report.step, report.phase
