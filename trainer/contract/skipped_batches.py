"""Batches that are skipped: found bad by a rollback, skipped by every later generation and attempt.

The coordinator writes `attempts/NNN/skipped.json` before the generation that has to obey it is started.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from checkpointing.storage.durable import dump_line, read_json, write_durably
from trainer.contract.run_dir import AttemptDir, RunDir
from trainer.contract.secrets.secret_redaction import in_use

_SCHEMA = "orch.skipped/1"


@dataclass(frozen=True, kw_only=True)
class Skip:
    """One batch that is skipped."""

    step: int  # that went wrong with it
    position: int  # where it begins: what all ranks together had consumed before it
    reason: str


def read(attempt: AttemptDir) -> tuple[Skip, ...]:
    """What this attempt was the first to skip; raises OSError, or ValueError when the file is damaged."""
    try:
        return tuple(Skip(**fields) for fields in read_json(attempt.skipped)["skipped"])
    except FileNotFoundError:
        return ()
    except (KeyError, TypeError) as error:
        raise ValueError(f"{attempt.skipped} is no list of skipped batches: {error!r}") from error


def read_all(run: RunDir) -> tuple[Skip, ...]:
    """What all attempts have skipped, each batch once, the oldest first; raises OSError or ValueError."""
    found: dict[int, Skip] = {}
    for attempt in run.all_attempts():
        for skip in read(attempt):
            found.setdefault(skip.position, skip)
    return tuple(found.values())


def add(attempt: AttemptDir, skips: Iterable[Skip]) -> None:
    """Skip these as well from now on; on the disk when this returns, else it raises OSError."""
    found = {skip.position: skip for skip in (*read(attempt), *skips)}
    fields = {"schema": _SCHEMA, "skipped": [asdict(skip) for skip in found.values()]}
    write_durably(attempt.skipped, in_use().record(dump_line(fields)).encode(errors="backslashreplace"))
