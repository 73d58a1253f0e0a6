"""What the flight records of all ranks say together: who never came, who did something else, where nobody gets on."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.agent.flight.record import ON_HOST, SCHEDULED, STARTED, Entry, Flight, Group, parse

__all__ = ["Finding", "Flight", "analyse", "parse"]

Kind = Literal["none", "missing", "desync_shape", "desync_order", "stuck_together"]
_NAMED = 8
"""Ranks named one by one in a reason."""
_WAYS = 4
"""Ways to enter a collective that are told one by one."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the records say. `ranks` are the culprits; for `stuck_together` those that are inside and do not get on."""

    kind: Kind
    ranks: tuple[int, ...] = ()
    group: str = ""
    sequence: int = 0
    reason: str
    queued: bool = False  # the culprits have called it, and their GPUs have not come to it

    @property
    def on_host(self) -> bool:
        """Whether it is a collective of host memory in a job that has GPUs."""
        return self.group.endswith(ON_HOST)


@dataclass(frozen=True, kw_only=True)
class _Stall:
    """The first unfinished collective of one group."""

    group: str
    sequence: int
    inside: tuple[int, ...]  # entered it, and are not through
    missing: tuple[int, ...]  # never entered it, or did not answer
    entry: Entry | None  # as one of those inside sees it

    def __str__(self) -> str:
        return f"collective #{self.sequence} of group {self.group}" + (f" ({self.entry})" if self.entry else "")


class _Records:
    """The flights by rank, and each group's members."""

    def __init__(self, flights: Iterable[Flight], expected: Iterable[int], unanswered: Iterable[int]) -> None:
        self.flights = {flight.rank: flight for flight in flights}
        self.silent = set(unanswered) - set(self.flights)
        self.world = tuple(sorted({*expected, *self.flights}))
        self.having: dict[str, dict[int, Group]] = {}  # each group as its ranks know it
        for rank, flight in self.flights.items():
            for key, group in flight.groups.items():
                self.having.setdefault(key, {})[rank] = group
        known = set(self.world)
        self.members = {key: self._members_of(key, known) for key in self.having}

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


def analyse(flights: Iterable[Flight], expected_ranks: Iterable[int], unanswered: Iterable[int] = ()) -> Finding:
    """Pair the records by group and number of the collective; `unanswered` ranks gave none though they were asked."""
    records = _Records(flights, expected_ranks, unanswered)
    numbers = _by_number(records)
    stalls = [stall for key in records.members if (stall := _stall(records, key, numbers))]
    # A collective that the ranks mean differently never ends well: nothing else needs an explanation.
    if (desync := _desync(records, numbers, stalls)) is not None:
        return desync
    if not stalls:
        return _nothing(records)
    if (absent := _missing(records, stalls)) is not None:
        return absent
    return _together(stalls)


def _by_number(records: _Records) -> dict[str, dict[int, dict[int, Entry]]]:
    """Entries by group, number and rank; several of one number and rank (coalesced calls) cannot be told apart."""
    found: dict[str, dict[int, dict[int, Entry]]] = {}
    for rank, flight in records.flights.items():
        often = Counter((entry.group, entry.sequence) for entry in flight.entries)
        for entry in flight.entries:
            if often[entry.group, entry.sequence] == 1:
                found.setdefault(entry.group, {}).setdefault(entry.sequence, {})[rank] = entry
    return found


def _stall(records: _Records, key: str, numbers: Mapping[str, Mapping[int, Mapping[int, Entry]]]) -> _Stall | None:
    members = [rank for rank in records.members[key] if rank in records.flights]
    stuck = [records.completed(key, rank) + 1 for rank in members if _inside(records, key, rank)]
    if not stuck:
        return None
    first = min(stuck)
    entries = numbers.get(key, {}).get(first, {})
    inside = [rank for rank in members if records.entered(key, rank) >= first > records.completed(key, rank)]
    late = [rank for rank in members if records.entered(key, rank) < first]
    # On a GPU a collective may be queued behind work that never ends, while its peers' have begun.
    begun = {rank for rank in inside if rank in entries and entries[rank].state == STARTED}
    queued = [rank for rank in inside if begun and rank in entries and entries[rank].state == SCHEDULED]
    silent = [rank for rank in records.members[key] if rank in records.silent]
    missing = (late or queued) + silent
    out = set(missing)
    return _Stall(
        group=key,
        sequence=first,
        inside=tuple(rank for rank in inside if rank not in out),
        missing=tuple(missing),
        entry=next((entries[rank] for rank in inside if rank in entries), None),
    )


def _inside(records: _Records, key: str, rank: int) -> bool:
    return records.entered(key, rank) > records.completed(key, rank)


def _desync(
    records: _Records, numbers: Mapping[str, Mapping[int, Mapping[int, Entry]]], stalls: Sequence[_Stall]
) -> Finding | None:
    """The first collective that ranks entered differently, of those that are not long over."""
    for key, by_sequence in numbers.items():
        over = min(group.completed for group in records.having[key].values())
        for sequence in sorted(by_sequence):
            entries = by_sequence[sequence]
            if sequence < over or len(entries) < 2:
                continue
            if len({entry.op for entry in entries.values()}) > 1:
                told = {rank: (entry.op, str(entry)) for rank, entry in entries.items()}
                return _differing(records, key, sequence, "desync_order", told)
            if len({entry.shape for entry in entries.values()}) > 1:
                shapes = {rank: (entry.shape, str(entry)) for rank, entry in entries.items()}
                return _differing(records, key, sequence, "desync_shape", shapes)
    return _crossed(records, stalls)


