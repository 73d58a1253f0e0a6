"""Unfinished sends and receives between two ranks, from a rank's flight recorder."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.agent.flight.dump_fields import group_name, word

_PEERS = re.compile(r"(send|recv)\s+(\d+)\s*(->|<-)\s*(\d+)\Z")
_WORLD = 1_000_000
"""Maximum number of ranks in a world."""
_MOST = 200
"""Oldest unfinished messages kept per rank; later ones wait behind these."""


@dataclass(frozen=True, slots=True)
class P2PMessage:
    """Unfinished send or receive. Each rank numbers its own messages, so numbers cannot pair them."""

    group: str
    source: int  # global rank; -1: unknown
    target: int
    order: int  # position in its rank's record
    sends: bool
    what: str = ""  # description, if known

    @property
    def channel(self) -> tuple[str, int, int]:
        """Return the channel; its messages are received in the order they were sent."""
        return self.group, self.source, self.target


def find_unfinished_messages(
    raw: Iterable[Mapping[str, Any]], done: Iterable[bool], members: Mapping[str, Sequence[int]], suffix: str = ""
) -> tuple[P2PMessage, ...]:
    """Return a dump's unfinished messages in order.
    `members` has the ranks of each group in the group's order. torch never marks the parts of a batch
    (`batch_isend_irecv`) as done; the "coalesced" entry after them is marked.
    """
    rows = [(at, entry, over) for at, (entry, over) in enumerate(zip(raw, done, strict=True))]
    batches = {
        (group_name(entry), entry.get("p2p_seq_id")): over
        for _, entry, over in rows
        if str(entry.get("profiling_name", "")).endswith(":coalesced")
    }
    found: list[P2PMessage] = []
    for at, entry, over in rows:
        text = word(entry.get("profiling_name", "")).partition(":")[2]
        if not entry.get("is_p2p") or text == "coalesced":
            continue
        if over or batches.get((group_name(entry), entry.get("p2p_seq_id")), False):
            continue
        found.append(_message(f"{group_name(entry)}{suffix}", text, _members(entry, members), at))
    return tuple(found[:_MOST])


def _message(group: str, text: str, members: Sequence[int], order: int) -> P2PMessage:
    told = _PEERS.search(text)
    if told is None:
        return P2PMessage(group, -1, -1, order, text.startswith("send"))
    sends = told[1] == "send"
    own, peer = _rank(int(told[2]), members), _rank(int(told[4]), members)
    return P2PMessage(group, own if sends else peer, peer if sends else own, order, sends)


def _members(entry: Mapping[str, Any], members: Mapping[str, Sequence[int]]) -> Sequence[int]:
    """Return the ranks of the entry's group; in the default group, position equals rank."""
    known = members.get(group_name(entry), ())
    return known if known or "default_pg" not in (entry.get("process_group") or ()) else range(_WORLD)


def _rank(place: int, members: Sequence[int]) -> int:
    """Return the global rank at a position in a group; torch identifies peers by position."""
    return members[place] if place < len(members) else -1
