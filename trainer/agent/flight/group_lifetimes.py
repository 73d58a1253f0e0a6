"""Groups destroyed and created again under the same name; each lifetime counts its collectives from 1.
torch hashes the names of groups created without the whole world, so the same ranks get the same name again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.agent.flight.dump_fields import group_name, number


@dataclass(slots=True)
class _GroupLifetime:
    """Newest lifetime of one group so far."""

    local: Any = None  # torch's number of the group in its process, unique per lifetime
    last: int = 0  # its newest collective
    before: int = 0  # earlier lifetimes that had collectives
    rows: list[int] = field(default_factory=list)


def newest(raw: Iterable[Mapping[str, Any]]) -> tuple[list[int], dict[str, int]]:
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