def _differing(
    records: _Records, key: str, sequence: int, kind: Kind, told: Mapping[int, tuple[object, str]]
) -> Finding:
    counts = Counter(what for what, _ in told.values())
    most = max(counts.values())
    usual: list[object] = [what for what, count in counts.items() if count == most]
    certain = len(usual) == 1
    if not certain:  # as many against as many: what a rank has never done before is what is wrong
        usual = _usual(records, key, sequence, told, usual)
    culprits = tuple(sorted(rank for rank, (what, _) in told.items() if what not in usual))
    if not culprits:
        culprits, doubt = tuple(sorted(told)), "; which of them is wrong the records do not tell"
    else:
        doubt = "" if certain else "; the others have done the like before"
    ways = "; ".join(
        f"{_ranks(sorted(rank for rank, (other, _) in told.items() if other == what))} entered "
        f"{next(text for other, text in told.values() if other == what)}"
        for what, _ in counts.most_common(_WAYS)
    )
    if len(counts) > _WAYS:
        ways += f"; and {len(counts) - _WAYS:,} more ways"
    return Finding(
        kind=kind,
        ranks=culprits,
        group=key,
        sequence=sequence,
        reason=f"collective #{sequence} of group {key} differs between ranks: {ways}{doubt}",
    )


def _usual(
    records: _Records, key: str, sequence: int, told: Mapping[int, tuple[object, str]], ways: Sequence[object]
) -> list[object]:
    """Of the ways in which ranks entered a collective, those that their own records hold most often before it."""
    often = dict.fromkeys(ways, 0)
    for rank, (what, text) in told.items():
        before = [e for e in records.flights[rank].entries if e.group == key and e.sequence < sequence]
        often[what] = max(often.get(what, 0), sum(str(entry) == text for entry in before))
    most = max(often.values())
    return [what for what, count in often.items() if count == most]


def _crossed(records: _Records, stalls: Sequence[_Stall]) -> Finding | None:
    """Ranks that wait for each other in different groups: they entered the groups' collectives in different orders."""
    missed = [stall for stall in stalls if stall.missing]
    inside: dict[int, list[_Stall]] = {}
    for stall in missed:
        for rank in stall.inside:
            inside.setdefault(rank, []).append(stall)
    for stall in missed:
        # Whoever is crossed with this one holds all that it misses, the first of them included.
        for other in inside.get(stall.missing[0], ()):
            here, there = set(stall.missing) & set(other.inside), set(other.missing) & set(stall.inside)
            if there and len(here) == len(stall.missing):
                fewer = here if (len(here), min(here)) <= (len(there), min(there)) else there
                return Finding(
                    kind="desync_order",
                    ranks=tuple(sorted(fewer)),
                    group=stall.group,
                    sequence=stall.sequence,
                    reason=f"{_ranks(sorted(there))} wait in {stall} and {_ranks(sorted(here))} in {other}: "
                    "they went into two groups' collectives in different orders",
                )
    return None


def _missing(records: _Records, stalls: Sequence[_Stall]) -> Finding | None:
    """The wave-front: those for whom others wait and who themselves wait nowhere."""
    waiting = {rank for stall in stalls for rank in stall.inside}
    waiting |= {rank for rank, flight in records.flights.items() if flight.talking}
    free = [(stall, tuple(rank for rank in stall.missing if rank not in waiting)) for stall in stalls]
    fronts = [(stall, ranks) for stall, ranks in free if ranks]
    if not fronts:
        return None
    # Where all that are missing wait nowhere, the stall began; in the other groups some only wait for that.
    # Of several such groups the smallest comes first in a step: tensor parallel before data parallel.
    stall, ranks = max(fronts, key=lambda front: (front[1] == front[0].missing, -len(front[0].inside)))
    return Finding(
        kind="missing",
        ranks=tuple(sorted(ranks)),
        group=stall.group,
        sequence=stall.sequence,
        queued=_is_queued(records, stall, ranks),
        reason=f"{_ranks(sorted(ranks))} {_how(records, stall, ranks)}, "
        f"in which {_ranks(stall.inside)} {_wait(stall.inside)}",
    )


def _is_queued(records: _Records, stall: _Stall, ranks: Sequence[int]) -> bool:
    return all(records.entered(stall.group, rank) >= stall.sequence for rank in ranks)


def _how(records: _Records, stall: _Stall, ranks: Sequence[int]) -> str:
    if all(rank in records.silent for rank in ranks):
        return f"did not answer, and all others have entered {stall}"
    if _is_queued(records, stall, ranks):
        return f"did not begin {stall}: it is queued behind other work on the GPU"
    return f"never entered {stall}"


def _together(stalls: Sequence[_Stall]) -> Finding:
    full = [stall for stall in stalls if not stall.missing]
    stall = max(full or stalls, key=lambda stall: len(stall.inside))
    rest = "nobody is missing, and it does not end" if full else "whom they miss waits for others in turn"
    return Finding(
        kind="stuck_together",
        ranks=stall.inside,
        group=stall.group,
        sequence=stall.sequence,
        reason=f"{_ranks(stall.inside)} {_wait(stall.inside)} inside {stall}; {rest}",
    )


def _nothing(records: _Records) -> Finding:
    silent = f"; {_ranks(sorted(records.silent))} did not answer" if records.silent else ""
    return Finding(kind="none", reason=f"no rank waits inside a collective{silent}")


def _wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 3", "ranks 1, 2 and 5", "1,023 ranks"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _NAMED:
        return f"{len(ranks):,} ranks"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" if ranks else "no rank"
