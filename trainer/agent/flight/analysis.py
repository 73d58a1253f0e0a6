"""Compares all ranks' flight records to find absent ranks, stopped GPUs and desyncs.
Pure functions. The wait graph (`waits`) leads from every waiting rank to the unexplained ranks (`roots`), and all roots
are named. If the records are inconclusive, the finding reports that and names no rank.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Literal

from trainer.agent.flight.flight_record import SCHEDULED, CollectiveEntry, FlightRecord
from trainer.agent.flight.wait_graph import (
    BlockingRank,
    Finding,
    Kind,
    MessageChannel,
    Node,
    RankPlace,
    Records,
    Stall,
    WaitGraph,
    build,
    chain,
    find_reachable,
    ranks_text,
    stalls,
    wait_word,
)

RootKind = Literal["never_came", "no_answer", "gpu_stopped", "queued"]

WaitRoots = dict[Node, RootKind]

_SYNCHRONIZING = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "barrier")
"""Operations that complete on no rank before every rank has begun them, unlike broadcasts and uneven all_to_alls."""


def gpu_roots(records: Records, waits: WaitGraph) -> WaitRoots:
    """Return ranks whose GPUs stopped: they called as many operations as their peers but completed or began fewer."""
    stopped: dict[int, RootKind] = {}
    for node, place in enumerate(waits.places):
        if isinstance(place, Stall):
            for rank in _lagging(records, place):
                stopped[rank] = "gpu_stopped"
            for rank in place.queued:
                # Earlier operations may block it. If there are none and the record is complete, the GPU is at fault.
                if waits.calls[rank][0] == node and records.flights[rank].whole:
                    stopped.setdefault(rank, "queued")
    return {waits.gpu(rank, waits.calls.get(rank, ())): stopped[rank] for rank in sorted(stopped)}


def _lagging(records: Records, stall: Stall) -> Iterator[int]:
    """Yield members that have completed fewer operations than they could have.
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
        if group is None or not (group.on_gpu and group.sure and group.is_unfinished):
            continue
        first = group.completed + 1
        entry = numbers.get(first, {}).get(rank)
        # It has not begun a collective that others have completed.
        unbegun = records.timed and entry is not None and entry.state == SCHEDULED
        if first < last <= group.entered or (unbegun and first == last):
            yield rank


def _last_synchronizing(numbers: Mapping[int, Mapping[int, CollectiveEntry]], first: int, through: int) -> int:
    """Return the newest synchronizing collective in the range, or 0 if none is known."""
    for number in range(through, first - 1, -1):
        entries = numbers.get(number, {})
        if any(entry.op.lstrip("_").startswith(_SYNCHRONIZING) for entry in entries.values()):
            return number
    return 0


def host_roots(records: Records, waits: WaitGraph) -> WaitRoots:
    """Return ranks that others wait for but that wait for nothing themselves, and ranks that did not answer."""
    found: WaitRoots = {}
    for rank, node in waits.hosts.items():
        if rank in records.silent:
            found[node] = "no_answer"
        elif not waits.after[node]:
            found[node] = "never_came"
    return found


