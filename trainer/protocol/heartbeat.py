"""heartbeat.json, which the coordinator rewrites once a second to show readers of the file that it is alive."""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from checkpointing.storage.durable import dump_line, number, read_json, replace_or_overwrite
from trainer.protocol.plain_data import known_fields
from trainer.protocol.secrets.secret_redaction import in_use

MOST_BYTES = 1 << 20
"""Maximum number of bytes read from a heartbeat file."""
LONGEST_TROUBLE = 500
"""Maximum number of characters in each of `saves_failing`, `waits` and `unsaved`: the heartbeat must fit into its old
file's space on a full disk."""


class AttemptStage(StrEnum):
    """The coordinator's current activity."""

    JOINING = "joining"  # waiting for agents and their preflight
    WARMING = "warming"  # waiting for fork servers
    RUNNING = "running"  # ranks are running
    CLEARING = "clearing"  # killing the remaining processes of a generation
    ENDED = "ended"  # outcome written


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Heartbeat of the coordinator. `time` is in seconds since the epoch on its node."""

    seq: int  # grows with every write
    time: float = 0.0
    attempt: int = 0
    job_id: str = ""
    generation: int = 0
    step: int | None = None
    total_steps: int = 0
    loss: float | None = None
    phase: str = ""
    saved_step: int = 0  # newest checkpoint known to the ranks, including the restored one
    nodes: list[str] = field(default_factory=list)
    state: str = ""  # an AttemptStage
    saves_failing: str = ""  # when saves began to fail and why; empty while they work
    waits: str = ""  # which node's preparation waits, and for what
    unsaved: str = ""  # what a failure would repeat, while a user's program has saved nothing for long

    def write(self, path: Path) -> None:
        """Replace the previous heartbeat. Raises OSError."""
        line = in_use().record(dump_line({"schema": "orch.heartbeat/1", **asdict(self)}))
        replace_or_overwrite(path, f"{line}\n".encode(errors="backslashreplace"))

    @classmethod
    def read(cls, path: Path) -> "Heartbeat":
        """Return the newest heartbeat. Fields of the wrong type count as missing.

        Raises OSError, ValueError, TypeError, KeyError or AttributeError if the file is missing or invalid.
        """
        found = read_json(path, MOST_BYTES)
        known = known_fields(cls, found)
        if "seq" not in known:
            raise ValueError(f"{path}: seq={found['seq']!r} is not a whole number")
        if isinstance(loss := found.get("loss"), str):
            known["loss"] = number(loss)
        if isinstance(nodes := found.get("nodes"), list):
            known["nodes"] = [str(name) for name in nodes]
        texts = {name: known.get(name, "")[:LONGEST_TROUBLE] for name in ("saves_failing", "waits", "unsaved")}
        return cls(**{**known, **texts})
