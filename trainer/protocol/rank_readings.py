"""ranks.json: the current activity of every rank, for readers on a login node."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, finite, read_json, write_atomically
from trainer.protocol.plain_data import known_fields

_SCHEMA = "orch.ranks/1"


@dataclass(frozen=True, kw_only=True)
class RankReading:
    """State of a rank as seen by its agent. None means unknown, for example for a user's own program."""

    rank: int
    node: str = ""
    step: int | None = None
    phase: str = ""
    age: float | None = None  # seconds since its progress cell last changed
    state: str = ""  # state of its training thread in /proc
    ratio: float | None = None  # its work time relative to its peers'; None: not slow
    ended: bool = False
    moment: str = ""  # in a pipeline: the action within its phase and the micro-batch

    def to_json(self) -> dict[str, Any]:
        """Return one row, without `moment` if it is empty."""
        return {key: value for key, value in asdict(self).items() if key != "moment" or value}

    @classmethod
    def from_json(cls, row: object) -> "RankReading | None":
        """Parse one row, or return None if it has no rank. Fields of the wrong type count as missing."""
        known = known_fields(cls, row) if isinstance(row, dict) else {}
        return cls(**known) if "rank" in known else None


@dataclass(frozen=True, kw_only=True)
class RankReadings:
    """Readings from some of the `world` ranks. `time` is in seconds since the epoch on the coordinator's node."""

    generation: int
    world: int
    ranks: tuple[RankReading, ...]  # ordered by rank
    time: float = 0.0
    p99: Mapping[str, float] = field(default_factory=dict)  # 99th percentile of each phase in seconds

    def write(self, path: Path) -> None:
        """Replace the previous readings. Raises OSError."""
        line = dump_line({"schema": _SCHEMA, **asdict(self), "ranks": [one.to_json() for one in self.ranks]})
        write_atomically(path, f"{line}\n".encode(errors="backslashreplace"))

    @classmethod
    def read(cls, path: Path) -> "RankReadings":
        """Parse as much as possible of the newest readings. Raises OSError or ValueError if the file is unusable."""
        fields = read_json(path)
        if not isinstance(fields, dict) or fields.get("schema") != _SCHEMA:
            raise ValueError(f"{path} is not {_SCHEMA}")
        known, rows = known_fields(cls, fields), fields.get("ranks")
        if "generation" not in known or not isinstance(rows, list):
            raise ValueError(f"{path} has no generation or no ranks")
        ranks = tuple(one for one in map(RankReading.from_json, rows) if one is not None)
        p99 = fields["p99"].items() if isinstance(fields.get("p99"), dict) else ()
        limits = {phase: seconds for phase, value in p99 if (seconds := finite(value)) is not None}
        return cls(**{"world": len(ranks), **known, "ranks": ranks, "p99": limits})
