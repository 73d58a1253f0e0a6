"""The files in which ranks keep how they ended: one for the ranks of a node, a line for each rank and generation."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, fsync_dir, open_regular
from trainer.contract.failures.outcome import RankOutcome
from trainer.contract.logs.line_file import MAX_READ_BYTES, LineFile
from trainer.contract.run_dir import AttemptDir

_MAX_TEXT = 1 << 16
"""Characters of one text in an error file that are kept."""


def append_outcome(attempt: AttemptDir, outcome: RankOutcome) -> None:
    """Keep how a rank ended, durably; raises OSError."""
    _append(attempt.rank_outcomes(outcome.node), outcome.to_line())


def all_outcomes(attempt: AttemptDir) -> list[tuple[RankOutcome, Path]]:
    """Every outcome with its file, those of older versions (a file for each) included; what is torn is skipped."""
    return [(outcome, path) for path in attempt.all_rank_outcomes() for outcome in _read(path)]


def find_outcome(attempt: AttemptDir, node: str, rank: int, generation: int) -> RankOutcome | None:
    """What a rank of this node kept of its end; None when it was killed. Reads the file of its node only."""
    found = [one for one in _read(attempt.rank_outcomes(node)) if (one.rank, one.generation) == (rank, generation)]
    return found[-1] if found else None


def pack_error_file(attempt: AttemptDir, node: str, rank: int, generation: int) -> None:
    """Move the error file of a command's rank, where it left one, into the file of its node; raises OSError."""
    path = attempt.error_file(rank, generation)
    try:
        with open_regular(path) as stream:
            error = json.loads(stream.read(MAX_READ_BYTES))
    except (FileNotFoundError, ValueError, RecursionError):
        return
    line = {"rank": rank, "generation": generation, "error": _shorten_texts(error)}
    _append(attempt.rank_errors(node), dump_line(line))
    path.unlink()


def _shorten_texts(value: Any) -> Any:
    """Keep the beginning of each text that torch's `@record` wrote: a message may hold a whole data set."""
    if isinstance(value, dict):
        return {key: _shorten_texts(item) for key, item in value.items()}
    return value[:_MAX_TEXT] if isinstance(value, str) else value


def _append(path: Path, line: str) -> None:
    file = LineFile(path)
    try:
        file.append(line)
        file.sync()
    finally:
        file.close()
    fsync_dir(path.parent)


def _read(path: Path) -> Iterator[RankOutcome]:
    try:
        with open_regular(path) as stream:
            block = stream.read(MAX_READ_BYTES)
    except OSError:
        return
    for line in block.splitlines():
        try:
            outcome = RankOutcome(**_renamed(json.loads(line)))
        except (ValueError, TypeError, RecursionError):  # torn by a kill
            continue
        numbers = (outcome.rank, outcome.generation, outcome.step, outcome.exit_code)
        if all(isinstance(each, int) for each in numbers) and isinstance(outcome.time, (int, float)):
            yield outcome


def _renamed(fields: Any) -> dict[str, Any]:
    """Run directories from before the field was renamed have `echo` for `secondary`."""
    return {("secondary" if key == "echo" else key): value for key, value in dict(fields).items()}
