"""All ranks' flight records, paired by group and sequence number, and the wait graph."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trainer.agent.flight.flight_record import (
    DONE,
    ON_HOST,
    SCHEDULED,
    STARTED,
    CollectiveEntry,
    FlightRecord,
    Group,
    P2PMessage,
)

Numbers = Mapping[str, Mapping[int, Mapping[int, CollectiveEntry]]]
"""Entries by group, sequence number and rank."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """First unfinished collective of one group."""

    group: str
    sequence: int
    inside: tuple[int, ...]  # entered it and have not completed it
    late: tuple[int, ...] = ()  # never entered it
    queued: tuple[int, ...] = ()  # called it, but their GPUs have not begun it, although others' have
    silent: tuple[int, ...] = ()  # did not answer
    unknown: tuple[int, ...] = ()  # have no record and are not in `silent`
    entry: CollectiveEntry | None = None  # as seen by one of the ranks inside
    doubtful: bool = False  # the group was created again, and the records do not show which ranks are in which lifetime

    @property
    def missing(self) -> tuple[int, ...]:
        return (self.late or self.queued) + self.silent

    def __str__(self) -> str:
        return f"collective #{self.sequence} of group {self.group}" + (f" ({self.entry})" if self.entry else "")


_UNUSED = Group(ranks=(), entered=0, completed=0)


class Records:
    """Flight records by rank, and the members of each group."""

    def __init__(self, flights: Iterable[FlightRecord], expected: Iterable[int], unanswered: Iterable[int]) -> None:
        self.flights = {flight.rank: flight for flight in flights}
        self.silent = set(unanswered) - set(self.flights)
        self.world = tuple(sorted({*expected, *self.flights}))
        self.having: dict[str, dict[int, Group]] = {}  # each group as seen by each of its ranks
        for rank, flight in self.flights.items():
            for key, group in flight.groups.items():
                self.having.setdefault(key, {})[rank] = group
        known = set(self.world)
        self.members = {key: self._find_members(key, known) for key in self.having}
        self.outdated: set[tuple[str, int]] = set()  # (group, rank) pairs that know only an earlier group of that name
        self.doubtful = {key for key in self.having if not self._same_life(key)}
        """Groups created again under the same name, if it is unknown which ranks' numbers belong together."""
        self._doubt_counters()
        self.numbers = _index_entries(self)
        self.timed = any(flight.timed for flight in self.flights.values())
        """Whether NCCL reports which collectives have begun; without TORCH_NCCL_ENABLE_TIMING, none appear to have."""

    def _same_life(self, key: str) -> bool:
        """Return whether a group's numbers mean the same on all ranks, once ranks in an earlier lifetime are reset."""
        having = self.having[key]
        newest = max(group.before for group in having.values())
        if not newest:
            return True
        strangers = any(rank in self.flights and rank not in having for rank in self.members[key])
        old = {rank: group for rank, group in having.items() if group.before < newest}
        lost = not all(group.surely for group in having.values())
        if strangers or lost or any(group.is_unfinished for group in old.values()):
            return False
        for rank, group in old.items():
            having[rank] = Group(group.ranks, 0, 0, group.description, group.on_gpu)
            self.outdated.add((key, rank))
        return True

    def _doubt_counters(self) -> None:
        """Discard counters that no entry confirms and that may count messages.
        No collective completes before all have entered it.
        """
        talked = {message.group for flight in self.flights.values() for message in flight.messages}
        for key, having in self.having.items():
            shown = [group.entered for group in having.values() if not group.counted]
            for rank, group in having.items():
                if group.counted and (key in talked or (shown and group.completed > min(shown))):
                    having[rank] = Group(group.ranks, 0, 0, group.description, group.on_gpu)

    def _find_members(self, key: str, known: set[int]) -> tuple[int, ...]:
        """Return the members that a group's ranks report. Otherwise the world, for the default group, or all ranks that
        have it.
        """
        having = self.having[key]
        reported = max((group.ranks for group in having.values()), key=len, default=())
        if reported:
            return tuple(rank for rank in reported if rank in known)
        if key == "0" or any(group.description == "default_pg" for group in having.values()):
            return self.world
        return tuple(sorted(having))

    def group(self, key: str, rank: int) -> Group:
        """Return a group as seen by one rank, which may not have used it yet."""
        return self.having[key].get(rank, _UNUSED)


def _index_entries(records: Records) -> Numbers:
    """Return entries by group, sequence number and rank, omitting duplicates (coalesced calls), which are ambiguous."""
    found: dict[str, dict[int, dict[int, CollectiveEntry]]] = {}
    for rank, flight in records.flights.items():
        often = Counter((entry.group, entry.sequence) for entry in flight.entries)
        for entry in flight.entries:
            if often[entry.group, entry.sequence] == 1 and (entry.group, rank) not in records.outdated:
                found.setdefault(entry.group, {}).setdefault(entry.sequence, {})[rank] = entry
    return found


