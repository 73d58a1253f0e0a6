"""What NCCL's own counters say of each group: exact where the ring of entries has lost or never shown them."""

from collections.abc import Iterable, Mapping
from typing import Any


def counters(dump: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """By name of the group: the last collective that was enqueued and the last one that was over.

    Groups in which messages were seen are left out, for torch counts those in the same place. So is every group whose
    counter is not that of its newest collective here. Empty for gloo, which counts failed collectives as over.
    """
    status, config = dump.get("pg_status"), dump.get("pg_config")
    if not isinstance(status, Mapping) or not isinstance(config, Mapping) or not _of_nccl(dump):
        return {}
    entries = list(entries)
    talked = {_name(entry) for entry in entries if entry.get("is_p2p") or entry.get("p2p_seq_id")}
    newest: dict[str, int] = {}
    for entry in entries:
        newest[_name(entry)] = max(newest.get(_name(entry), 0), _number(entry.get("collective_seq_id")))
    found = {}
    for number, name in _names(config, status, entries).items():
        told = status[number]
        if name in talked or not isinstance(told, Mapping):
            continue
        entered, completed = (
            _number(told.get("last_enqueued_collective")),
            _number(told.get("last_completed_collective")),
        )
        if 0 <= completed <= entered and newest.get(name, entered) == entered:
            found[name] = (entered, completed)
    return found


def _of_nccl(dump: Mapping[str, Any]) -> bool:
    return bool(dump.get("nccl_version") or dump.get("comm_lib_version"))


def _names(
    config: Mapping[str, Any], status: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]
) -> dict[str, str]:
    """Names by local number: as the entries pair them; the others by order, where names are numbers that count up."""
    seen = {str(entry.get("pg_id")): _name(entry) for entry in entries}
    known = {number: name for number, name in seen.items() if number in status}
    names = [str(value.get("name", key)) for key, value in config.items() if isinstance(value, Mapping)]
    if len(names) == len(status) and all(name.isdecimal() for name in [*names, *status]):
        paired = dict(zip(sorted(status, key=int), sorted(names, key=int), strict=True))
        if known.items() <= paired.items():
            return paired
    return known


def _name(entry: Mapping[str, Any]) -> str:
    names = entry.get("process_group")
    return str(names[0]) if isinstance(names, list | tuple) and names else str(entry.get("pg_id", "?"))


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return -1
