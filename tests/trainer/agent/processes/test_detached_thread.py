"""Files that hang: every reader has a bound, and the exit waits for none of them."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.agent import main
from trainer.agent.coordination import launch_gate
from trainer.agent.coordination.requests import RequestInbox
from trainer.agent.main import Agent
from trainer.agent.processes import background_tasks
from trainer.agent.processes.background_tasks import HungFileSystem, RepeatedRead
from trainer.protocol.node_identity import NodeIdentity
from trainer.protocol.run_dir import RunDir

ROOT = Path(__file__).parents[4]
IDENTITY = NodeIdentity(kind="slurm", job_id="7", node=1, nodes=2, name="n1")
Hang = Callable[..., Any]


@pytest.fixture
def hang() -> Iterator[Hang]:
    """A read of a dead file system: it answers when the test is over."""
    over = threading.Event()

    def read(*ignored: object) -> None:
        over.wait(20)
        raise OSError("it was dead")

    yield read
    over.set()


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """The result of a coroutine in a loop whose end waits for no thread."""

    async def bounded() -> Any:
        return await asyncio.wait_for(work(), seconds)

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(bounded())
    finally:
        loop.close()


def test_the_gate_gives_up_on_a_token_that_cannot_be_read(
    hang: Hang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_gate.LaunchToken, "read", hang)
    with pytest.raises(HungFileSystem, match=r"does not answer for .* s: .*GO"):
        within(15, lambda: launch_gate.wait_for_go(tmp_path / "GO", IDENTITY, 1, seconds=0.2))


def test_an_agent_that_cannot_read_the_coordinator_s_address_ends(
    hang: Hang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "read_json", hang)
    monkeypatch.setattr(main, "_CONNECT_SECONDS", 0.2)
    run = RunDir(tmp_path)
    with pytest.raises(HungFileSystem, match=r"coordinator\.json"):
        within(15, lambda: Agent(run, run.attempt(1), [])._join(IDENTITY))


def test_requests_that_cannot_be_read_delay_no_other_file(
    hang: Hang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[object] = []

    def pending(*given: object) -> None:
        reads.append(given)
        hang()

    monkeypatch.setattr("trainer.agent.coordination.requests.pending", pending)
    monkeypatch.setattr(background_tasks, "SHORTEST_READ", 0.05)
    monkeypatch.setattr("trainer.agent.coordination.requests.READ_SECONDS", 0.05)

    async def look_often() -> list[object]:
        inbox = RequestInbox(tmp_path, 1)
        found = [await inbox.poll() for _ in range(5)]
        return [request for several in found for request in several]

    assert within(15, look_often) == []
    assert len(reads) == 1


def test_a_repeated_read_begins_anew_once_it_has_answered(tmp_path: Path) -> None:
    answers = iter([1, 2])

    async def twice() -> list[int]:
        read = RepeatedRead(lambda: next(answers), tmp_path)
        return [await read.result(10), await read.result(10)]

    assert within(15, twice) == [1, 2]


def test_no_file_is_read_in_a_thread_that_the_end_waits_for() -> None:
    """Threads of the loop's own pool are few and are waited for: a dead file system would take them all."""
    folders = (ROOT / "trainer" / "agent", ROOT / "checkpointing")
    sources = [path for folder in folders for path in folder.rglob("*.py") if "detached_thread" not in path.name]
    assert len(sources) > 100
    used = [path for path in sources if any(word in path.read_text() for word in ("to_thread(", "run_in_executor("))]
    assert used == []
