"""Wait graph of unfinished collectives and messages, its roots, and the findings.
A collective waits for the hosts of members that have not called it, and for the earlier work of its members' GPUs. A
message waits for the host at its other end until that has called it too. A host may wait for anything it has called
that is unfinished. A node that waits for nothing is a root.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trainer.agent.flight.flight_record import DONE, ON_HOST, SCHEDULED, STARTED, CollectiveEntry, Group
from trainer.agent.flight.p2p_messages import P2PMessage
from trainer.agent.flight.stalls import Records, Stall

Kind = Literal["none", "missing", "gpu_stopped", "desync_shape", "desync_order", "stuck_together"]
_NAMED = 8
"""Maximum number of ranks listed in a reason."""


@dataclass(frozen=True, kw_only=True)
class BlockingRank:
    """Rank that others wait for and whose own wait is unexplained."""

    rank: int
    kind: Literal["never_came", "no_answer", "gpu_stopped", "queued", "desync"]
    group: str
    sequence: int  # 0: a message
    reason: str

    @property
    def on_gpu(self) -> bool:
        """Return whether its GPU stopped, so that the position of its host proves nothing."""
        return self.kind in ("gpu_stopped", "queued")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Conclusion from the records. `ranks` are the culprits; for `stuck_together`, ranks inside without progress."""

    kind: Kind
    ranks: tuple[int, ...] = ()
    group: str = ""
    sequence: int = 0
    reason: str
    queued: bool = False  # the culprits have called it, but their GPUs have not reached it
    culprits: tuple[BlockingRank, ...] = ()  # one entry per root
    chain: str = ""  # path from the end of the longest wait chain to its root

    @property
    def on_host(self) -> bool:
        """Return whether it is a collective of host memory in a job with GPUs."""
        return self.group.endswith(ON_HOST)


