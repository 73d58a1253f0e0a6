"""The flight records of all ranks, paired by group and number: the first unfinished collective of every group."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainer.agent.flight.flight_record import SCHEDULED, STARTED, Entry, FlightRecord, Group

Numbers = Mapping[str, Mapping[int, Mapping[int, Entry]]]
"""Entries by group, number and rank."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """The first unfinished collective of one group."""

    group: str
    sequence: int
    inside: tuple[int, ...]  # entered it, and are not through
    late: tuple[int, ...]  # never entered it
    queued: tuple[int, ...]  # called it, and their GPUs have not begun it while others' have
    silent: tuple[int, ...]  # did not answer
    unknown: tuple[int, ...]  # nobody has a record of theirs
    entry: Entry | None  # as one of those inside sees it
    doubtful: bool = False  # its group was made again, and the records do not tell who is in which of them

    @property
    def missing(self) -> tuple[int, ...]:
        """Those that the others wait for."""
        return (self.late or self.queued) + self.silent

    def __str__(self) -> str:
        return f"collective #{self.sequence} of group {self.group}" + (f" ({self.entry})" if self.entry else "")


class Records:
    """The flights by rank, and each group's members."""

    def __init__(self, flights: Iterable[FlightRecord], expected: Iterable[int], unanswered: Iterable[int]) -> None:
        self.flights = {flight.rank: flight for flight in flights}
        self.silent = set(unanswered) - set(self.flights)
        self.world = tuple(sorted({*expected, *self.flights}))
        self.having: dict[str, dict[int, Group]] = {}  # each group as its ranks know it
        for rank, flight in self.flights.items():
            for key, group in flight.groups.items():
                self.having.setdefault(key, {})[rank] = group
        known = set(self.world)
        self.members = {key: self._members_of(key, known) for key in self.having}
        self.outdated: set[tuple[str, int]] = set()  # groups and ranks that know only an earlier one of that name
        self.doubtful = {key for key in self.having if not self._same_life(key)}
        """Groups that were made again under their names, where nobody knows which ranks' numbers go together."""
        self._doubt_counters()
        self.numbers = _by_number(self)
        self.timed = any(flight.timed for flight in self.flights.values())
        """Whether NCCL tells which collectives have begun: without TORCH_NCCL_ENABLE_TIMING none of them seems to."""

    def _same_life(self, key: str) -> bool:
        """Whether the numbers of a group mean the same on all ranks; those of ranks that are in an earlier one go."""
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
        """A counter that no entry confirms may be one of messages: no collective is over before all have entered it."""
        talked = {message.group for flight in self.flights.values() for message in flight.messages}
        for key, having in self.having.items():
            shown = [group.entered for group in having.values() if not group.counted]
            for rank, group in having.items():
                if group.counted and (key in talked or (shown and group.completed > min(shown))):
                    having[rank] = Group(group.ranks, 0, 0, group.description, group.on_gpu)

    def _members_of(self, key: str, known: set[int]) -> tuple[int, ...]:
        """As its ranks were told; else all that have it, and the whole world for the group that is the world's."""
        having = self.having[key]
        told = max((group.ranks for group in having.values()), key=len, default=())
        if told:
            return tuple(rank for rank in told if rank in known)
        if key == "0" or any(group.description == "default_pg" for group in having.values()):
            return self.world
        return tuple(sorted(having))

    def entered(self, key: str, rank: int) -> int:
        group = self.having[key].get(rank)
        return group.entered if group else 0

    def completed(self, key: str, rank: int) -> int:
        group = self.having[key].get(rank)
        return group.completed if group else 0


def _by_number(records: Records) -> Numbers:
    """Entries by group, number and rank; several of one number and rank (coalesced calls) cannot be told apart."""
    found: dict[str, dict[int, dict[int, Entry]]] = {}
    for rank, flight in records.flights.items():
        often = Counter((entry.group, entry.sequence) for entry in flight.entries)
        for entry in flight.entries:
            if often[entry.group, entry.sequence] == 1 and (entry.group, rank) not in records.outdated:
                found.setdefault(entry.group, {}).setdefault(entry.sequence, {})[rank] = entry
    return found


def stalls(records: Records) -> list[Stall]:
    """One for each group in which somebody waits."""
    return [stall for key in records.members if (stall := _stall(records, key)) is not None]


def _stall(records: Records, key: str) -> Stall | None:
    members = [rank for rank in records.members[key] if rank in records.flights]
    stuck = [records.completed(key, rank) + 1 for rank in members if _inside(records, key, rank)]
    if not stuck:
        return None
    first = min(stuck)
    if key in records.doubtful:
        return _doubted(records, key, first)
    entries = records.numbers.get(key, {}).get(first, {})
    inside = [rank for rank in members if records.entered(key, rank) >= first > records.completed(key, rank)]
    late = [rank for rank in members if records.entered(key, rank) < first]
    # On a GPU a collective may be queued behind work that never ends, while its peers' have begun.
    begun = any(rank in entries and entries[rank].state == STARTED for rank in inside)
    begun = begun or (records.timed and any(records.completed(key, rank) >= first for rank in members))
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


def _doubted(records: Records, key: str, first: int) -> Stall:
    """Nobody is known to miss it, and anybody may."""
    inside = tuple(rank for rank in records.members[key] if rank in records.flights and _inside(records, key, rank))
    return Stall(
        group=key, sequence=first, inside=inside, late=(), queued=(), silent=(), unknown=(), entry=None, doubtful=True
    )


def _inside(records: Records, key: str, rank: int) -> bool:
    return records.entered(key, rank) > records.completed(key, rank)
