"""Results of probes, in a file beside the registry: `probes.json`, newest last."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from checkpointing.storage.durable import dump_line, write_durably
from trainer.protocol.plain_data import build
from trainer.protocol.probe import ProbeResult

_KEPT = 50


@dataclass(frozen=True, kw_only=True)
class StoredProbe:
    """Result of a probe with the scheduler instance and partition of its job."""

    scheduler: str
    partition: str
    run: str
    result: ProbeResult


def _file(registry: Path) -> Path:
    return registry.with_name("probes.json")


def save_probe(registry: Path, probe: StoredProbe) -> Path:
    """Add a result, and return the file. Raises OSError."""
    kept = [*load_probes(registry), probe][-_KEPT:]
    write_durably(_file(registry), dump_line([asdict(one) for one in kept]).encode())
    return _file(registry)


def load_probes(registry: Path, scheduler: str = "", partition: str = "") -> list[StoredProbe]:
    """Return the results, newest last, of one scheduler instance and partition if they are named.

    An unreadable file counts as empty, because a probe can be repeated.
    """
    try:
        found = [build(StoredProbe, one) for one in json.loads(_file(registry).read_bytes())]
    except (OSError, ValueError, TypeError):
        return []
    return [one for one in found if scheduler in ("", one.scheduler) and partition in ("", one.partition)]
