"""The roots of a graph of waits: those whom nobody explains, each with its kind."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Literal

from trainer.agent.flight.flight_record import SCHEDULED, Entry, Group
from trainer.agent.flight.stalls import Records, Stall
from trainer.agent.flight.wait_graph import Channel, Host, Node, WaitGraph

RootKind = Literal["never_came", "no_answer", "gpu_stopped", "queued"]
WaitRoots = dict[Node, RootKind]

_SYNCHRONIZING = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "barrier")
"""Operations that are over for nobody before all have begun them; broadcasts are not, nor are uneven all_to_alls."""


def gpu_roots(records: Records, waits: WaitGraph) -> WaitRoots:
    """Ranks whose GPUs stopped: they have called as much as their peers, and less of it is over or begun."""
    found: WaitRoots = {}
    held: dict[int, list[Node]] = {}
    stopped: dict[int, RootKind] = {}
    for node, place in enumerate(waits.places):
        if isinstance(place, Stall):
            for rank in _lagging(records, place):
                stopped[rank] = "gpu_stopped"
            for rank in place.queued:
                # What it was told before may hold it up; where there is nothing, and nothing is lost, nothing does.
                if waits.calls[rank][0] == node and records.flights[rank].whole:
                    stopped.setdefault(rank, "queued")
    for rank, called in waits.calls.items():
        if rank in stopped:
            held[rank] = called
    for rank in sorted(stopped):
        found[waits.gpu(rank, held.get(rank, ()))] = stopped[rank]
    return found


def _lagging(records: Records, stall: Stall) -> Iterator[int]:
    """Members of whom less is over than can be.

    A peer that is through a later collective that nobody leaves before all have begun it shows that they have begun it
    too, and a GPU begins nothing of a group before what lies before it is over: the GPU, or what watches it, stopped.
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
        # It has not even begun what others are through with.
        unbegun = records.timed and entry is not None and entry.state == SCHEDULED
        if first < last <= group.entered or (unbegun and first == last):
            yield rank


def _counts(group: Group) -> bool:
    return group.on_gpu and group.sure and group.entered > group.completed


def _last_synchronizing(numbers: Mapping[int, Mapping[int, Entry]], first: int, through: int) -> int:
    """The newest of these collectives that nobody leaves before all have begun it; 0: none is known."""
    for number in range(through, first - 1, -1):
        entries = numbers.get(number, {})
        if any(entry.op.lstrip("_").startswith(_SYNCHRONIZING) for entry in entries.values()):
            return number
    return 0


def host_roots(records: Records, waits: WaitGraph) -> WaitRoots:
    """Ranks that others wait for and that wait nowhere themselves, and those that did not answer."""
    found: WaitRoots = {}
    for rank, node in waits.hosts.items():
        if rank in records.silent:
            found[node] = "no_answer"
        elif not waits.after[node]:
            found[node] = "never_came"
    return found


def message_roots(waits: WaitGraph, never_sent: Iterable[int]) -> WaitRoots:
    """Ranks that have left out a message, whatever they wait for since: without it nobody gets on."""
    return {waits.hosts[rank]: "never_came" for rank in never_sent if rank in waits.hosts}


def last_resort(waits: WaitGraph, explained: Collection[Node]) -> WaitRoots:
    """Of ranks that wait for each other in a ring, the one that waits for nothing but messages.

    To ask for a message early is usual, and stops nobody; who has not called a collective that others are in is behind.
    Only where one rank alone stands so is it named.
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
    """Where all have come, nothing lies before it, and no rank makes progress."""
    return [node for node, after in enumerate(waits.after) if not after and node not in explained]


def _sinks(waits: WaitGraph, nodes: Collection[Node]) -> list[set[Node]]:
    """Strongly connected parts of these nodes out of which nothing leads (Tarjan's, without recursion)."""
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