def stalls(records: Records) -> list[Stall]:
    return [stall for key in records.members if (stall := _stall(records, key)) is not None]


def _stall(records: Records, key: str) -> Stall | None:
    groups = {rank: records.group(key, rank) for rank in records.members[key] if rank in records.flights}
    stuck = {rank: group.completed + 1 for rank, group in groups.items() if group.is_unfinished}
    if not stuck:
        return None
    first = min(stuck.values())
    if key in records.doubtful:
        return Stall(group=key, sequence=first, inside=tuple(stuck), doubtful=True)
    entries = records.numbers.get(key, {}).get(first, {})
    inside = [rank for rank, sequence in stuck.items() if sequence == first]
    late = [rank for rank, group in groups.items() if group.entered < first]
    # On a GPU, a collective may be queued behind work that never ends while peers have begun theirs.
    begun = any(rank in entries and entries[rank].state == STARTED for rank in inside)
    begun = begun or (records.timed and any(group.completed >= first for group in groups.values()))
    queued = [rank for rank in inside if begun and rank in entries and entries[rank].state == SCHEDULED]
    silent = [rank for rank in records.members[key] if rank in records.silent]
    out = {*late, *silent, *(() if late else queued)}
    return Stall(
        group=key,
        sequence=first,
        inside=tuple(rank for rank in inside if rank not in out),
        late=tuple(late),
        queued=tuple(queued),
        silent=tuple(silent),
        unknown=tuple(r for r in records.members[key] if r not in records.flights and r not in records.silent),
        entry=next((entries[rank] for rank in inside if rank in entries), None),
    )


Kind = Literal["none", "missing", "gpu_stopped", "desync_shape", "desync_order", "stuck_together"]
_NAMED = 8
"""Maximum number of ranks listed in a reason."""


@dataclass(frozen=True, kw_only=True)
class BlockingRank:
    """A rank that others wait for and whose own wait is unexplained."""

    rank: int
    kind: Literal["never_came", "no_answer", "gpu_stopped", "queued", "desync"]
    group: str
    sequence: int  # 0: a message
    reason: str

    @property
    def on_gpu(self) -> bool:
        """Return whether the rank's GPU stopped, so that its host's position proves nothing."""
        return self.kind in ("gpu_stopped", "queued")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Conclusion from the records. `ranks` are the culprits or, for `stuck_together`, the ranks inside."""

    kind: Kind
    ranks: tuple[int, ...] = ()
    group: str = ""
    sequence: int = 0
    reason: str
    queued: bool = False  # the culprits have called it, but their GPUs have not reached it
    culprits: tuple[BlockingRank, ...] = ()  # one entry per root
    chain: str = ""  # from the end of the longest wait chain to its root
    idle: bool = False  # all ranks answered, and none is in a collective or waits for a message

    @property
    def on_host(self) -> bool:
        """Return whether the collective uses host memory in a job with GPUs."""
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
class MessageChannel:
    """First unfinished message in one direction between two ranks."""

    group: str
    source: int
    target: int
    sender: P2PMessage | None  # None: not sent, or completed
    receiver: P2PMessage | None

    @property
    def what(self) -> str:
        """Return a description of the payload, or "" if unknown."""
        message = self.receiver or self.sender
        return message.what if message is not None else ""

    def __str__(self) -> str:
        if self.what:
            return f"the {self.what} from rank {self.source} to rank {self.target}"
        return f"the message from rank {self.source} to rank {self.target} in group {self.group}"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank whose program has not called an operation that others wait for, or whose GPU has stopped."""

    rank: int
    on_gpu: bool


Place = Stall | MessageChannel | RankPlace


@dataclass(slots=True)
class _Item:
    """An unfinished operation called by one rank."""

    order: int
    node: Node
    holds: bool  # others wait in it but its GPU has not begun it, so earlier operations may block it


@dataclass(slots=True)
class WaitGraph:
    """Wait graph: `after[n]` lists the nodes that node n waits for."""

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
            self.hosts[rank] = self.add(RankPlace(rank, on_gpu=False))
        return self.hosts[rank]

    def gpu(self, rank: int, held: Iterable[Node]) -> Node:
        """Add a rank's GPU. These nodes wait for it, and so does the rank's host if it is in the graph."""
        node = self.add(RankPlace(rank, on_gpu=True))
        for other in {*held, *([self.hosts[rank]] if rank in self.hosts else ())}:
            self.after[other].append(node)
        return node

    def inside(self, node: Node) -> tuple[int, ...]:
        place = self.places[node]
        match place:
            case Stall():
                return place.inside if place.late else (*place.inside, *place.queued)
            case MessageChannel():
                ends = ((place.source, place.sender), (place.target, place.receiver))
                return tuple(rank for rank, message in ends if message is not None)
            case RankPlace():
                return (place.rank,)

    def before(self) -> list[list[Node]]:
        """Return the reversed graph: for each node, the nodes that wait for it."""
        before: list[list[Node]] = [[] for _ in self.places]
        for node, after in enumerate(self.after):
            for other in after:
                before[other].append(node)
        return before

    def reaching(self, roots: Iterable[Node]) -> dict[Node, Node | None]:
        """Return all nodes that wait for one of `roots`, directly or indirectly, in the form `find_reachable` uses."""
        return find_reachable(self.before(), roots)