def last_resort(waits: WaitGraph, explained: Collection[Node]) -> WaitRoots:
    """Return the rank in a ring of waiting ranks that waits only for messages.
    Receiving early is normal and blocks no other rank, but a rank that has not called a collective in which its
    peers wait is behind. Such a rank is named only if no other in its ring is behind.
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
    if not isinstance(place, RankPlace):
        return False
    called = [waits.places[other] for other in waits.calls.get(place.rank, ())]
    return all(isinstance(one, MessageChannel) and one.target == place.rank for one in called)


def _sinks(waits: WaitGraph, nodes: Collection[Node]) -> list[set[Node]]:
    """Return the strongly connected components of `nodes` without outgoing edges. No edge may leave `nodes`."""
    before, left, found = waits.before(), dict.fromkeys(nodes), []
    while left:
        node = next(iter(left))
        while True:
            ahead, behind = find_reachable(waits.after, [node]), find_reachable(before, [node])
            further = [other for other in ahead if other not in behind]
            if not further:
                break
            node = further[-1]
        found.append(set(ahead))
        left = {other: None for other in left if other not in behind}
    return found


_COMPARED: Mapping[Kind, Callable[[CollectiveEntry], object]] = {
    "desync_order": lambda entry: entry.op,
    "desync_shape": lambda entry: entry.shape,
}
_WAYS = 4
"""Maximum number of variants of a collective listed in a reason."""


def desync(records: Records) -> Finding | None:
    """Return the first collective that ranks entered differently, ignoring long-completed ones, or None."""
    for key, by_sequence in records.numbers.items():
        if key in records.doubtful:
            continue
        over = min(group.completed for group in records.having[key].values())
        for sequence in sorted(by_sequence):
            entries = by_sequence[sequence]
            if sequence < over or len(entries) < 2:
                continue
            for kind, part in _COMPARED.items():
                if len({part(entry) for entry in entries.values()}) > 1:
                    entered_as = {rank: (part(entry), str(entry)) for rank, entry in entries.items()}
                    return _differing(records, key, sequence, kind, entered_as)
    return None


def _differing(
    records: Records, key: str, sequence: int, kind: Kind, entered_as: Mapping[int, tuple[object, str]]
) -> Finding:
    counts = Counter(what for what, _ in entered_as.values())
    most = max(counts.values())
    usual: list[object] = [what for what, count in counts.items() if count == most]
    certain = len(usual) == 1
    if not certain:  # tied: the wrong entry is the one without precedent in its rank's record
        usual = _usual(records, key, sequence, entered_as, usual)
    culprits = tuple(sorted(rank for rank, (what, _) in entered_as.items() if what not in usual))
    if not culprits:
        culprits, doubt = tuple(sorted(entered_as)), "; the records do not show which of them is wrong"
    else:
        doubt = "" if certain else "; the others have made such calls before"
    ways = "; ".join(
        f"{ranks_text(sorted(rank for rank, (other, _) in entered_as.items() if other == what))} entered "
        f"{next(text for other, text in entered_as.values() if other == what)}"
        for what, _ in counts.most_common(_WAYS)
    )
    if len(counts) > _WAYS:
        ways += f"; and {len(counts) - _WAYS:,} more variants"
    reason = f"collective #{sequence} of group {key} differs between ranks: {ways}{doubt}"
    named = () if len(culprits) == len(entered_as) else culprits
    return Finding(
        kind=kind,
        ranks=culprits,
        group=key,
        sequence=sequence,
        reason=reason,
        culprits=tuple(
            BlockingRank(rank=rank, kind="desync", group=key, sequence=sequence, reason=reason) for rank in named
        ),
    )


def _usual(
    records: Records, key: str, sequence: int, entered_as: Mapping[int, tuple[object, str]], ways: Sequence[object]
) -> list[object]:
    """Return the variants of a collective that occur earlier in some rank's own record, or all of them if none does."""
    # A rank that skipped a call goes on to make its peer's later calls, so either rank may be wrong.
    if _is_shifted(records, key, sequence, entered_as):
        return list(ways)
    often = dict.fromkeys(ways, 0)
    for rank, (what, text) in entered_as.items():
        before = [e for e in records.flights[rank].entries if e.group == key and e.sequence < sequence]
        often[what] = max(often.get(what, 0), sum(str(entry) == text for entry in before))
    # The counts prove nothing; only a call without precedent is evidence.
    return [what for what, count in often.items() if count] or list(often)


