"""How much is read of large and long runs: `orch top`, `orch drill` and whoever follows, counted in opens and bytes."""

import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.durable import dump_line
from orchestrator.cli.live_jobs.top import LiveRunReader
from orchestrator.cli.runs.run_reader import TAIL, EventFeed, StepLines
from tests.orchestrator.cli.conftest import Patch, Seeds, Type
from tests.orchestrator.cli.drills.test_drill import Job
from tests.orchestrator.cli.live_jobs.test_live_attempt import begun
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.logs import line_file
from trainer.protocol.run_dir import RunDir


class Reads:
    def __init__(self) -> None:
        self.opens: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def forget(self) -> None:
        self.opens.clear()
        self.bytes.clear()


@pytest.fixture
def reads(monkeypatch: Patch) -> Reads:
    counted, really = Reads(), Path.open

    class Counted(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            block = super().read(-1 if size is None else size) or b""
            counted.bytes[_place(Path(str(self.name)))] += len(block)
            return block

    def opened(path: Path, mode: str = "r", *more: Any, **named: Any) -> Any:
        if mode != "rb" or "attempts" not in path.parts:
            return really(path, mode, *more, **named)
        stream = Counted(str(path))
        counted.opens[_place(path)] += 1
        return stream

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(line_file, "open_regular", lambda path: opened(path, "rb"))
    return counted


def _place(path: Path) -> str:
    return "/".join(path.parts[path.parts.index("attempts") + 1 :])


def steps(folder: RunDir, attempt: int, first: int, count: int, generation: int = 1) -> None:
    place = folder.attempt(attempt)
    place.make()
    line = {
        "attempt": attempt,
        "generation": generation,
        "loss": 2.0,
        "tokens_per_s": 1e4,
        "grad_norm": 0.5,
        "time": 1.0,
    }
    with place.metrics.open("a") as stream:
        stream.writelines(dump_line({**line, "step": first + number}) + "\n" for number in range(count))


def told(folder: RunDir, attempt: int, source: str, step: int, *, at: float, file: str = "") -> None:
    folder.attempt(attempt).make()
    log = EventLog(folder.attempt(attempt).event_file(file or source), source, attempt, clock=lambda: at)
    log.write(EventKind.CHECKPOINT_SKIPPED, step=step, reason="no free copy")
    log.close()


def large(folder: RunDir, attempts: int = 3, nodes: int = 5, ranks: int = 40) -> None:
    for attempt in range(1, attempts + 1):
        names = ["coordinator", *(f"agent-{node:04d}" for node in range(nodes))]
        for number, name in enumerate([*names, *(f"rank-{rank:05d}" for rank in range(ranks))]):
            told(folder, attempt, name, number, at=100.0 * attempt + number)
        steps(folder, attempt, 1000 * attempt, 1500)
    assert folder.attempt(1).metrics.stat().st_size > 2 * TAIL


def test_top_reads_the_newest_attempt_and_the_ends_of_its_files(reads: Reads, seeds: Seeds) -> None:
    run = seeds.run()
    large(begun(seeds, run))
    log = seeds.root / run / "attempts" / "003" / "events" / "rank-00000.jsonl"
    log.write_text(log.read_text() * 1000)
    assert log.stat().st_size > TAIL
    reader = LiveRunReader(run, seeds.root / run)
    reading = reader.read()
    assert (reading.step, [text for _, text in reading.events][-1]) == (
        4499, "attempt 3: step 6 is not saved: no free copy",
    )  # fmt: skip
    assert {place.split("/")[0] for place in reads.opens} == {"003"}
    assert {place for place in reads.opens if "rank-" in place} == {"003/events/rank-00000.jsonl"}
    assert max(reads.bytes.values()) <= TAIL
    reads.forget()
    told(RunDir(seeds.root / run), 3, "agent-0004", 77, at=999.0)
    assert reader.read().events[-1][1] == "attempt 3: step 77 is not saved: no free copy"
    events = {place for place in reads.opens if "/events/" in place}
    assert events == {f"003/events/{name}.jsonl" for name in ("coordinator", "rank-00000", "agent-0004")}
    assert sum(reads.bytes.values()) < 1000


def test_top_reads_rank_0_of_shared_files(reads: Reads, tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    for rank in range(4):
        told(folder, 1, f"rank-{rank:05d}", rank, at=1.0, file=f"ranks-n{rank // 2}")
    feed = EventFeed(folder.path, recent_only=True)
    assert [event.source for event in feed.poll()] == ["rank-00000"]
    assert len(EventFeed(folder.path).poll()) == 4
    reads.forget()
    assert feed.poll() == []
    assert set(reads.opens) == {"001/events/ranks-n0.jsonl"}, "its size is asked for by an open, for NFS"


def test_top_goes_on_with_the_next_attempt(reads: Reads, tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    told(folder, 1, "coordinator", 1, at=1.0)
    feed = EventFeed(folder.path, recent_only=True)
    assert [event.data["step"] for event in feed.poll()] == [1]
    told(folder, 1, "coordinator", 2, at=2.0)
    told(folder, 2, "coordinator", 3, at=3.0)
    assert [event.data["step"] for event in feed.poll()] == [2, 3], "the last words of the one before are heard"
    feed.poll()
    reads.forget()
    feed.poll()
    assert set(reads.opens) == {"002/events/coordinator.jsonl"}


def test_following_opens_grown_files_only(reads: Reads, tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    large(folder)
    feed = EventFeed(folder.path)
    assert len(feed.poll()) == 3 * 46, "every event of every attempt, once"
    assert max(reads.bytes[place] for place in reads.bytes if place.endswith("steps.jsonl")) <= TAIL
    told(folder, 1, "rank-00039", 500, at=1.0)
    assert [event.data["step"] for event in feed.poll()] == [500], "late, and not lost"
    told(folder, 3, "rank-00039", 501, at=1.0)
    reads.forget()
    assert [event.data["step"] for event in feed.poll()] == [501]
    grown = {f"003/events/{name}.jsonl" for name in ("coordinator", "rank-00000", "rank-00039")}
    assert set(reads.opens) == {*grown, "003/metrics/steps.jsonl"}
    assert feed.latest is not None
    assert feed.latest["step"] == 4499


def test_what_is_skipped_is_not_even_read(reads: Reads, tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    large(folder)
    feed = EventFeed(folder.path)
    feed.skip_existing()
    assert set(reads.opens) == {"003/metrics/steps.jsonl"}
    told(folder, 3, "rank-00007", 500, at=1.0)
    told(folder, 4, "coordinator", 501, at=2.0)
    assert [event.data["step"] for event in feed.poll()] == [500, 501]


def test_step_lines_are_read_incrementally(reads: Reads, tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    large(folder)
    every, recent_only = StepLines(folder), StepLines(folder, recent_only=True)
    assert [line["step"] for line in every.read()] == [*range(1000, 2500), *range(2000, 3500), *range(3000, 4500)]
    assert len(every.read()) == 4500
    reads.forget()
    assert recent_only.read()[-1]["step"] == 4499
    assert set(reads.opens) == {"003/metrics/steps.jsonl"}
    assert reads.bytes["003/metrics/steps.jsonl"] <= TAIL
    reads.forget()
    steps(folder, 3, 4500, 1)
    steps(folder, 4, 4501, 1)
    with folder.attempt(4).metrics.open("a") as stream:
        stream.write('{"step": 9, "loss"')  # a write that is under way
    assert [line["step"] for line in recent_only.read()[-2:]] == [4500, 4501]
    assert [line["step"] for line in every.read()[-2:]] == [4500, 4501]
    assert sum(reads.bytes.values()) < 2000


def test_a_drill_reads_no_more_of_a_long_run_than_its_end(reads: Reads, orch: Type, seeds: Seeds) -> None:
    run = seeds.run()
    folder = begun(seeds, run)
    steps(folder, 1, 0, 120 * 20)
    steps(folder, 1, 0, 121)
    for rank in range(9):
        told(folder, 1, f"rank-{rank:05d}", rank, at=1.0)
    size = folder.attempt(1).metrics.stat().st_size
    assert size > 2 * TAIL
    with Job(folder):
        data = orch("drill", run, "kill-rank", "--rank", 1, "--json").data
    assert data["passed"]
    assert reads.bytes["001/metrics/steps.jsonl"] <= 2 * TAIL, "once for the line that moves, once for the score"
    assert not [place for place in reads.opens if "rank-" in place and "rank-00000" not in place]
