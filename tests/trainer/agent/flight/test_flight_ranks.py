"""Flight records of real gloo ranks that go wrong: what they really hold, and who is blamed by them."""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.warm_root import WarmChild, start_warm
from trainer.agent.flight import recorder
from trainer.agent.flight.analysis import analyse
from trainer.agent.flight.flight_record import FlightRecord
from trainer.agent.flight.wait_graph import Finding
from trainer.protocol.run_dir import AttemptDir, RunDir

pytestmark = pytest.mark.multi


@dataclass
class Wrong:
    """Running ranks that have gone wrong, or are about to."""

    process: WarmChild
    attempt: AttemptDir
    paths: dict[int, str]
    pids: dict[int, int]
    ended: bool = False

    def find(self, kind: str, seconds: float = 60.0) -> tuple[Finding, list[FlightRecord]]:
        """Ask until the records say so twice in a row: the ranks need a moment to run into each other."""
        end, before = time.monotonic() + seconds, None
        while True:
            flights, silent = asyncio.run(recorder.flights(self.paths, 1.0))
            finding = analyse(flights, self.paths, silent)
            if (finding.kind == kind and finding == before) or time.monotonic() > end:
                return finding, flights
            before = finding
            time.sleep(0.2)

    def ends(self, command: str = "wait") -> dict[int, int]:
        """Let all ranks end by themselves, or kill them; their exit codes."""
        self.ended = True
        return {int(rank): code for rank, code in tell(self.process, command).items()}


def tell(process: WarmChild, line: str) -> Any:
    """The answer."""
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


@pytest.fixture(scope="module")
def program() -> Iterator[WarmChild]:
    """A process that has imported torch and forks ranks for every test."""
    process = start_warm("tests.trainer.agent.flight.flight_program:main", environ=os.environ)
    yield process
    process.communicate(timeout=30)


@pytest.fixture
def wrong(program: WarmChild, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Wrong]:
    """`(kind, world)` as the program takes them."""
    kind, world = request.param
    run = RunDir(tmp_path / "run")
    run.make()
    run.attempt(1).make()
    with tempfile.TemporaryDirectory(prefix="orch-") as sockets:
        order = {"kind": kind, "world": world, "run_dir": str(run.path), "sockets": sockets}
        pids = {int(rank): pid for rank, pid in tell(program, json.dumps(order)).items()}
        assert program.stdout.readline() == "ready\n"
        made = Wrong(program, run.attempt(1), {rank: f"{sockets}/{rank}.1" for rank in range(world)}, pids)
        yield made
        if not made.ended:
            made.ends("kill")


def with_kind(kind: str, world: int = 4) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("wrong", [(kind, world)], indirect=True, ids=[f"{kind}-{world}"])


@with_kind("absent")
def test_a_rank_that_stops_calling_is_missed_by_its_peers(wrong: Wrong) -> None:
    finding, flights = wrong.find("missing")
    assert finding.ranks == (2,)
    assert finding.reason == (
        "rank 2 never entered collective #4 of group 0 (all_reduce of 4 Float), in which ranks 0, 1 and 3 wait"
    )
    assert len(flights) == 4
    told = flights[0].groups
    assert told["0"].ranks == (0, 1, 2, 3)
    assert sorted(group.ranks for group in told.values()) == [(0, 1), (0, 1, 2, 3), (0, 2)]


@with_kind("locked")
def test_a_rank_that_holds_pythons_lock_answers_all_the_same(wrong: Wrong) -> None:
    finding, flights = wrong.find("missing")
    assert finding.ranks == (2,)
    assert len(flights) == 4


@with_kind("stopped")
def test_a_stopped_rank_does_not_answer_and_is_named(wrong: Wrong) -> None:
    finding, flights = wrong.find("missing")
    assert finding.ranks == (2,)
    assert "rank 2 did not answer, and all others have entered collective #4 of group 0" in finding.reason
    assert len(flights) == 3


@with_kind("inner")
def test_the_wave_front_is_the_innermost_group(wrong: Wrong) -> None:
    finding, flights = wrong.find("missing")
    assert finding.ranks == (2,)
    assert next(flight for flight in flights if flight.rank == 3).waits() == {finding.group}
    assert finding.reason.endswith("in which rank 3 waits")


@with_kind("order")
def test_another_operation_at_the_same_place_is_a_desync(wrong: Wrong) -> None:
    finding, _ = wrong.find("desync_order")
    assert finding.ranks == (2,)
    assert "rank 2 entered broadcast of 4 Float" in finding.reason
    assert "ranks 0, 1 and 3 entered all_reduce of 4 Float" in finding.reason


@with_kind("shape")
def test_after_another_shape_the_records_of_the_dying_tell(wrong: Wrong) -> None:
    codes = wrong.ends()
    flights = recorder.records_of_dead_ranks(wrong.attempt, 1)
    finding = analyse(flights, range(4), [rank for rank in range(4) if rank not in {f.rank for f in flights}])
    assert finding.kind == "desync_shape", (codes, finding)
    assert finding.ranks == (2,)
    assert "rank 2 entered all_reduce of 900 Float" in finding.reason
    assert -6 in codes.values()


@with_kind("raises")
def test_the_rank_that_raised_is_missed_by_those_it_took_along(wrong: Wrong) -> None:
    wrong.ends()
    flights = recorder.records_of_dead_ranks(wrong.attempt, 1)
    finding = analyse(flights, range(4))
    assert finding.kind == "missing", finding
    assert finding.ranks == (2,)
