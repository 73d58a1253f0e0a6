"""Ranks that called different collectives: another operation, another shape, or groups in another order."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations

from trainer.agent.flight.finding import Culprit, Finding, Kind, ranks_text
from trainer.agent.flight.stalls import Records, Stall

_WAYS = 4
"""Ways to enter a collective that are told one by one."""


def desync(records: Records) -> Finding | None:
    """The first collective that ranks entered differently, of those that are not long over."""
    for key, by_sequence in records.numbers.items():
        if key in records.doubtful:
            continue
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
    return None


def _differing(
    records: Records, key: str, sequence: int, kind: Kind, told: Mapping[int, tuple[object, str]]
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
        f"{ranks_text(sorted(rank for rank, (other, _) in told.items() if other == what))} entered "
        f"{next(text for other, text in told.values() if other == what)}"
        for what, _ in counts.most_common(_WAYS)
    )
    if len(counts) > _WAYS:
        ways += f"; and {len(counts) - _WAYS:,} more ways"
    reason = f"collective #{sequence} of group {key} differs between ranks: {ways}{doubt}"
    named = () if len(culprits) == len(told) else culprits
    return Finding(
        kind=kind,
        ranks=culprits,
        group=key,
        sequence=sequence,
        reason=reason,
        culprits=tuple(
            Culprit(rank=rank, kind="desync", group=key, sequence=sequence, reason=reason) for rank in named
        ),
    )


def _usual(
    records: Records, key: str, sequence: int, told: Mapping[int, tuple[object, str]], ways: Sequence[object]
) -> list[object]:
    """Of the ways in which ranks entered a collective, those that some rank's own record holds before it; else all."""
    # One that skipped a call goes on with the calls that its peer makes later: either may be the one that is wrong.
    if _is_shifted(records, key, sequence, told):
        return list(ways)
    often = dict.fromkeys(ways, 0)
    for rank, (what, text) in told.items():
        before = [e for e in records.flights[rank].entries if e.group == key and e.sequence < sequence]
        often[what] = max(often.get(what, 0), sum(str(entry) == text for entry in before))
    # How often proves nothing: only what was never done before stands out.
    return [what for what, count in often.items() if count] or list(often)


def _is_shifted(records: Records, key: str, sequence: int, told: Mapping[int, tuple[object, str]]) -> bool:
    """Whether what one rank calls from here on is what another one calls one later."""
    calls = {
        tuple(
            str(entry) for entry in records.flights[rank].entries if entry.group == key and entry.sequence >= sequence
        )
        for rank in told
    }
    if len(calls) > _WAYS:
        return False
    for behind, ahead in permutations(calls, 2):
        length = min(len(behind), len(ahead) - 1)
        if length > 0 and behind[0] != ahead[0] and behind[:length] == ahead[1 : 1 + length]:
            return True
    return False


def crossed(stalls: Sequence[Stall]) -> Finding | None:
    """Ranks that wait for each other in different groups: they entered the groups' collectives in different orders."""
    missed = [stall for stall in stalls if stall.missing]
    inside: dict[int, list[Stall]] = {}
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
                    reason=f"{ranks_text(sorted(there))} wait in {stall} and {ranks_text(sorted(here))} in {other}: "
                    "they went into two groups' collectives in different orders",
                )
    return None
