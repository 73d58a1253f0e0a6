"""All ranks' flight records, paired by group and sequence number: the first unfinished collective of each group."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainer.agent.flight.flight_record import SCHEDULED, STARTED, CollectiveEntry, FlightRecord, Group

Numbers = Mapping[str, Mapping[int, Mapping[int, CollectiveEntry]]]
"""Entries by group, sequence number and rank."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """First unfinished collective of one group."""

    group: str
    sequence: int
    inside: tuple[int, ...]  # entered it and have not completed it
    late: tuple[int, ...]  # never entered it
    queued: tuple[int, ...]  # called it, but their GPUs have not begun it while others' have
    silent: tuple[int, ...]  # did not answer
    unknown: tuple[int, ...]  # have no record and are not in `silent`
    entry: CollectiveEntry | None  # as seen by one of the ranks inside
    doubtful: bool = False  # the group was created again, and the records do not show which ranks are in which lifetime

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the ranks that the others wait for."""
        return (self.late or self.queued) + self.silent

    def __str__(self) -> str:
        return f"collective #{self.sequence} of group {self.group}" + (f" ({self.entry})" if self.entry else "")


class Records:
    """Flight records by rank, and the members of each group."""

    def __init__(self, flights: Iterable[FlightRecord], expected: Iterable[int], unanswered: Iterable[int]) -> None:
        self.flights = {flight.rank: flight for flight in flights}
        self.silent = set(unanswered) - set(self.flights)
        self.world = tuple(sorted({*expected, *self.flights}))
        self.having: dict[str, dict[int, Group]] = {}  # each group as each of its ranks knows it
        for rank, flight in self.flights.items():
            for key, group in flight.groups.items():
                self.having.setdefault(key, {})[rank] = group
        known = set(self.world)
        self.members = {key: self._find_members(key, known) for key in self.having}
        self.outdated: set[tuple[str, int]] = set()  # (group, rank) pairs that know only an earlier group of that name
        self.doubtful = {key for key in self.having if not self._same_life(key)}
        """Groups created again under the same name, where it is unknown which ranks' numbers belong together."""
        self._doubt_counters()
        self.numbers = _by_number(self)
        self.timed = any(flight.timed for flight in self.flights.values())
        """Whether NCCL reports which collectives have begun; without TORCH_NCCL_ENABLE_TIMING none seems to have."""

    def _same_life(self, key: str) -> bool:
        """Return whether a group's numbers mean the same on all ranks, after resetting ranks of an earlier lifetime."""
        having = self.having[key]
        newest = max(group.before for group in having.values())
        if not newest:
            return True
        strangers = any(rank in self.flights and rank not in having for rank in self.members[key])
        old = {rank: group for rank, group in having.items() if group.before < newest}
        lost = not all(group.surely for group in having.values())
        if strangers or lost or any(group.entered > group.completed for group in old.values()):
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
        """Return the members reported by its ranks; else all ranks that have it, or the world for the default group."""
        having = self.having[key]
        told = max((group.ranks for group in having.values()), key=len, default=())
        if told:
            return tuple(rank for rank in told if rank in known)
        if key == "0" or any(group.description == "default_pg" for group in having.values()):
            return self.world
        return tuple(sorted(having))

    def entered_count(self, key: str, rank: int) -> int:
        group = self.having[key].get(rank)
        return group.entered if group else 0

    def completed_count(self, key: str, rank: int) -> int:
        group = self.having[key].get(rank)
        return group.completed if group else 0


def _by_number(records: Records) -> Numbers:
    """Return entries by group, sequence number and rank, without duplicates (coalesced calls), which are ambiguous."""
    found: dict[str, dict[int, dict[int, CollectiveEntry]]] = {}
    for rank, flight in records.flights.items():
        often = Counter((entry.group, entry.sequence) for entry in flight.entries)
        for entry in flight.entries:
            if often[entry.group, entry.sequence] == 1 and (entry.group, rank) not in records.outdated:
                found.setdefault(entry.group, {}).setdefault(entry.sequence, {})[rank] = entry
    return found


def stalls(records: Records) -> list[Stall]:
    """Return one stall for each group in which a rank waits."""
    return [stall for key in records.members if (stall := _stall(records, key)) is not None]


def _stall(records: Records, key: str) -> Stall | None:
    members = [rank for rank in records.members[key] if rank in records.flights]
    stuck = [records.completed_count(key, rank) + 1 for rank in members if _inside(records, key, rank)]
    if not stuck:
        return None
    first = min(stuck)
    if key in records.doubtful:
        return _doubtful_stall(records, key, first)
    entries = records.numbers.get(key, {}).get(first, {})
    inside = [
        rank for rank in members if records.entered_count(key, rank) >= first > records.completed_count(key, rank)
    ]
    late = [rank for rank in members if records.entered_count(key, rank) < first]
    # On a GPU, a collective may be queued behind endless work while its peers' have begun.
    begun = any(rank in entries and entries[rank].state == STARTED for rank in inside)
    begun = begun or (records.timed and any(records.completed_count(key, rank) >= first for rank in members))
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


def _doubtful_stall(records: Records, key: str, first: int) -> Stall:
    """Return the stall of a doubtful group, whose missing ranks are unknown."""
    inside = tuple(rank for rank in records.members[key] if rank in records.flights and _inside(records, key, rank))
    return Stall(
        group=key, sequence=first, inside=inside, late=(), queued=(), silent=(), unknown=(), entry=None, doubtful=True
    )


def _inside(records: Records, key: str, rank: int) -> bool:
    return records.entered_count(key, rank) > records.completed_count(key, rank)
