"""NCCL's own counters per group, exact even if the ring of entries has lost or never shown a collective."""

from collections.abc import Iterable, Mapping
from typing import Any

from trainer.agent.flight.dump_fields import group_name, number, word


def counters(dump: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return the last collective enqueued and the last one completed, by group name.
    Skips groups with messages, which torch counts in the same place, and groups whose counter differs from their newest
    collective in the record. Empty for gloo, which counts failed collectives as completed.
    """
    status, config = dump.get("pg_status"), dump.get("pg_config")
    if not isinstance(status, Mapping) or not isinstance(config, Mapping) or not _of_nccl(dump):
        return {}
    entries = list(entries)
    talked = {group_name(entry) for entry in entries if entry.get("is_p2p") or entry.get("p2p_seq_id")}
    newest: dict[str, int] = {}
    for entry in entries:
        newest[group_name(entry)] = max(newest.get(group_name(entry), 0), number(entry.get("collective_seq_id"), -1))
    found = {}
    for local, name in _names(config, status, entries).items():
        told = status[local]
        if name in talked or not isinstance(told, Mapping):
            continue
        entered, completed = (
            number(told.get("last_enqueued_collective"), -1),
            number(told.get("last_completed_collective"), -1),
        )
        if 0 <= completed <= entered and newest.get(name, entered) == entered:
            found[name] = (entered, completed)
    return found


def _of_nccl(dump: Mapping[str, Any]) -> bool:
    return bool(dump.get("nccl_version") or dump.get("comm_lib_version"))


def _names(
    config: Mapping[str, Any], status: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]
) -> dict[str, str]:
    """Return group names by local number: paired by the entries, else by order if the names are ascending numbers."""
    seen = {str(entry.get("pg_id")): group_name(entry) for entry in entries}
    known = {local: name for local, name in seen.items() if local in status}
    names = [word(value.get("name", key)) for key, value in config.items() if isinstance(value, Mapping)]
    if len(names) == len(status) and all(name.isdecimal() for name in [*names, *status]):
        paired = dict(zip(sorted(status, key=int), sorted(names, key=int), strict=True))
        if known.items() <= paired.items():
            return paired
    return known
