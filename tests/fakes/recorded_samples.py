"""Samples and random numbers of `RecordingLlama` ranks that contributed to the final weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Lines = dict[int, list[dict[str, Any]]]


def recorded(record: Path, run: str) -> Lines:
    """Return the lines of each batch by its first position: one per rank with its own tokens, of the last training.

    Ranks of one tensor-parallel group must have read and drawn the same; ranks that share sequences have read the same.
    """
    newest: dict[int, tuple[int, int]] = {}
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for path in record.glob(f"{run}-*.jsonl"):
        attempt, restart, _ = path.name.removeprefix(f"{run}-").split(".", 2)
        order = int(attempt), int(restart)
        for line in map(json.loads, path.read_text().splitlines()):
            position = line["position"]
            if order > newest.get(position, (0, 0)):
                newest[position], found[position] = order, {}
            if order == newest[position]:
                assert found[position].setdefault(line["token_rank"], line) == line
    return {position: [ranks[rank] for rank in sorted(ranks)] for position, ranks in sorted(found.items())}


def assert_every_sample_once(lines: Lines, calm: Lines, steps: int, batch: int) -> None:
    """Check that each step read the same sequences as in an undisturbed run, and none twice."""
    assert list(lines) == list(calm) == [step * batch for step in range(steps)]
    read = [number for position in lines for number in numbers(lines[position])]
    assert read == [number for position in calm for number in numbers(calm[position])]
    assert len(read) == len(set(read)) == steps * batch


def numbers(ranks: Sequence[dict[str, Any]]) -> list[int]:
    """Return the sequences of one batch in global order: those of each data-parallel rank in turn."""
    parts: dict[int, list[int]] = {}
    for line in ranks:
        assert parts.setdefault(line["dp_rank"], line["numbers"]) == line["numbers"]
    return [number for part in parts.values() for number in part]


def assert_nothing_is_drawn_twice(lines: Lines) -> None:
    """Check that no random number was drawn twice by any rank."""
    drawn = [line["drawn"] for ranks in lines.values() for line in ranks]
    assert len(drawn) == len(set(drawn))
