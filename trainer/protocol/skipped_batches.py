"""Batches that rollbacks found to be bad. Every later generation and attempt skips them.

The coordinator writes `attempts/NNN/skipped.json` before it starts the generation that must skip them.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from checkpointing.storage.durable import dump_line, read_json, write_durably
from trainer.protocol.plain_data import build
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.protocol.secrets.secret_redaction import in_use

_SCHEMA = "orch.skipped/1"


@dataclass(frozen=True, kw_only=True)
class Skip:
    """A skipped batch."""

    step: int  # step that failed on it
    position: int  # data position of its start, as consumed by all ranks together
    reason: str


def read(attempt: AttemptDir) -> tuple[Skip, ...]:
    """Return the batches first skipped by this attempt. Raises OSError, or ValueError if the file is damaged."""
    try:
        return tuple(build(Skip, fields) for fields in read_json(attempt.skipped_batches)["skipped"])
    except FileNotFoundError:
        return ()
    except (KeyError, TypeError) as error:
        raise ValueError(f"{attempt.skipped_batches} is not a list of skipped batches: {error!r}") from error


def read_all(run: RunDir) -> tuple[Skip, ...]:
    """Return the batches skipped by any attempt, oldest first, without duplicates. Raises OSError or ValueError."""
    found: dict[int, Skip] = {}
    for attempt in run.all_attempts():
        for skip in read(attempt):
            found.setdefault(skip.position, skip)
    return tuple(found.values())


def add(attempt: AttemptDir, skips: Iterable[Skip]) -> None:
    """Add batches to skip from now on, durably. Raises OSError."""
    found = {skip.position: skip for skip in (*read(attempt), *skips)}
    fields = {"schema": _SCHEMA, "skipped": [asdict(skip) for skip in found.values()]}
    write_durably(attempt.skipped_batches, in_use().record(dump_line(fields)).encode(errors="backslashreplace"))
