"""Ranks, writers and whole jobs killed at seeded points: what was committed stays, and the next start cleans up."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from checkpointing.format.commit import parse_name
from checkpointing.tiers.catalog import Catalog
from checkpointing.verification.verify import verify
from tests.checkpointing.proofs.crash_fork_server import DIED, KEEP, SAVES, Case
from tests.warm_root import start_warm

ROOT = Path(__file__).resolve().parents[3]
SAMPLE, MOST = (0, 1, 2, 4, 9), 48
"""Seeds that kill a rank and a writer at an operation, then a job, a writer and one of two ranks at a moment."""
ALL, PART, ENOUGH = 600, 150, 500
RANK_OPERATIONS, WRITER_OPERATIONS = 450, 350
MISSED = "nothing, it had ended"


class ForkServer:
    """Asks for one generation at a time."""

    def __init__(self) -> None:
        self._process = start_warm(
            "tests.checkpointing.proofs.crash_fork_server:main",
            environ={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        )

    def run(self, case: Case, generation: int) -> dict[str, Any]:
        self._process.stdin.write(json.dumps({"case": asdict(case), "generation": generation}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


def case(seed: int, folder: Path) -> Case:
    """What this seed kills: alternately a rank or its writer at an operation, or anything at a moment."""
    draw = random.Random(seed)
    victim = ("rank", "writer", "job", "rank", "writer", "job")[seed % 6]
    ranks = 2 if seed % 10 == 9 else 1
    if victim == "job" or seed % 6 >= 3:
        return Case(folder=str(folder), victim=victim, ranks=ranks, delay=draw.uniform(0.0005, 0.12))
    operations = RANK_OPERATIONS if victim == "rank" else WRITER_OPERATIONS
    return Case(folder=str(folder), victim=victim, ranks=ranks, operation=draw.randrange(1, operations))


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def reported(folder: Path, generation: int) -> list[dict[str, Any]]:
    return [line for path in sorted(folder.glob(f"events-{generation}-*")) for line in lines(path)]


def names(folder: Path) -> set[str]:
    return {entry.name for entry in Catalog(folder).committed_entries()}


def crash(fork_server: ForkServer, seed: int, folder: Path) -> str:
    """Run one case and check all guarantees; returns the case."""
    folder.mkdir()
    this = case(seed, folder)
    context = f"seed {seed}: {this}"
    first = fork_server.run(this, 1)
    assert first["orphans"] == 0, f"{context}: a writer outlived its rank"
    assert -1 not in first["ended"], f"{context}: hung: {errors(folder)}"
    kept = assert_nothing_lost(folder, context)
    if this.victim == "writer":
        assert first["ended"] == [0] * this.ranks, f"{context}: {errors(folder)}"
        assert SAVES in [line["step"] for line in reported(folder, 1) if line["kind"] == "checkpoint.committed"], (
            context
        )
    second = fork_server.run(this, 2)
    assert second["ended"] == [0] * this.ranks, f"{context}: {second} {errors(folder)}"
    started = [line for line in reported(folder, 2) if line["kind"] == "started"]
    newest = max((step_of(name) for name in kept), default=0)
    assert [(line["step"], line["exact"]) for line in started] == [(newest, True)] * this.ranks, context
    assert_tidy(folder, context)
    died = folder / DIED
    return f"{this.victim} {died.read_text()}" if died.exists() else MISSED


def assert_nothing_lost(folder: Path, context: str) -> set[str]:
    """The newest of the reported commits exist and are complete; returns what exists."""
    place = folder / "checkpoints"
    there = names(place)
    committed = {line["name"] for line in reported(folder, 1) if line["kind"] == "checkpoint.committed"}
    wanted = sorted(committed | there, key=step_of)[-KEEP:]
    assert set(wanted) <= there, f"{context}: {set(wanted) - there} were committed and are lost"
    for name in there:
        assert verify(place / name, 2).ok, f"{context}: {name} {verify(place / name, 2).faults}"
    for name in names(folder / "durable" / "run"):
        assert verify(folder / "durable" / "run" / name, 2).ok, f"{context}: flushed {name}"
    return there


def assert_tidy(folder: Path, context: str) -> None:
    """After the next start and its saves: committed checkpoints, as many as are kept, and nothing half-written."""
    for place in (folder / "checkpoints", folder / "durable" / "run"):
        found = {path.name for path in place.iterdir()} - {"pins.json"}
        assert found == names(place), f"{context}: debris {found - names(place)} in {place.name}"
        # One more may be held by the copying to the next tier.
        assert len(found) <= KEEP + 1, f"{context}: {found}"
        for name in found:
            assert not list((place / name).glob("*.tmp*")), context


def step_of(name: str) -> int:
    parts = parse_name(name)
    assert parts is not None
    return parts.step


def errors(folder: Path) -> str:
    return "".join(path.read_text()[-3000:] for path in sorted(folder.glob("errors-*")))


def was_killed_at_operations(counts: Counter[str]) -> bool:
    """Return whether both kinds of process died inside an operation; else the kills of a kind do not reach it."""
    return all(
        any(at.startswith((f"{victim} before", f"{victim} after")) for at in counts) for victim in ("rank", "writer")
    )


@pytest.mark.multi
def test_a_sample_of_kills_loses_nothing(fork_server: ForkServer, tmp_path: Path) -> None:
    killed: Counter[str] = Counter()
    for number, seed in enumerate((*SAMPLE, *(set(range(MOST)) - set(SAMPLE)))):
        # On a busy machine saves are skipped, and with them operations.
        was_enough = was_killed_at_operations(killed) and killed.total() - killed[MISSED] > len(SAMPLE) // 2
        if number >= len(SAMPLE) and was_enough:
            break
        killed[crash(fork_server, seed, tmp_path / str(seed))] += 1
    assert killed.total() - killed[MISSED] > len(SAMPLE) // 2, killed
    assert was_killed_at_operations(killed), killed


@pytest.mark.proof
@pytest.mark.parametrize("first", range(0, ALL, PART))
def test_hundreds_of_kills_lose_nothing(
    fork_server: ForkServer, tmp_path: Path, first: int, record_property: Callable[[str, object], None]
) -> None:
    counts: Counter[str] = Counter(
        crash(fork_server, seed, tmp_path / str(seed)) for seed in range(first, first + PART)
    )
    for victim in ("rank", "writer", "job"):
        record_property(f"times the {victim} was killed", sum(counts[at] for at in counts if at.startswith(victim)))
    assert counts.total() - counts[MISSED] >= PART * ENOUGH // ALL, counts
    assert was_killed_at_operations(counts), counts
