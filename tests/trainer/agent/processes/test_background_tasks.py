"""Files that hang: every reader has a bound, and the exit waits for none of them."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.coordination.test_coordinator import Scene, hear
from tests.trainer.agent.job import LocalJob, until
from tests.trainer.agent.warm_agents import FIRST
from trainer.agent import main
from trainer.agent.coordination import job_monitor, launch_gate
from trainer.agent.coordination.requests import RequestInbox
from trainer.agent.main import Agent, NonBlockingEventLog, copy_stderr_to_log
from trainer.agent.processes import background_tasks
from trainer.agent.processes.background_tasks import (
    HungFileSystem,
    RepeatedRead,
    SupervisedTasks,
    WriteBehind,
    describe_error,
    report_exceptions,
    settle,
)
from trainer.agent.watch.declare_hang import HangDetector, HangJudgement, HangVerdict, Incident
from trainer.protocol.events import EventKind, read_events
from trainer.protocol.logs.line_file import LineFile
from trainer.protocol.messages import agents
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


def test_the_gate_gives_up_on_a_token_that_cannot_be_read(hang, tmp_path, monkeypatch):
    monkeypatch.setattr(launch_gate.LaunchToken, "read", hang)
    with pytest.raises(HungFileSystem, match=r"has not responded for .* s: .*GO"):
        within(15, lambda: launch_gate.wait_for_go(tmp_path / "GO", IDENTITY, 1, seconds=0.2))


def test_an_agent_that_cannot_read_the_coordinator_s_address_ends(hang, tmp_path, monkeypatch):
    monkeypatch.setattr(main, "read_json", hang)
    monkeypatch.setattr(main, "_CONNECT_SECONDS", 0.2)
    run = RunDir(tmp_path)
    with pytest.raises(HungFileSystem, match=r"coordinator\.json"):
        within(15, lambda: Agent(run, run.attempt(1), [])._join(IDENTITY))


def test_requests_that_cannot_be_read_delay_no_other_file(hang, tmp_path, monkeypatch):
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
    folders = (ROOT / "trainer" / "agent", ROOT / "checkpointing")
    sources = [path for folder in folders for path in folder.rglob("*.py") if "detached_thread" not in path.name]
    assert len(sources) > 100
    used = [path for path in sources if any(word in path.read_text() for word in ("to_thread(", "run_in_executor("))]
    assert used == []


def fail() -> None:
    raise ZeroDivisionError("of nothing")


async def fail_later() -> None:
    await asyncio.sleep(0)
    fail()


SOURCES: dict[str, Callable[[SupervisedTasks], object]] = {
    "task": lambda tasks: tasks.spawn(fail_later()),
    "callback": lambda _: asyncio.get_running_loop().call_soon(fail),
    "thread": lambda _: threading.Thread(target=fail).start(),
}


@pytest.fixture(autouse=True)
def hook():
    before = threading.excepthook
    yield
    threading.excepthook = before


@pytest.mark.parametrize("source", SOURCES)
async def test_an_exception_is_reported_and_printed(source, capsys):
    reported: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    report_exceptions(reported.set_result)
    SOURCES[source](SupervisedTasks())
    error = await asyncio.wait_for(reported, 10)
    assert describe_error(error).startswith("ZeroDivisionError: of nothing (test_background_tasks.py:")
    assert "Traceback" in capsys.readouterr().err


async def test_a_cancelled_task_and_a_future_that_was_given_up_are_no_errors():
    errors: list[BaseException] = []
    report_exceptions(errors.append)
    tasks = SupervisedTasks()
    tasks.spawn(asyncio.sleep(60))
    tasks.cancel()
    asyncio.get_running_loop().create_future().set_exception(OSError("late"))
    await asyncio.sleep(0.05)
    assert errors == []


class Gate:
    """A file that hangs while it is shut."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.closed = threading.Event()
        self._open = threading.Event()

    def write(self, text: str) -> None:
        self._open.wait(60)
        self.written.append(text)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


@pytest.fixture
def lost() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def behind(gate: Gate, lost: list[tuple[str, str]]) -> WriteBehind:
    return WriteBehind(gate.write, lambda text, why: lost.append((text, why)), gate.closed.set)


