"""Content of one rank's flight recorder: its groups, unfinished messages and collectives.

The fields of torch's dumps are sanitized, because a dying process may have written garbage.
"""

import base64
import json
import math
import re
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, TypeVar, get_origin, get_type_hints

from trainer.protocol.messages.ranks import decode_runs, encode_runs

T = TypeVar("T")
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""Exceptions that reading a malformed record may raise."""
_LARGEST = 2**63 - 1
_LONGEST_WORD = 200
"""Maximum characters kept per word."""


def number(value: Any, otherwise: int = 0) -> int:
    """Return an integer within torch's range; `otherwise` for any other value."""
    try:
        found = int(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return found if -_LARGEST <= found <= _LARGEST else otherwise


def word(value: Any) -> str:
    """Return a value's text, truncated and interned, since thousands of entries share it."""
    return sys.intern((value if type(value) is str else str(value))[:_LONGEST_WORD])


def group_name(entry: Mapping[str, Any]) -> str:
    """Return the name of an entry's group, or its process-local number if it has no name."""
    names = entry.get("process_group")
    return word(names[0] if isinstance(names, list | tuple) and names else entry.get("pg_id", "?"))


_PEERS = re.compile(r"(send|recv)\s+(\d+)\s*(->|<-)\s*(\d+)\Z")
_WORLD = 1_000_000
"""Maximum number of ranks in a world."""
_MOST_MESSAGES = 200
"""Number of unfinished messages kept per rank, oldest first; later ones wait behind these."""


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
    `members` maps each group to its ranks, in the group's order. torch never marks the parts of a batch
    (`batch_isend_irecv`) as done; it marks the "coalesced" entry after them.
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
    return tuple(found[:_MOST_MESSAGES])


def _message(group: str, text: str, members: Sequence[int], order: int) -> P2PMessage:
    match = _PEERS.search(text)
    if match is None:
        return P2PMessage(group, -1, -1, order, text.startswith("send"))
    sends = match[1] == "send"
    # torch identifies peers by their position in the group.
    own, peer = (members[at] if at < len(members) else -1 for at in (int(match[2]), int(match[4])))
    return P2PMessage(group, own if sends else peer, peer if sends else own, order, sends)


def _members(entry: Mapping[str, Any], members: Mapping[str, Sequence[int]]) -> Sequence[int]:
    """Return the ranks of the entry's group; in the default group, position equals rank."""
    known = members.get(group_name(entry), ())
    return known if known or "default_pg" not in (entry.get("process_group") or ()) else range(_WORLD)


@dataclass(slots=True)
class _GroupLifetime:
    local: Any = None  # torch's number for the group in this process, unique per lifetime
    last: int = 0  # its newest collective
    before: int = 0  # earlier lifetimes that had collectives
    rows: list[int] = field(default_factory=list)


def newest_lifetimes(raw: Iterable[Mapping[str, Any]]) -> tuple[list[int], dict[str, int]]:
    """Return positions of a dump's entries in their groups' newest lifetimes, and counts of earlier lifetimes.
    The entries must be in recorded order. Only lifetimes with collectives still in the record are counted.
    """
    lives: dict[str, _GroupLifetime] = {}
    for at, one in enumerate(raw):
        life = lives.setdefault(group_name(one), _GroupLifetime(local=one.get("pg_id")))
        sequence = 0 if one.get("is_p2p") else number(one.get("collective_seq_id"))
        if one.get("pg_id") != life.local or 1 == sequence < life.last:
            life.before += life.last > 0
            life.local, life.last, life.rows = one.get("pg_id"), 0, []
        life.last = max(life.last, sequence)
        life.rows.append(at)
    return sorted(at for life in lives.values() for at in life.rows), {key: life.before for key, life in lives.items()}


def counters(dump: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return the last collective enqueued and the last one completed, by group name.
    Skips groups with messages, for which torch uses the same counter, and groups whose counter differs from their
    newest collective in the record. Empty for gloo, which counts failed collectives as completed.
    """
    status, config = dump.get("pg_status"), dump.get("pg_config")
    if not isinstance(status, Mapping) or not isinstance(config, Mapping):
        return {}
    if not (dump.get("nccl_version") or dump.get("comm_lib_version")):
        return {}
    entries = list(entries)
    talked = {group_name(entry) for entry in entries if entry.get("is_p2p") or entry.get("p2p_seq_id")}
    newest: dict[str, int] = {}
    for entry in entries:
        newest[group_name(entry)] = max(newest.get(group_name(entry), 0), number(entry.get("collective_seq_id"), -1))
    found = {}
    for local, name in _names(config, status, entries).items():
        counts = status[local]
        if name in talked or not isinstance(counts, Mapping):
            continue
        entered, completed = (
            number(counts.get("last_enqueued_collective"), -1),
            number(counts.get("last_completed_collective"), -1),
        )
        if 0 <= completed <= entered and newest.get(name, entered) == entered:
            found[name] = (entered, completed)
    return found


def _names(
    config: Mapping[str, Any], status: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]
) -> dict[str, str]:
    """Map local numbers to group names, paired through the entries or, if the names are ascending numbers, by order."""
    seen = {str(entry.get("pg_id")): group_name(entry) for entry in entries}
    known = {local: name for local, name in seen.items() if local in status}
    names = [word(value.get("name", key)) for key, value in config.items() if isinstance(value, Mapping)]
    if len(names) == len(status) and all(name.isdecimal() for name in [*names, *status]):
        paired = dict(zip(sorted(status, key=int), sorted(names, key=int), strict=True))
        if known.items() <= paired.items():
            return paired
    return known


KEPT = 30
"""Number of collectives kept per group, newest first."""
_LARGEST_RECORD = 1 << 22
"""Maximum bytes of a decompressed record."""
WIRE = 8000
"""Maximum bytes of one rank's record on the wire; longer records drop their oldest collectives."""
_FEWEST = 4
"""Number of a group's oldest unfinished collectives that are never dropped."""
_DIMENSIONS = 64
"""Maximum dimensions of a tensor."""
_LONGEST = 60
"""Maximum characters of a list of sizes; a longer list is replaced by its length and checksum."""

ON_HOST = " on the host"
"""Suffix of gloo's groups, which share their names with NCCL's."""

SCHEDULED, STARTED, DONE = "scheduled", "started", "done"
_ALIKE = ("all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "allgather", "reduce_scatter")
"""Operations in which all ranks contribute the same number of elements. Others, such as gather, may be uneven."""


@dataclass(frozen=True, slots=True)
class CollectiveEntry:
    """A collective as entered by one rank."""

    group: str
    sequence: int  # within its group, from 1; the same number means the same collective on every rank
    op: str
    sizes: str  # for display
    elements: int  # total over its inputs; -1 if ranks may differ
    dtypes: str
    state: str  # SCHEDULED, STARTED (only reported by NCCL with timing) or DONE
    order: int = 0  # position in its rank's record

    @property
    def shape(self) -> tuple[int, str]:
        """Return the part that must match on all ranks; sizes match if their products are equal."""
        return (self.elements, self.dtypes) if self.elements >= 0 else (-1, "")

    def __str__(self) -> str:
        return f"{self.op} of {self.sizes or 'nothing'}{' ' if self.dtypes else ''}{self.dtypes}"


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as seen by one of its ranks."""

    ranks: tuple[int, ...]  # empty: unknown
    entered: int  # last collective entered
    completed: int  # last collective completed, along with all before it
    description: str = ""
    on_gpu: bool = False  # an NCCL group
    sure: bool = False  # `completed` was read, not inferred from the start of the record
    counted: bool = False  # both numbers are NCCL's own counters; the record has no entries for them
    before: int = 0  # earlier groups with the same name in its record
    surely: bool = True  # `before` is exact: the record has lost nothing

    @property
    def is_unfinished(self) -> bool:
        """Return whether this rank has entered a collective that is not complete."""
        return self.entered > self.completed


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecord:
    """Flight record of one rank."""

    rank: int
    groups: dict[str, Group] = field(default_factory=dict)
    entries: tuple[CollectiveEntry, ...] = ()  # by group and sequence
    messages: tuple[P2PMessage, ...] = ()  # unfinished messages between two ranks, in order
    timed: bool = False  # it shows which calls have begun (TORCH_NCCL_ENABLE_TIMING)
    whole: bool = False  # it has a completed entry before every unfinished one, so no unfinished entry is lost

    def waits(self) -> set[str]:
        return {key for key, group in self.groups.items() if group.is_unfinished}

    def to_json(self) -> str:
        """Serialize for the wire, in at most `WIRE` bytes."""
        keep = KEPT
        while len(text := self._compress(keep)) > WIRE and keep:
            keep //= 2
        return text

    def _compress(self, keep: int) -> str:
        by_group: dict[str, list[CollectiveEntry]] = {}
        for entry in self.entries:
            by_group.setdefault(entry.group, []).append(entry)
        fields = {
            "rank": self.rank,
            "timed": self.timed,
            "whole": self.whole,
            "groups": {key: [encode_runs(group.ranks), *astuple(group)[1:]] for key, group in self.groups.items()},
            "messages": [astuple(message) for message in self.messages[: max(_FEWEST, 4 * keep)]],
            "entries": [astuple(one) for entries in by_group.values() for one in _select_newest(entries, keep)],
        }
        return base64.b85encode(zlib.compress(json.dumps(fields, separators=(",", ":")).encode())).decode()

    @classmethod
    def from_json(cls, text: str) -> "FlightRecord":
        """Parse the output of `to_json`. Raises ValueError for anything else."""
        try:
            inflater = zlib.decompressobj()
            fields = json.loads(inflater.decompress(base64.b85decode(text), _LARGEST_RECORD))
            if not inflater.eof:
                raise ValueError("it is cut off or too large")
            groups = [[decode_runs(ranks), *others] for ranks, *others in fields["groups"].values()]
            return cls(
                rank=int(fields["rank"]),
                timed=bool(fields["timed"]),
                whole=bool(fields["whole"]),
                groups=dict(zip(fields["groups"], _parse_rows(Group, groups), strict=True)),
                messages=_parse_rows(P2PMessage, fields["messages"]),
                entries=_parse_rows(CollectiveEntry, fields["entries"]),
            )
        except (zlib.error, *UNREADABLE) as error:
            raise ValueError(f"not a flight record: {error!r}") from error


def _parse_rows(kind: type[T], rows: Iterable[Sequence[Any]]) -> tuple[T, ...]:
    """Return dataclasses with these fields. Raises ValueError or TypeError if their number or a type is wrong.
    Rows are parsed by column, since a job has millions of them with few distinct words.
    """
    columns: list[Iterable[Any]] = list(zip(*rows, strict=True))
    if not columns:
        return ()
    types = [get_origin(hint) or hint for hint in get_type_hints(kind).values()]
    for type_, (at, column) in zip(types, enumerate(columns), strict=True):
        if set(map(type, column)) != {type_}:
            raise TypeError(f"expected {type_.__name__} in {list(column)!r:.60}")
        columns[at] = map(sys.intern, column) if type_ is str else column
    return tuple(map(kind, *columns))


def read(
    rank: int, host: Any, device: Any | None, groups: Mapping[str, Mapping[str, Any]] | None = None
) -> FlightRecord:
    """Merge the records of a rank's two recorders: NCCL's (`device`), if any, and gloo's (`host`).
    Each recorder numbers the collectives of the same groups independently. Raises ValueError if `host` is not a dump.
    """
    if device is None:
        return parse(rank, host, groups)
    first, second = parse(rank, device, groups), parse(rank, host, groups, suffix=ON_HOST)
    used = {entry.group for entry in second.entries}
    return FlightRecord(
        rank=rank,
        groups={**first.groups, **{key: group for key, group in second.groups.items() if key in used}},
        entries=first.entries + second.entries,
        messages=first.messages + second.messages,
        timed=first.timed,
        whole=first.whole,
    )


def newest(dump: bytes, most: int) -> bytes:
    """Return a torch dump reduced to its newest entries, at most `most` bytes; other data is truncated."""
    try:
        record = json.loads(dump)
        entries = list(record.get("entries", []))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return json.dumps(dump[-most // 8 :].decode(errors="replace")).encode()
    while len(dump) > most and entries:
        entries = entries[len(entries) // 2 + 1 :]
        dump = json.dumps({**record, "entries": entries}).encode()
    return dump


def parse(
    rank: int, dump: Any, groups: Mapping[str, Mapping[str, Any]] | None = None, *, suffix: str = ""
) -> FlightRecord:
    """Parse a dump of torch's flight recorder (format 2.x), ignoring unknown and missing parts.
    `dump` is its text or parsed content. `groups` is the rank's own report of its groups
    (`trainer.protocol.messages.ranks`), needed because gloo's dumps name no groups. `suffix` is appended to
    all group names. Raises ValueError if it is not a dump.
    """
    dump = json.loads(dump) if isinstance(dump, (str, bytes)) else dump
    if not isinstance(dump, dict) or not isinstance(dump.get("entries", []), list):
        raise ValueError("not a flight record: no entries")
    whole = [entry for entry in dump.get("entries", []) if isinstance(entry, dict)]
    places, before = newest_lifetimes(whole)
    raw = [whole[at] for at in places]
    dying = _dying(dump, whole)
    states = [dying.get(id(one)) or _state(one) for one in raw]
    entries = [entry for at, one in enumerate(raw) if (entry := _entry(one, states[at], suffix, at)) is not None]
    config, more = _parse_group_config(dump.get("pg_config")), _parse_group_config(groups)
    configured = {f"{key}{suffix}": value for key, value in {**config, **more}.items() if key}
    members = {key: ranks for key, (ranks, _) in {**more, **config}.items()}
    exact = {f"{key}{suffix}": value for key, value in counters(dump, raw).items()}
    by_group: dict[str, list[CollectiveEntry]] = {}
    for entry in entries:
        by_group.setdefault(entry.group, []).append(entry)
    on_gpu = {e.group for e in entries if str(raw[e.order].get("profiling_name", "")).startswith("nccl:")} | set(exact)
    first = not whole or not number(whole[0].get("record_id"))
    found = {
        key: replace(
            _group(by_group.get(key, []), configured.get(key), exact.get(key), on_gpu=key in on_gpu),
            before=before.get(key.removesuffix(suffix), 0),
            surely=bool(whole) and first,
        )
        for key in {**by_group, **configured}
    }
    return FlightRecord(
        rank=rank,
        groups=found,
        entries=tuple(entry for key in found for entry in _select_newest(by_group.get(key, []), KEPT)),
        messages=find_unfinished_messages(raw, [state == DONE for state in states], members, suffix),
        timed=any(one.get("state") == "started" or one.get("time_discovered_started_ns") for one in raw),
        whole=bool(whole) and (first or (dying.get(id(whole[0])) or _state(whole[0])) == DONE),
    )


def _dying(dump: dict[str, Any], raw: list[dict[str, Any]]) -> dict[int, str]:
    """Return the states of gloo's collectives on a dead rank, by `id`.
    gloo counts a failed collective as completed and may mark completed ones late, so only the newest collective counts
    as unfinished, and only if the dump shows a failure.
    """
    if "failed" not in dump:
        return {}
    calls = [one for one in raw if str(one.get("profiling_name", "")).startswith("gloo:")]
    states = {id(one): DONE for one in calls}
    if dump["failed"] and calls:
        states[id(max(calls, key=lambda one: number(one.get("record_id"))))] = SCHEDULED
    return states


def _entry(raw: dict[str, Any], state: str, suffix: str, order: int) -> CollectiveEntry | None:
    sequence = number(raw.get("collective_seq_id"))
    if raw.get("is_p2p") or not sequence:
        return None
    op = word(raw.get("profiling_name", "")).partition(":")[2] or word(raw.get("profiling_name", "?"))
    sizes = [list(map(number, size[:_DIMENSIONS])) for size in raw.get("input_sizes") or [] if isinstance(size, list)]
    dtypes = word(",".join(dict.fromkeys(map(word, raw.get("input_dtypes") or []))))
    alike = op.lower().lstrip("_").startswith(_ALIKE)
    elements = number(sum(math.prod(size) for size in sizes), -1) if alike else -1
    return CollectiveEntry(
        sys.intern(f"{group_name(raw)}{suffix}"),
        sequence,
        sys.intern(op),
        _short(sizes),
        elements,
        dtypes,
        state,
        order,
    )


def _state(raw: dict[str, Any]) -> str:
    if raw.get("retired") or raw.get("state") == "completed":  # gloo only ever sets `retired`
        return DONE
    return STARTED if raw.get("state") == "started" else SCHEDULED


def _short(sizes: list[list[int]]) -> str:
    text = "x".join(map(str, sizes[0])) if len(sizes) == 1 else " ".join("x".join(map(str, size)) for size in sizes)
    return text if len(text) <= _LONGEST else f"{len(sizes)} sizes ({zlib.crc32(text.encode()):08x})"


def _parse_group_config(config: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return ranks and description by group. torch writes ranks as the text of a list; a rank reports them as runs."""
    found = {}
    for key, value in config.items() if isinstance(config, Mapping) else ():
        if not isinstance(value, Mapping):
            continue
        try:
            listed = json.loads(str(value.get("ranks", "[]")))
            ranks = decode_runs(value["runs"]) if "runs" in value else tuple(map(int, listed))
        except (TypeError, ValueError, OverflowError, RecursionError):
            ranks = ()
        found[word(value.get("name", key))] = (ranks, word(value.get("desc", "")))
    return found


def _group(
    entries: list[CollectiveEntry], configured: tuple[tuple[int, ...], str] | None, exact: tuple[int, int] | None, *,
    on_gpu: bool,
) -> Group:  # fmt: skip
    ranks, description = configured or ((), "")
    ranks = ranks if ranks == tuple(sorted(ranks)) else tuple(sorted(ranks))
    unfinished = min((entry.sequence for entry in entries if entry.state != DONE), default=0)
    entered = max((entry.sequence for entry in entries), default=0)
    completed = unfinished - 1 if unfinished else entered
    if exact is not None:
        return Group(ranks, *exact, description, on_gpu, True, not entries)
    sure = any(entry.state == DONE and entry.sequence == completed for entry in entries)
    return Group(ranks, entered, completed, description, on_gpu, sure)


def _select_newest(entries: Iterable[CollectiveEntry], keep: int) -> list[CollectiveEntry]:
    """Return the newest entries, but keep a few of the oldest unfinished ones, where the rank is waiting."""
    ordered = sorted(entries, key=lambda entry: entry.sequence)
    if len(ordered) <= keep:
        return ordered
    newest = ordered[len(ordered) - keep :] if keep else []
    oldest = [entry for entry in ordered if entry.state != DONE][: min(_FEWEST, keep)]
    if not newest or not oldest or oldest[-1].sequence >= newest[0].sequence:
        return newest
    return oldest + newest[len(oldest) :]