def find_reachable(edges: Sequence[Iterable[Node]], roots: Iterable[Node]) -> dict[Node, Node | None]:
    """Return all nodes reachable from `roots`, nearest first.
    Each node maps to the previous one on its path; roots map to None.
    """
    found: dict[Node, Node | None] = dict.fromkeys(roots)
    queue = list(found)
    for node in queue:
        for other in edges[node]:
            if other not in found:
                found[other] = node
                queue.append(other)
    return found


def build(records: Records, stalls: Sequence[Stall]) -> WaitGraph:
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


def channels(records: Records) -> list[MessageChannel]:
    """Return the first unfinished message in each direction, as both ends recorded it."""
    sends: dict[tuple[str, int, int], P2PMessage] = {}
    receives: dict[tuple[str, int, int], P2PMessage] = {}
    for flight in records.flights.values():
        for message in flight.messages:
            own = message.source if message.sends else message.target
            # If a group's ranks are unknown, so is the message's other end, and the message waits for an unknown rank.
            key = message.channel if own == flight.rank else _lonely(message, flight.rank)
            (sends if message.sends else receives).setdefault(key, message)
    keys = dict.fromkeys([*sends, *receives])
    return [
        MessageChannel(group=key[0], source=key[1], target=key[2], sender=sends.get(key), receiver=receives.get(key))
        for key in keys
    ]


def _lonely(message: P2PMessage, rank: int) -> tuple[str, int, int]:
    return (message.group, rank, -1) if message.sends else (message.group, -1, rank)


def _add_stall(waits: WaitGraph, records: Records, stall: Stall, items: dict[int, list[_Item]]) -> None:
    node = waits.add(stall)
    waits.after[node] += [waits.host(rank) for rank in (*stall.late, *stall.silent)]
    if stall.unknown or stall.doubtful:
        waits.open.add(node)
    numbers = records.numbers.get(stall.group, {})
    for rank in records.members[stall.group]:
        group = records.group(stall.group, rank)
        if rank not in records.flights or not group.is_unfinished:
            continue
        entry = numbers.get(group.completed + 1, {}).get(rank)
        order = entry.order if entry is not None and entry.state != DONE else -1  # -1: no longer in the record
        waits_here = group.completed < stall.sequence
        begun = entry is not None and entry.state == STARTED
        items.setdefault(rank, []).append(_Item(order, node, waits_here and not begun))


def _add_channel(waits: WaitGraph, records: Records, channel: MessageChannel, items: dict[int, list[_Item]]) -> None:
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
    """Yield the operations of the GPU and the host separately, since their recorders number entries independently."""
    for on_host in (False, True):
        stream = [item for item in called if _is_on_host(waits.places[item.node]) is on_host]
        if stream:
            yield stream


def _is_on_host(place: Place) -> bool:
    return not isinstance(place, RankPlace) and place.group.endswith(ON_HOST)


def _before(stream: Sequence[_Item], at: int) -> list[Node]:
    """Return the nodes just before this position, back to the first item that `holds`, which stands for the rest."""
    found = []
    for item in reversed(stream[:at]):
        found.append(item.node)
        if item.holds:
            break
    return found


def chain(waits: WaitGraph, way: dict[Node, Node | None], most: int = 6) -> str:
    """Describe the longest chain to a root. Return "" if all nodes wait for a root directly."""
    depth: dict[Node, int] = {}
    for node, following in way.items():  # nearest to a root first
        depth[node] = 0 if following is None else depth[following] + 1
    shown = [node for node in depth if not isinstance(waits.places[node], RankPlace)]
    if not shown:
        return ""
    links: list[str] = []
    at: Node | None = max(shown, key=lambda node: (depth[node], -node))
    while at is not None:
        place = waits.places[at]
        if not isinstance(place, RankPlace):
            links.append(f"{ranks_text(sorted(waits.inside(at)))} in {_short(place)}")
        at = way[at]
    if len(links) > most:
        links = [*links[: most // 2], f"{len(links) - most // 2 * 2} more", *links[-(most // 2) :]]
    return ", behind ".join(links) if len(links) > 1 else ""


def _short(place: Stall | MessageChannel) -> str:
    return f"#{place.sequence} of group {place.group}" if isinstance(place, Stall) else str(place)