def wait_word(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks as "rank 3", "ranks 1, 2 and 5" or "1,023 ranks"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _NAMED:
        return f"{len(ranks):,} ranks"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "no rank"


Node = int


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """First unfinished message of one direction between two ranks."""

    group: str
    source: int
    target: int
    sender: P2PMessage | None  # None: not sent, or completed
    receiver: P2PMessage | None

    @property
    def what(self) -> str:
        """Return a description of the payload; empty if unknown."""
        message = self.receiver or self.sender
        return message.what if message is not None else ""

    def __str__(self) -> str:
        if self.what:
            return f"the {self.what} from rank {self.source} to rank {self.target}"
        return f"the message from rank {self.source} to rank {self.target} in group {self.group}"


@dataclass(frozen=True, slots=True)
class Host:
    """Program of one rank that has not called the operation others wait for."""

    rank: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """Stopped GPU of one rank."""

    rank: int


Place = Stall | Channel | Host | Gpu


@dataclass(slots=True)
class _Item:
    """An unfinished operation called by one rank."""

    order: int
    node: Node
    holds: bool  # others wait in it and its GPU has not begun it, so earlier operations may block it


@dataclass(slots=True)
class WaitGraph:
    """Graph of waits: `after[n]` are the nodes for which node n waits."""

    places: list[Place] = field(default_factory=list)
    after: list[list[Node]] = field(default_factory=list)
    hosts: dict[int, Node] = field(default_factory=dict)
    calls: dict[int, list[Node]] = field(default_factory=dict)  # by rank: unfinished operations it has called
    open: set[Node] = field(default_factory=set)  # nodes that wait for a rank without a record

    def add(self, place: Place) -> Node:
        self.places.append(place)
        self.after.append([])
        return len(self.places) - 1

    def host(self, rank: int) -> Node:
        if rank not in self.hosts:
            self.hosts[rank] = self.add(Host(rank))
        return self.hosts[rank]

    def gpu(self, rank: int, held: Iterable[Node]) -> Node:
        """Add the GPU of a rank, which these nodes wait for, as does its host if it is in the graph."""
        node = self.add(Gpu(rank))
        for other in {*held, *([self.hosts[rank]] if rank in self.hosts else ())}:
            self.after[other].append(node)
        return node

    def inside(self, node: Node) -> tuple[int, ...]:
        """Return the ranks that wait at a node."""
        place = self.places[node]
        match place:
            case Stall():
                return place.inside if place.late else (*place.inside, *place.queued)
            case Channel():
                ends = ((place.source, place.sender), (place.target, place.receiver))
                return tuple(rank for rank, message in ends if message is not None)
            case Host() | Gpu():
                return (place.rank,)

    def reaching(self, roots: Iterable[Node]) -> dict[Node, Node | None]:
        """Return all nodes that wait for one of these, directly or not.
        Each maps to the next node on its way; roots map to None.
        """
        before: list[list[Node]] = [[] for _ in self.places]
        for node, after in enumerate(self.after):
            for other in after:
                before[other].append(node)
        found: dict[Node, Node | None] = dict.fromkeys(roots)
        edge = list(found)
        while edge:
            fresh = []
            for node in edge:
                for other in before[node]:
                    if other not in found:
                        found[other] = node
                        fresh.append(other)
            edge = fresh
        return found


def build(records: Records, stalls: Sequence[Stall]) -> WaitGraph:
    """Return the graph of these stalls and all unfinished messages."""
    waits = WaitGraph()
    items: dict[int, list[_Item]] = {}
    for stall in stalls:
        _add_stall(waits, records, stall, items)
    for channel in channels(records):
        _add_channel(waits, records, channel, items)
    for rank, called in items.items():
        called.sort(key=lambda item: item.order)
        waits.calls[rank] = [item.node for item in called]
        _add_order(waits, records, rank, called)
    return waits


def channels(records: Records) -> list[Channel]:
    """Return the first unfinished message of every direction, as both ends recorded it."""
    sends: dict[tuple[str, int, int], P2PMessage] = {}
    receives: dict[tuple[str, int, int], P2PMessage] = {}
    for flight in records.flights.values():
        for message in flight.messages:
            own = message.source if message.sends else message.target
            # If a group's ranks are unknown, so is the other end, and the message waits for an unknown rank.
            key = message.channel if own == flight.rank else _lonely(message, flight.rank)
            (sends if message.sends else receives).setdefault(key, message)
    keys = dict.fromkeys([*sends, *receives])
    return [
        Channel(group=key[0], source=key[1], target=key[2], sender=sends.get(key), receiver=receives.get(key))
        for key in keys
    ]


def _lonely(message: P2PMessage, rank: int) -> tuple[str, int, int]:
    return (message.group, rank, -1) if message.sends else (message.group, -1, rank)


def _add_stall(waits: WaitGraph, records: Records, stall: Stall, items: dict[int, list[_Item]]) -> None:
    node = waits.add(stall)
    waits.after[node] += [waits.host(rank) for rank in (*stall.late, *stall.silent)]
    if stall.unknown or stall.doubtful:
        waits.open.add(node)
    first = records.numbers.get(stall.group, {}).get(stall.sequence, {})
    for rank in records.members[stall.group]:
        if rank not in records.flights or records.entered_count(stall.group, rank) <= records.completed_count(
            stall.group, rank
        ):
            continue
        behind = records.completed_count(stall.group, rank) < stall.sequence
        entry = first.get(rank) if behind else None
        order = entry.order if entry is not None else _first_order(records, stall.group, rank)
        begun = entry is not None and entry.state == STARTED
        items.setdefault(rank, []).append(_Item(order, node, behind and not begun))


def _first_order(records: Records, key: str, rank: int) -> int:
    """Return the record position of a rank's oldest unfinished collective in a group; -1 if the record lost it."""
    numbers = records.numbers.get(key, {})
    entry = numbers.get(records.completed_count(key, rank) + 1, {}).get(rank)
    return entry.order if entry is not None and entry.state != DONE else -1


def _add_channel(waits: WaitGraph, records: Records, channel: Channel, items: dict[int, list[_Item]]) -> None:
    node = waits.add(channel)
    for rank, message in ((channel.source, channel.sender), (channel.target, channel.receiver)):
        if message is not None:
            items.setdefault(rank, []).append(_Item(message.order, node, True))
        elif rank in records.flights or rank in records.silent:
            waits.after[node].append(waits.host(rank))
        else:
            waits.open.add(node)


def _add_order(waits: WaitGraph, records: Records, rank: int, called: list[_Item]) -> None:
    """Add the waits of a GPU's queue: later operations wait for earlier ones."""
    for stream in _streams(waits, called):
        for at, item in enumerate(stream):
            if item.holds:
                waits.after[item.node] += _before(stream, at)
        if rank in waits.hosts:
            waits.after[waits.hosts[rank]] += _before(stream, len(stream))


def _streams(waits: WaitGraph, called: Sequence[_Item]) -> Iterator[list[_Item]]:
    """Yield the operations of GPU and host separately, since their recorders number entries independently."""
    for on_host in (False, True):
        stream = [item for item in called if _is_on_host(waits.places[item.node]) is on_host]
        if stream:
            yield stream


def _is_on_host(place: Place) -> bool:
    return not isinstance(place, Host | Gpu) and place.group.endswith(ON_HOST)


def _before(stream: Sequence[_Item], at: int) -> list[Node]:
    """Return the nodes just before this position, back to the first that holds; that one covers the rest."""
    found = []
    for item in reversed(stream[:at]):
        found.append(item.node)
        if item.holds:
            break
    return found


def chain(waits: WaitGraph, way: dict[Node, Node | None], most: int = 6) -> str:
    """Describe the longest chain to a root; empty if all wait for it directly."""
    depth: dict[Node, int] = {}
    for node in way:
        trail = []
        at: Node | None = node
        while at is not None and at not in depth:
            trail.append(at)
            at = way[at]
        start = depth[at] if at is not None else -1
        for further, one in enumerate(reversed(trail), 1):
            depth[one] = start + further
    shown = [node for node in depth if not isinstance(waits.places[node], Host | Gpu)]
    if not shown:
        return ""
    links, at = [], max(shown, key=lambda node: (depth[node], -node))
    while at is not None:
        place = waits.places[at]
        if not isinstance(place, Host | Gpu):
            links.append(f"{ranks_text(sorted(waits.inside(at)))} in {_short(place)}")
        at = way[at]
    if len(links) > most:
        links = [*links[: most // 2], f"{len(links) - most // 2 * 2} more", *links[-(most // 2) :]]
    return ", behind ".join(links) if len(links) > 1 else ""


def _short(place: Stall | Channel) -> str:
    return f"#{place.sequence} of group {place.group}" if isinstance(place, Stall) else str(place)


RootKind = Literal["never_came", "no_answer", "gpu_stopped", "queued"]
WaitRoots = dict[Node, RootKind]

_SYNCHRONIZING = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "barrier")
"""Operations that complete on no rank before all have begun them; not so for broadcasts and uneven all_to_alls."""


def gpu_roots(records: Records, waits: WaitGraph) -> WaitRoots:
    """Return ranks whose GPUs stopped: they called as much as their peers, but less is completed or begun."""
    found: WaitRoots = {}
    held: dict[int, list[Node]] = {}
    stopped: dict[int, RootKind] = {}
    for node, place in enumerate(waits.places):
        if isinstance(place, Stall):
            for rank in _lagging(records, place):
                stopped[rank] = "gpu_stopped"
            for rank in place.queued:
                # Earlier operations may block it. Without any, and with a complete record, the GPU is at fault.
                if waits.calls[rank][0] == node and records.flights[rank].whole:
                    stopped.setdefault(rank, "queued")
    for rank, called in waits.calls.items():
        if rank in stopped:
            held[rank] = called
    for rank in sorted(stopped):
        found[waits.gpu(rank, held.get(rank, ()))] = stopped[rank]
    return found


def _lagging(records: Records, stall: Stall) -> Iterator[int]:
    """Yield members that have completed less than they could.
    A peer that has completed a later synchronizing collective shows that all members have begun it. A GPU begins
    nothing in a group before its earlier operations complete, so the GPU, or its monitoring, stopped.
    """
    having = records.having[stall.group]
    if stall.doubtful:
        return
    through = max((group.completed for group in having.values() if group.sure), default=0)
    if through < stall.sequence or not any(group.on_gpu for group in having.values()):
        return
    numbers = records.numbers.get(stall.group, {})
    last = _last_synchronizing(numbers, stall.sequence, through)
    for rank in records.members[stall.group]:
        group = having.get(rank)
        if group is None or not _counts(group):
            continue
        first = group.completed + 1
        entry = numbers.get(first, {}).get(rank)
        # It has not begun a collective that others have completed.
        unbegun = records.timed and entry is not None and entry.state == SCHEDULED
        if first < last <= group.entered or (unbegun and first == last):
            yield rank


def _counts(group: Group) -> bool:
    return group.on_gpu and group.sure and group.entered > group.completed


def _last_synchronizing(numbers: Mapping[int, Mapping[int, CollectiveEntry]], first: int, through: int) -> int:
    """Return the newest synchronizing collective in the range; 0 if none is known."""
    for number in range(through, first - 1, -1):
        entries = numbers.get(number, {})
        if any(entry.op.lstrip("_").startswith(_SYNCHRONIZING) for entry in entries.values()):
            return number
    return 0


def host_roots(records: Records, waits: WaitGraph) -> WaitRoots:
    """Return ranks that others wait for and that wait for nothing themselves, and ranks that did not answer."""
    found: WaitRoots = {}
    for rank, node in waits.hosts.items():
        if rank in records.silent:
            found[node] = "no_answer"
        elif not waits.after[node]:
            found[node] = "never_came"
    return found


def message_roots(waits: WaitGraph, never_sent: Iterable[int]) -> WaitRoots:
    """Return ranks that omitted a message, whatever they wait for now; nothing progresses without it."""
    return {waits.hosts[rank]: "never_came" for rank in never_sent if rank in waits.hosts}


def last_resort(waits: WaitGraph, explained: Collection[Node]) -> WaitRoots:
    """Return the rank in a ring of waiting ranks that waits only for messages.
    Receiving early is usual and blocks no other rank, but a rank that has not called a collective that others are in is
    behind. It is named only if it is the only such rank in its ring.
    """
    unknown = waits.reaching(waits.open)
    left = [node for node in range(len(waits.places)) if node not in explained and node not in unknown]
    found: WaitRoots = {}
    for ring in _sinks(waits, left):
        if len(ring) == 1:
            continue
        behind = [node for node in ring if _waits_for_messages_only(waits, node)]
        if len(behind) == 1:
            found[behind[0]] = "never_came"
    return found


def _waits_for_messages_only(waits: WaitGraph, node: Node) -> bool:
    place = waits.places[node]
    if not isinstance(place, Host):
        return False
    called = [waits.places[other] for other in waits.calls.get(place.rank, ())]
    return all(isinstance(one, Channel) and one.target == place.rank for one in called)


def fronts(waits: WaitGraph, explained: Mapping[Node, object]) -> list[Node]:
    """Return nodes that all ranks have reached, that wait for nothing, and that make no progress."""
    return [node for node, after in enumerate(waits.after) if not after and node not in explained]


def _sinks(waits: WaitGraph, nodes: Collection[Node]) -> list[set[Node]]:
    """Return strongly connected components of these nodes without outgoing edges (iterative Tarjan)."""
    among = set(nodes)
    index: dict[Node, int] = {}
    low: dict[Node, int] = {}
    part: dict[Node, int] = {}
    parts: list[set[Node]] = []
    stack: list[Node] = []
    for start in nodes:
        if start in index:
            continue
        work = [(start, iter(waits.after[start]))]
        index[start] = low[start] = len(index)
        stack.append(start)
        while work:
            node, others = work[-1]
            for other in others:
                if other not in among:
                    continue
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    work.append((other, iter(waits.after[other])))
                    break
                if other not in part:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    one: set[Node] = set()
                    while node not in one:
                        one.add(member := stack.pop())
                        part[member] = len(parts)
                    parts.append(one)
    return [
        one
        for number, one in enumerate(parts)
        if all(part.get(other, number) == number for node in one for other in waits.after[node])
    ]