def _is_shifted(records: Records, key: str, sequence: int, entered_as: Mapping[int, tuple[object, str]]) -> bool:
    """Return whether one rank's calls from this one on match another rank's calls shifted by one."""
    calls = {
        tuple(
            str(entry) for entry in records.flights[rank].entries if entry.group == key and entry.sequence >= sequence
        )
        for rank in entered_as
    }
    if len(calls) > _WAYS:
        return False
    for behind, ahead in permutations(calls, 2):
        length = min(len(behind), len(ahead) - 1)
        if length > 0 and behind[0] != ahead[0] and behind[:length] == ahead[1 : 1 + length]:
            return True
    return False


def find_crossed_groups(stalls: Sequence[Stall]) -> Finding | None:
    """Return the desync of ranks that wait for each other in two groups, having entered these in different orders."""
    missed = [stall for stall in stalls if stall.missing]
    inside: dict[int, list[Stall]] = {}
    for stall in missed:
        for rank in stall.inside:
            inside.setdefault(rank, []).append(stall)
    for stall in missed:
        # A stall crossed with this one has all its missing ranks inside, so checking the first is enough.
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
                    "they entered the collectives of two groups in different orders",
                )
    return None


_FRONTS = 3
"""Maximum number of stuck operations listed in a reason."""


def analyse(
    flights: Iterable[FlightRecord], expected_ranks: Iterable[int], unanswered: Iterable[int] = (),
    never_sent: Iterable[int] = (),
) -> Finding:  # fmt: skip
    """Compare flight records, paired by group and sequence number; `unanswered` ranks were queried but did not answer.
    `never_sent` ranks are known to have omitted a message that another rank waits for.
    """
    records = Records(flights, expected_ranks, unanswered)
    # A mismatched collective never completes, which explains everything else.
    if (differing := desync(records)) is not None:
        return differing
    stalled = stalls(records)
    waits = build(records, stalled)
    if not waits.places:
        return _nothing(records)
    found = gpu_roots(records, waits) | host_roots(records, waits)
    # An omitted message holds everything up, even if its sender now waits for something else.
    found |= {waits.hosts[rank]: "never_came" for rank in never_sent if rank in waits.hosts}
    explained = waits.reaching(found)
    # Unless another rank delays them, ranks waiting for each other in two groups entered these in different orders.
    rest = [place for node, place in enumerate(waits.places) if isinstance(place, Stall) and node not in explained]
    if (mutual := find_crossed_groups(rest)) is not None:
        return mutual
    if more := last_resort(waits, explained):
        found |= more
        explained = waits.reaching(found)
    if found:
        return _merge_culprits(waits, found, chain(waits, explained))
    # All ranks have reached these operations, which wait for nothing else.
    return _together(stalled, [place for place, after in zip(waits.places, waits.after, strict=True) if not after])


def _merge_culprits(waits: WaitGraph, found: WaitRoots, longest: str) -> Finding:
    """Return the finding on all culprits, merged by kind and collective, with the most awaited rank first."""
    by_cause: dict[tuple[RootKind, Node], list[int]] = {}
    waiting = waits.before()
    for root, kind in found.items():
        by_cause.setdefault((kind, _stall_origin(waits, waiting[root], found)), []).append(waits.inside(root)[0])
    culprits, reasons = [], []
    # Absent ranks are the clearest case; among equals, the wave-front nearest to its root comes first.
    for (kind, node), ranks in sorted(by_cause.items(), key=lambda item: (item[0][0] == "gpu_stopped", min(item[1]))):
        reason = _reason(waits, kind, node, tuple(sorted(ranks)))
        reasons.append(reason)
        place = waits.places[node]
        sequence = place.sequence if isinstance(place, Stall) else 0
        group = place.group if isinstance(place, Stall | MessageChannel) else ""
        culprits += [
            BlockingRank(rank=rank, kind=kind, group=group, sequence=sequence, reason=reason) for rank in sorted(ranks)
        ]
    whole: Kind = "gpu_stopped" if all(one.kind == "gpu_stopped" for one in culprits) else "missing"
    return Finding(
        kind=whole,
        ranks=tuple(sorted(one.rank for one in culprits)),
        group=culprits[0].group,
        sequence=culprits[0].sequence,
        reason="; ".join(reasons),
        queued=all(one.on_gpu for one in culprits),
        culprits=tuple(culprits),
        chain=longest,
    )


