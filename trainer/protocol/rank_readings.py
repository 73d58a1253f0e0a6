"""ranks.json: the current activity of every rank, for readers on a login node."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, finite, read_json, whole, write_atomically

_SCHEMA = "orch.ranks/1"


@dataclass(frozen=True, kw_only=True)
class RankReading:
    """State of a rank as its agent saw it; None for unknown values, for example in a user's own program."""

    rank: int
    node: str = ""
    step: int | None = None
    phase: str = ""
    age: float | None = None  # seconds since its progress cell last changed
    state: str = ""  # state of its training thread in /proc, see RankSample
    ratio: float | None = None  # its work time relative to its peers'; None: not slow
    ended: bool = False
    moment: str = ""  # in a pipeline: the action within its phase and the micro-batch

    def to_json(self) -> dict[str, Any]:
        """Return one row; `moment` is left out if empty."""
        return {key: value for key, value in asdict(self).items() if key != "moment" or value}

    @classmethod
    def from_json(cls, row: object) -> "RankReading | None":
        """Parse the rank of one row; fields of the wrong type count as missing. None if the row has no rank."""
        if not isinstance(row, dict) or (rank := whole(row.get("rank"))) is None:
            return None
        return cls(
            rank=rank, node=_word(row, "node"), step=_whole(row, "step"), phase=_word(row, "phase"),
            age=_seconds(row, "age"), state=_word(row, "state"), ratio=_seconds(row, "ratio"),
            ended=row.get("ended") is True, moment=_word(row, "moment"),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RankReadings:
    """A reading of some of `world` ranks; `time` is seconds since the epoch on the coordinator's node."""

    generation: int
    world: int
    ranks: tuple[RankReading, ...]  # ordered by rank
    time: float = 0.0
    p99: Mapping[str, float] = field(default_factory=dict)  # 99th percentile of each phase in seconds

    def write(self, path: Path) -> None:
        """Replace the previous readings; raises OSError."""
        line = dump_line({"schema": _SCHEMA, **asdict(self), "ranks": [one.to_json() for one in self.ranks]})
        write_atomically(path, f"{line}\n".encode(errors="backslashreplace"))

    @classmethod
    def read(cls, path: Path) -> "RankReadings":
        """Parse as much as possible of the newest readings; raises OSError or ValueError for an unusable file."""
        try:
            fields = read_json(path)
        except RecursionError as error:
            raise ValueError(f"{path} is nested too deeply") from error
        if not isinstance(fields, dict) or fields.get("schema") != _SCHEMA:
            raise ValueError(f"{path} is not {_SCHEMA}")
        generation, rows = _whole(fields, "generation"), fields.get("ranks")
        if generation is None or not isinstance(rows, list):
            raise ValueError(f"{path} has no generation or no ranks")
        ranks = tuple(one for one in map(RankReading.from_json, rows) if one is not None)
        return cls(
            generation=generation, world=_whole(fields, "world") or len(ranks), ranks=ranks,
            time=_seconds(fields, "time") or 0.0, p99=_all_seconds(fields.get("p99")),
        )  # fmt: skip


def _word(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def _whole(fields: Mapping[str, Any], name: str) -> int | None:
    return whole(fields.get(name))


def _seconds(fields: Mapping[str, Any], name: str) -> float | None:
    return finite(fields.get(name))


def _all_seconds(fields: object) -> dict[str, float]:
    known = fields if isinstance(fields, dict) else {}
    return {name: seconds for name in known if (seconds := _seconds(known, name)) is not None}
