"""heartbeat.json: shows once a second that the coordinator is alive, to processes that can only read files."""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, finite, number, read_json, replace_or_overwrite, whole
from trainer.contract.secrets.secret_redaction import in_use

MOST_BYTES = 1 << 20
"""Bytes that are read of one."""
LONGEST_TROUBLE = 500
"""Characters of what ranks say of their saves: the heartbeat must stay within the room that its file has."""


class Stage(StrEnum):
    """What the coordinator is doing."""

    JOINING = "joining"  # it waits for agents and their preflight
    WARMING = "warming"  # it waits for fork servers
    RUNNING = "running"  # ranks run
    CLEARING = "clearing"  # it kills what is left of a generation
    ENDED = "ended"  # the outcome is written


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """One reading; `time` is seconds since the epoch on the coordinator's node."""

    seq: int  # grows with every write
    time: float = 0.0
    attempt: int = 0
    job_id: str = ""
    generation: int = 0
    step: int | None = None
    total_steps: int = 0
    loss: float | None = None
    phase: str = ""
    saved_step: int = 0  # newest checkpoint that ranks know of, one that they began with included
    nodes: list[str] = field(default_factory=list)
    state: str = ""  # a Stage
    saves_failing: str = ""  # since when and why; empty while they work

    def write(self, path: Path) -> None:
        """Replace the one before; raises OSError."""
        line = in_use().record(dump_line({"schema": "orch.heartbeat/1", **asdict(self)}))
        replace_or_overwrite(path, f"{line}\n".encode(errors="backslashreplace"))

    @classmethod
    def read(cls, path: Path) -> "Heartbeat":
        """The newest one; a field of another type counts as left out.

        Raises OSError, ValueError, TypeError, KeyError or AttributeError when there is none.
        """
        fields = read_json(path, MOST_BYTES)
        loss = fields.get("loss")

        if (seq := whole(fields["seq"])) is None:
            raise ValueError(f"{path}: seq={fields['seq']!r} is no whole number")
        numbers = {name: value for name in _WHOLE if (value := whole(fields.get(name))) is not None}
        words = {name: fields[name] for name in _WORDS if isinstance(fields.get(name), str)}
        known: dict[str, Any] = {**numbers, **words}
        nodes = fields.get("nodes")
        return cls(
            seq=seq,
            time=finite(fields.get("time")) or 0.0,
            loss=number(loss) if isinstance(loss, str) else finite(loss),
            nodes=[str(name) for name in nodes] if isinstance(nodes, list) else [],
            saves_failing=str(fields.get("saves_failing") or "")[:LONGEST_TROUBLE],
            **known,
        )


_WHOLE = ("attempt", "generation", "step", "total_steps", "saved_step")
_WORDS = ("job_id", "phase", "state")