def _stall_origin(waits: WaitGraph, waiting: Sequence[Node], found: WaitRoots) -> Node:
    """Return where a root's stall began: in the smallest group whose missing ranks are all roots.
    Ranks in other groups may only be waiting for that group: tensor parallel precedes data parallel.
    """

    def priority(node: Node) -> tuple[bool, bool, int]:
        place = waits.places[node]
        if not isinstance(place, Stall):
            return (False, False, 0)
        missing = {waits.hosts[rank] for rank in (*place.late, *place.silent)}
        return (True, missing <= found.keys(), -len(place.inside))

    return max(waiting, key=priority)


def _reason(waits: WaitGraph, kind: RootKind, node: Node, ranks: Sequence[int]) -> str:
    place, who = waits.places[node], ranks_text(ranks)
    if not isinstance(place, Stall):
        others = tuple(rank for rank in waits.inside(node) if rank not in ranks)
        sends = isinstance(place, MessageChannel) and place.what and tuple(ranks) == (place.source,)
        sent = "never sent" if sends else "never called"
        how = "did not answer, and" if kind == "no_answer" else sent
        return f"{who} {how} {place}, for which {ranks_text(others)} {wait_word(others)}"
    others = tuple(rank for rank in waits.inside(node) if rank not in ranks)
    inside = f"in which {ranks_text(others)} {wait_word(others)}"
    match kind:
        case "no_answer":
            return f"{who} did not answer, and all others have entered {place}, {inside}"
        case "queued":
            return f"{who} did not begin {place}: it is queued behind other work on the GPU, {inside}"
        case "gpu_stopped":
            return (
                f"{who} called {place} but did not complete it, although peers have completed later ones: GPU stopped"
            )
    return f"{who} never entered {place}, {inside}"


def _together(stalled: Sequence[Stall], stuck: Sequence[object]) -> Finding:
    """Return a finding without a culprit: all ranks have joined but make no progress, or they wait in a ring."""
    places = [place for place in stuck if isinstance(place, Stall)] or [s for s in stalled if not s.missing]
    if not places and not stalled:
        return _lost_message([place for place in stuck if isinstance(place, MessageChannel)])
    stall = max(places or stalled, key=lambda stall: len(stall.inside))
    ranks = tuple(sorted({rank for place in places or [stall] for rank in place.inside}))
    rest = "no rank is missing, but it does not complete" if places else "the missing ranks wait for others themselves"
    if stall.doubtful:
        rest = "the group was created again under the same name, and the records do not show which rank is missing"
    if len(places) > 1:
        rest += f"; likewise in {len(places) - 1:,} more group(s)"
    return Finding(
        kind="stuck_together",
        ranks=ranks,
        group=stall.group,
        sequence=stall.sequence,
        reason=f"{ranks_text(stall.inside)} {wait_word(stall.inside)} inside {stall}; {rest}",
    )


def _lost_message(channels: Sequence[MessageChannel]) -> Finding:
    if not channels:
        return Finding(kind="none", reason="no rank waits inside a collective")
    ranks = tuple(sorted({rank for one in channels for rank in (one.source, one.target)}))
    names = "; ".join(map(str, channels[:_FRONTS]))
    return Finding(
        kind="stuck_together",
        ranks=ranks,
        group=channels[0].group,
        reason=f"both ends have called {names}, but it does not complete: suspect the link between them, or either GPU",
    )


def _nothing(records: Records) -> Finding:
    silent = f"; {ranks_text(sorted(records.silent))} did not answer" if records.silent else ""
    return Finding(kind="none", reason=f"no rank waits inside a collective{silent}", idle=not records.silent)