def fill(pipe: int) -> None:
    """Until it takes nothing more."""
    os.set_blocking(pipe, False)
    try:
        while True:
            os.write(pipe, b"\n" * 4096)
    except BlockingIOError:
        os.set_blocking(pipe, True)


def drain(pipe: int) -> None:
    os.set_blocking(pipe, False)
    os.read(pipe, 1 << 20)


def test_nobody_waits_for_a_file_that_hangs_and_all_of_it_comes_in_order_when_it_answers(behind, gate, lost):
    texts = [str(number) for number in range(100)]
    for text in texts:
        behind.append(text)
    assert gate.written == []
    assert not behind.flush(0.01)
    gate.open()
    behind.close()
    assert (gate.written, lost) == (texts, [])
    assert gate.closed.wait(30)


def test_the_end_waits_for_a_file_that_hangs_no_longer_than_its_limit_and_tells(behind, gate, lost):
    behind.append("one")
    behind.append("two")
    began = time.monotonic()
    settle([behind, behind], 0.2)
    assert time.monotonic() - began < 2
    assert [text for text, _ in lost] == ["one", "one"]
    assert "1 later" in lost[0][1]
    assert not gate.closed.is_set(), "another file could get the number of one that is still being written"
    gate.open()
    assert gate.closed.wait(30)
    assert gate.written == ["one", "two"], "a file that answers after all gets the rest"


@pytest.mark.parametrize(("bound", "most"), [("MOST_TEXTS", 3), ("MOST_CHARACTERS", 6)])
def test_what_finds_no_room_is_lost_and_told_once_for_each_stall(behind, gate, lost, monkeypatch, bound, most):
    monkeypatch.setattr(background_tasks, bound, most)
    for text in ("a1", "a2", "a3", "lost", "too"):
        behind.append(text)
    gate.open()
    assert behind.flush(5)
    behind.append("later")
    behind.close()
    assert gate.written == ["a1", "a2", "a3", "later"]
    assert [text for text, _ in lost] == ["lost"]
    assert "hung" in lost[0][1]


def test_a_write_that_fails_is_told_and_costs_only_itself(lost):
    written = []

    def write(text: str) -> None:
        if text == "bad":
            raise OSError(28, "No space left on device")
        written.append(text)

    behind = WriteBehind(write, lambda text, why: lost.append((text, why)))
    for text in ("one", "bad", "two"):
        behind.append(text)
    behind.close()
    behind.append("late")
    assert written == ["one", "two"]
    assert lost == [("bad", "[Errno 28] No space left on device"), ("late", "the writer is closed")]


def test_an_event_has_the_time_the_number_and_the_generation_of_its_call(tmp_path, monkeypatch):
    append, gate = LineFile.append, Gate()

    def slow(file: LineFile, line: str) -> None:
        gate.write(line)
        append(file, line)

    monkeypatch.setattr(LineFile, "append", slow)
    path = tmp_path / "events.jsonl"
    log = NonBlockingEventLog(path, "agent-0000", 1)
    for generation in (1, 2, 3):
        log.generation = generation
        log.write(EventKind.DECISION, action=str(generation))
    called = time.time()
    log.generation = 9
    gate.open()
    log.close()
    events, _ = read_events(path)
    assert [(event.seq, event.generation, event.data["action"]) for event in events] == [
        (1, 1, "1"), (2, 2, "2"), (3, 3, "3"),
    ]  # fmt: skip
    assert all(event.time <= called for event in events)


def test_an_event_that_cannot_be_written_is_told_on_stderr_and_ends_nothing(tmp_path, monkeypatch, capsys):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LineFile, "append", full)
    log = NonBlockingEventLog(tmp_path / "events.jsonl", "agent-0000", 1)
    log.write(EventKind.DECISION, action="restart")
    log.close()
    told = capsys.readouterr().err
    assert "restart" in told
    assert "is lost: [Errno 28] No space left on device" in told


def test_the_event_of_a_drill_is_written_before_what_it_orders_can_kill_the_agent(tmp_path, monkeypatch):
    append, gate = LineFile.append, Gate()
    path = tmp_path / "events.jsonl"

    def slow(file: LineFile, line: str) -> None:
        gate.write(line)
        append(file, line)

    monkeypatch.setattr(LineFile, "append", slow)
    log = NonBlockingEventLog(path, "agent-0000", 1)
    threading.Timer(0.1, gate.open).start()
    log.write(EventKind.DRILL, kind="kill-agent", rank=None, step=3)
    assert [event.kind for event in read_events(path)[0]] == ["drill"]
    log.close()


def test_words_on_stderr_do_not_wait_for_a_log_that_hangs(tmp_path, monkeypatch):
    shown, fifo = tmp_path / "0.err", tmp_path / "agent.log"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    filler = os.open(fifo, os.O_WRONLY)
    fill(filler)
    with shown.open("w") as stderr, monkeypatch.context() as replaced:
        replaced.setattr(sys, "stderr", stderr)
        both = copy_stderr_to_log(filler)
        sys.stderr.write("one\n")
        sys.stderr.write("two\n")
        assert sys.stderr.fileno() == stderr.fileno()
        settle(both, 0.2)
    assert shown.read_text() == "one\ntwo\n"
    heard = b""
    os.set_blocking(reader, True)
    while not heard.endswith(b"one\ntwo\n"):
        heard += os.read(reader, 1 << 16).lstrip(b"\n")
    os.close(reader)
    os.close(filler)


def test_a_hang_is_ended_although_evidence_events_and_words_hang(tmp_path, monkeypatch):
    back, stuck = threading.Event(), threading.Event()
    found = [Incident(
        name="g001-stopped", judgement=HangJudgement(verdict=HangVerdict.HUNG, reason="rank 1 is stopped", culprit=1),
        began=0.0, quiet=1.0, until=0.0, waits=set(),
    )]  # fmt: skip
    monkeypatch.setattr(HangDetector, "look", lambda *_: found.pop() if stuck.is_set() and found else None)
    monkeypatch.setattr(HangDetector, "moved_since", lambda *_: False)
    monkeypatch.setattr(job_monitor, "write_verdict", lambda *_, **__: back.wait(60))
    monkeypatch.setattr(LineFile, "append", lambda *_: back.wait(60))
    read, write = os.pipe()
    fill(write)
    stderr = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stderr", stderr)
    words = copy_stderr_to_log(os.open(tmp_path / "agent.log", os.O_WRONLY | os.O_CREAT))

    async def script() -> None:
        async with Scene(tmp_path, log=NonBlockingEventLog, verdict=0.2).led() as scene:
            try:
                peers = [await scene.join(node) for node in (0, 1)]
                await hear(peers[1], agents.StartGeneration)
                stuck.set()
                await hear(peers[1], agents.KillGeneration, 5)
                for _ in range(2):
                    await hear(peers[1], agents.Ping, 5)
            finally:
                back.set()
                drain(read)

    asyncio.run(script())
    assert "TimeoutError" in until(lambda: (tmp_path / "agent.log").read_text(), 30)
    settle(words)
    stderr.close()
    os.close(read)


_SLOW = """
import threading
from trainer.agent import main
from trainer.agent.processes import background_tasks
from trainer.protocol.logs.line_file import LineFile
append = LineFile.append
def slow(file, line):
    threading.Event().wait({seconds})
    append(file, line)
LineFile.append = slow
main.settle.__defaults__ = ({limit},)
"""
"""What agents run first."""


def test_a_normal_end_loses_no_event_of_a_slow_file_system(job: Callable[..., LocalJob]):
    work = job(nodes=2, ranks=1).start(environ={FIRST: _SLOW.format(seconds=0.1, limit=20)})
    work.ends(0, 0)
    assert work.events(EventKind.ATTEMPT_ENDED), work.story()
    for path in work.attempt.events.glob("*.jsonl"):
        events, _ = read_events(path)
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert len(work.events(EventKind.RANK_EXITED)) == 2


def test_a_job_ends_as_it_should_although_its_events_hang(job: Callable[..., LocalJob]):
    work = job(nodes=2, ranks=1).start(environ={FIRST: _SLOW.format(seconds=600, limit=0.3)})
    work.ends(0, 0)
    assert work.outcome().exit_code == 0
    assert work.events() == []
    said = work.attempt.agent_log(0).read_text()
    assert "is lost: its file hung at exit" in said
    assert said in (Path(work.attempt.submission) / "0.err").read_text()
